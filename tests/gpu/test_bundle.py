"""scripts/bundle and scripts/gpu-check, as they are used where there are GPUs; here over the
stand-ins."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULE = ROOT / "build/server/local/gradsync_cuda.so"
MOST_BYTES = 60 << 20
# What belongs to the machine on which a bundle is used.
OF_GLIBC = {"linux-vdso.so.1", "libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2"}
OF_GLIBC |= {"librt.so.1", "libresolv.so.2", "ld-linux-x86-64.so.2"}

pytestmark = pytest.mark.skipif(
    not MODULE.exists(), reason="needs the CUDA toolkit: without it the build has no GPU path"
)


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """In an environment that has nothing but what is given."""
    return subprocess.run(
        [str(word) for word in command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def script(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run(ROOT / "scripts" / name, *arguments, PATH="/usr/local/bin:/usr/bin:/bin")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "bundle"
    made = script("bundle", folder)
    assert made.returncode == 0, made.stdout
    return folder


def test_it_is_small_and_has_no_stand_in(bundle: Path) -> None:
    files = [path for path in bundle.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES
    assert not [path for path in files if re.match(r"libcuda|libnccl|.*fake", path.name)]
    assert re.match(r"commit [0-9a-f]{40}\n", (bundle / "MANIFEST").read_text())
    assert (bundle / "lib/gradsync/gradsync_cuda.so").exists()


@pytest.mark.parametrize("name", ["gradsyncd", "gradsyncctl", "gpu_test", "gpu_bench"])
def test_its_programs_find_every_library_in_it(bundle: Path, name: str) -> None:
    listed = run("/usr/bin/ldd", bundle / "bin" / name).stdout
    found = dict(re.findall(r"(\S+) => (\S+)", listed))
    outside = {library for library, path in found.items() if not path.startswith(f"{bundle}/")}
    assert outside <= OF_GLIBC
    assert len(found) > len(outside)


@pytest.mark.parametrize("words", [("gradsyncd", "--version"), ("gradsyncctl", "--help")])
def test_its_programs_start_in_an_empty_environment(bundle: Path, words: tuple[str, str]) -> None:
    started = run(bundle / "bin" / words[0], words[1])
    assert started.returncode == 0, started.stdout
    assert "gradsync" in started.stdout


def test_a_folder_that_is_no_bundle_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    assert script("bundle", tmp_path).returncode != 0
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_gpu_check_runs_to_its_end(bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    checked = script("gpu-check", "--stand-in", "--json", path, bundle)
    assert checked.returncode == 0, checked.stdout
    total = re.search(r"(\d+) passed, 0 failed, (\d+) skipped\n$", checked.stdout)
    assert total, checked.stdout
    assert "stand-in: not a measurement" in checked.stdout
    results = json.loads(path.read_text())
    assert results["stand_in"] is True
    assert sum(part["passed"] for part in results["parts"]) == int(total[1])
    measures = {line["measure"] for line in results["benchmark"]}
    assert measures == {"all_reduce", "latency", "sharing", "host", "step"}
    assert all("seconds" in line for line in results["benchmark"])


def test_gpu_check_fails_with_a_test_that_fails(bundle: Path, tmp_path: Path) -> None:
    broken = tmp_path / "bundle"
    run("/bin/cp", "-r", bundle, broken)
    for name in ("gpu_test", "gpu_bench"):
        (broken / "bin" / name).write_text("#!/bin/sh\nexit 3\n")
    checked = script("gpu-check", "--stand-in", broken)
    assert checked.returncode == 1
    assert re.search(r"[1-9]\d* passed, 2 failed, \d+ skipped\n$", checked.stdout), checked.stdout


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")
def test_gpu_check_without_a_gpu_is_no_pass(bundle: Path) -> None:
    checked = script("gpu-check", bundle)
    assert checked.returncode == 2
    assert "no GPU" in checked.stdout
    assert "passed" not in checked.stdout
