"""Tries gradsync on the GPUs of this machine and measures it, in less than five minutes.

    gpu_check.py [--stand-in] [--json FILE] [BUNDLE]

BUNDLE is a folder that scripts/bundle has made: that in which this file is, else build/bundle,
which is made if need be. Every part has a time limit, and one that fails does not stop the others.
The last line is `N passed, N failed, N skipped`. The exit status is 0 if nothing failed, 1 if
something did, and 2 if there was nothing to try it on.

With --stand-in: over tests/fakes in place of the driver and NCCL. A test of this script.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE.parent / "bench"))

import report  # noqa: E402 - found by the line above

MIB = 1 << 20
# Seconds. The extension is compiled while the tests run, which leave most of the processors alone;
# so all of it, and what comes between, takes less than five minutes.
TESTS_S, ONE_TEST_S, COMPILE_S, TORCH_S, BENCH_S, MPS_S = 100, 60, 140, 55, 55, 30
# Enough to see that everything starts, in both ways of sharing GPUs.
STAND_IN_TESTS = re.compile(
    r"AllReduceSums|BroadcastAndShare|EveryGradientIsAveraged|UnusedParameters"
    r"|ARankThatIsKilled|WithoutDriver|NcclErrorTest.*/0"
)
# Their promises are of time: they have the machine for themselves.
ALONE = re.compile(r"Failure|NcclError")


class UnavailableError(Exception):
    """There is nothing to try gradsync on."""


@dataclass
class Part:
    """What came of one part."""

    title: str
    passed: int = 0
    failures: dict[str, str] = field(default_factory=dict)  # name of the test: its output
    skips: dict[str, str] = field(default_factory=dict)  # name of the test: the reason
    seconds: float = 0

    def check(self, name: str, status: int, output: str) -> bool:
        """Counts a command that is a test by itself."""
        if status == 0:
            self.passed += 1
        else:
            self.failures[name] = f"exit status {status}\n{output}"
        return status == 0


Command = Sequence[str | Path]
Environment = dict[str, str]


def run(
    command: Command, environment: dict[str, str], limit: float, nice: int = 0
) -> tuple[int, str]:
    """Its exit status and all that it printed; whatever it has started ends with it."""
    process = subprocess.Popen(
        [str(word) for word in command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    if nice:
        os.setpriority(os.PRIO_PGRP, process.pid, nice)
    late = ""
    try:
        output, _ = process.communicate(timeout=max(limit, 0.1))
    except subprocess.TimeoutExpired:
        late = f"\nended after {limit:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if late:
        output, _ = process.communicate()
    return process.wait() or (1 if late else 0), output + late


class Machine:
    """Where things are, and the environment in which they are tried."""

    def __init__(self, bundle: Path, stand_in: bool, scratch: Path) -> None:
        self.bundle = bundle
        self.stand_in = stand_in
        self.scratch = scratch
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("GRADSYNC_")}
        self.environment["GRADSYNC_TEST_DAEMON"] = str(bundle / "bin/gradsyncd")
        if stand_in:
            self._use_stand_ins(ROOT / "build")
        elif nccl := find_nccl():
            self.environment["GRADSYNC_NCCL"] = nccl

    def _use_stand_ins(self, build: Path) -> None:
        folders = [build / "tests/fakes/cuda/lib", build / "tests/fakes/nccl/lib"]
        kernels = build / "server/engine/cuda/libgradsync_host_kernels.so"
        for path in (*folders, kernels):
            if not path.exists():
                raise UnavailableError(f"the stand-ins are not built ({path}): run scripts/setup")
        self.environment["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, folders))
        self.environment["GRADSYNC_FAKE_CUDA_KERNELS"] = str(kernels)

    def run(
        self,
        limit: float,
        command: Command,
        environment: Environment | None = None,
        *,
        nice: int = 0,
    ) -> tuple[int, str]:
        return run(command, self.environment | (environment or {}), limit, nice)


def find_nccl() -> str | None:
    """That of torch, where the machine has none of its own."""
    try:
        ctypes.CDLL("libnccl.so.2")
        return None
    except OSError:
        pass
    spec = find_spec("nvidia") and find_spec("nvidia.nccl")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        library = Path(folder) / "lib/libnccl.so.2"
        if library.exists():
            return str(library)
    return None


def count_gpus() -> int:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UnavailableError(f"this machine has no GPU that could be used: {error}") from error
    count = ctypes.c_int(0)
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status != 0 or count.value == 0:
        raise UnavailableError(f"the driver finds no GPU on this machine (its error {status})")
    return count.value


# ---- Parts ---------------------------------------------------------------------------------------


def facts(machine: Machine) -> dict[str, str]:
    """What the numbers are of."""
    found = {
        "processors": str(len(os.sched_getaffinity(0))),
        "linux": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "nccl": machine.environment.get("GRADSYNC_NCCL", "libnccl.so.2"),
    }
    if machine.stand_in:
        return found
    query = "--query-gpu=index,name,driver_version,memory.total,mig.mode.current,compute_mode"
    asked: dict[str, list[str | Path]] = {
        "gpus": ["nvidia-smi", query, "--format=csv,noheader"],
        "topology": ["nvidia-smi", "topo", "-m"],
        "nvcc": ["nvcc", "--version"],
        "g++": ["g++", "--version"],
        "torch": [
            sys.executable,
            "-c",
            "import torch; print(torch.__version__, 'CUDA', torch.version.cuda)",
        ],
    }
    for name, command in asked.items():
        if shutil.which(command[0]) is None:
            found[name] = "not there"
            continue
        found[name] = machine.run(20, command)[1].strip()
    return found


def programs(machine: Machine, part: Part) -> None:
    """That they start at all, with what the bundle has."""
    for words in (["gradsyncd", "--version"], ["gradsyncctl", "--help"]):
        status, output = machine.run(10, [machine.bundle / "bin" / words[0], *words[1:]])
        part.check(" ".join(words), status, output)


def list_tests(machine: Machine, program: Path) -> list[str]:
    status, output = machine.run(20, [program, "--gtest_list_tests"])
    tests: list[str] = []
    suite = ""
    for line in output.splitlines() if status == 0 else []:
        name = line.partition("#")[0].rstrip()
        if name.startswith("  "):
            tests.append(suite + name.strip())
        elif name.endswith("."):
            suite = name
    return tests


def cxx_tests(machine: Machine, part: Part) -> None:
    """Each in a process of its own, as with ctest."""
    program = machine.bundle / "bin/gpu_test"
    end = time.monotonic() + TESTS_S
    tests = list_tests(machine, program)
    if machine.stand_in:
        tests = [test for test in tests if STAND_IN_TESTS.search(test)]
    if not tests:
        part.failures["gpu_test"] = "it lists no test"

    def run_one(test: str) -> tuple[int, str]:
        left = end - time.monotonic()
        if left <= 0:
            return 1, f"not begun within {TESTS_S} s"
        command: Command = [program, f"--gtest_filter={test}"]
        status, output = machine.run(min(left, ONE_TEST_S), command)
        if status == 0 and "[  PASSED  ] 1 test." not in output and "[  SKIPPED ]" not in output:
            return 1, f"neither passed nor skipped\n{output}"
        return status, output

    workers = max(1, min(4, len(os.sched_getaffinity(0)) // 3))
    together = [test for test in tests if not ALONE.search(test)]
    with ThreadPoolExecutor(workers) as pool:
        outcomes = dict(zip(together, pool.map(run_one, together), strict=True))
    for test in tests:
        status, output = outcomes[test] if test in outcomes else run_one(test)
        # GoogleTest prints `file:line: Skipped`, then the reason, then `[  SKIPPED ]`.
        skipped = re.search(r": Skipped\n(.*?)\n+\[  SKIPPED \]", output, re.DOTALL)
        if status == 0 and skipped:
            part.skips[test] = skipped[1].strip()
        else:
            part.check(test, status, output)


class Compilation:
    """Of torch's extension, beside what else is done."""

    def __init__(self, machine: Machine) -> None:
        self._outcome = (1, "")
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._compile, args=(machine,))
        self._thread.start()

    def _compile(self, machine: Machine) -> None:
        start = time.monotonic()
        jobs = max(1, len(os.sched_getaffinity(0)) - 2)
        script = machine.bundle / "scripts/build-extension"
        self._outcome = machine.run(
            COMPILE_S, [script, str(jobs)], {"PYTHON": sys.executable}, nice=10
        )
        self.seconds = time.monotonic() - start

    def wait(self) -> tuple[int, str]:
        self._thread.join()
        return self._outcome


def torch_tests(machine: Machine, part: Part, compilation: Compilation) -> None:
    status, output = compilation.wait()
    name = f"the extension compiles, within {COMPILE_S} s"
    if not part.check(name, status, output):
        return
    bundle = machine.bundle
    path = [str(bundle / "python")]
    if find_spec("pytest") is None:
        path.append(str(bundle / "site-packages"))
    environment = {
        "PYTHONPATH": os.pathsep.join(path),
        "GRADSYNC_DAEMON": str(bundle / "bin/gradsyncd"),
    }
    code = "import torch, gradsync.torch; assert torch.cuda.is_available(), 'torch finds no GPU'"
    command: list[str | Path] = [sys.executable, "-c", code]
    if not part.check("torch loads it, and finds a GPU", *machine.run(40, command, environment)):
        return
    tests = bundle / "src/client/torch/gpu_tests"
    if not tests.is_dir():
        part.skips["gradsync.torch on GPUs"] = "the bundle has no such tests"
        return
    junit = machine.scratch / "torch.xml"
    command = [sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider", tests]
    command += [f"--junitxml={junit}", f"--rootdir={tests}"]
    status, output = machine.run(TORCH_S, command, environment)
    read_junit(part, junit)
    if not junit.exists() or (status != 0 and not part.failures):
        part.failures[f"pytest (exit status {status})"] = output


def read_junit(part: Part, path: Path) -> None:
    for case in ET.parse(path).iter("testcase") if path.exists() else []:
        name = f"{case.get('classname')}.{case.get('name')}"
        faults = [*case.iter("failure"), *case.iter("error")]
        skipped = case.find("skipped")
        if faults:
            part.failures[name] = "\n".join(fault.text or "" for fault in faults)
        elif skipped is not None:
            part.skips[name] = skipped.get("message", "no reason given")
        else:
            part.passed += 1


# ---- The benchmark -------------------------------------------------------------------------------

Line = dict[str, Any]  # of gpu_bench


def bench(machine: Machine, part: Part, lines: list[Line]) -> None:
    measure(machine, part, lines, limit=BENCH_S)
    if machine.stand_in:
        return
    with_mps(machine, part, lines)


def measure(
    machine: Machine,
    part: Part,
    lines: list[Line],
    *,
    limit: float,
    measures: tuple[str, ...] = (),
    mps: Environment | None = None,
) -> None:
    environment = dict(mps or {})
    if machine.stand_in:
        folder = machine.scratch / "machine"
        folder.mkdir()
        environment |= {"GRADSYNC_FAKE_CUDA_DIR": str(folder), "GRADSYNC_FAKE_CUDA_DEVICES": "2"}
        measures = ("--quick", *measures)
    command: Command = [machine.bundle / "bin/gpu_bench", *measures]
    status, output = machine.run(limit, command, environment)
    if mps and status == 2:
        part.skips["under MPS"] = f"not available: {output.strip()}"
        return
    suffix = ", under MPS" if mps else ""
    failed = False
    for text in output.splitlines():
        if not text.startswith("{"):
            continue
        line: Line = json.loads(text) | {"mps": mps is not None}
        lines.append(line)
        name = describe(line) + suffix
        if "failed" in line:
            failed = True
            part.failures[name] = line["failed"]
        elif "skipped" in line:
            part.skips[name] = line["skipped"]
        else:
            part.passed += 1
    if status != 0 and not failed:
        part.failures[f"gpu_bench{suffix}"] = f"exit status {status}\n{output}"


def with_mps(machine: Machine, part: Part, lines: list[Line]) -> None:
    """What trainers that share a GPU have of it where their kernels may overlap."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        part.skips["under MPS"] = "not available: there is no nvidia-cuda-mps-control"
        return
    # Short: there is a socket in it.
    folder = Path(tempfile.mkdtemp(prefix="mps"))
    environment = {
        "CUDA_MPS_PIPE_DIRECTORY": str(folder),
        "CUDA_MPS_LOG_DIRECTORY": str(folder),
    }
    # Not by run(), which would end what it leaves behind.
    started = subprocess.run(
        [control, "-d"],
        env=machine.environment | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=10,
        check=False,
    )
    try:
        if started.returncode != 0:
            status = started.returncode
            part.skips["under MPS"] = f"not available: it does not start (exit status {status})"
            return
        measure(machine, part, lines, limit=MPS_S, measures=("step", "sharing"), mps=environment)
    finally:
        subprocess.run(
            [control],
            env=machine.environment | environment,
            input=b"quit\n",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=10,
            check=False,
        )
        shutil.rmtree(folder, ignore_errors=True)


def describe(line: Line) -> str:
    what = {
        "all_reduce": "all-reduce",
        "latency": "all-reduce, one after the other",
        "sharing": "all-reduce on a shared GPU",
        "host": "the trainer's own time for a bucket",
        "step": "synthetic step, gradients of",
    }[line["measure"]]
    ranks, gpus = line["ranks"], line["gpus"]
    return f"{what}, {report.size(line['bytes'])}, {ranks} ranks on {gpus} GPU{'s' * (gpus > 1)}"


def judge(line: Line) -> report.Target | None:
    """The promise that a line is about, if there is one."""
    what, value = describe(line), line.get("ratio")
    if line["measure"] == "all_reduce":
        return report.Target(what, "of NCCL's bandwidth", value, 0.98, at_least=True)
    if line["measure"] == "sharing":
        return report.Target(what, "of the copy's bandwidth", value, 0.80, at_least=True)
    if line["measure"] == "latency":
        added = line.get("added")
        value = None if added is None else 1e6 * added
        return report.at_most(what, f"us more than {line.get('against', 'NCCL')}", value, 15)
    if line["measure"] == "host":
        seconds = line.get("seconds", {}).get("daemon")
        return report.at_most(what, "us", None if seconds is None else 1e6 * seconds, 5)
    return None


def put(target: report.Target, value: float | None) -> str:
    if value is None:
        return "not measured"
    if target.unit.startswith("of "):
        return f"{100 * value:.0f} % {target.unit}"
    return f"{value:.1f} {target.unit}"


def show_bench(lines: Iterable[Line], stand_in: bool) -> None:
    rows = []
    for line in lines:
        seconds = line.get("seconds", {})
        against = line.get("against")
        target = judge(line)
        beside = "-" if against is None else f"{against}: {report.seconds(seconds[against])}"
        measured, wanted, met = "-", "-", "-"
        if target is not None:
            measured = put(target, target.value)
            wanted = f"at {'least' if target.at_least else 'most'} {put(target, target.limit)}"
            met = "-" if target.value is None else "yes" if target.met() else "NO"
        elif "added" in line:
            measured = f"{report.seconds(line['added'])} more"
        if stand_in:
            measured, met = "not measured", "-"
        name = describe(line) + (", under MPS" if line["mps"] else "")
        rows.append([name, report.seconds(seconds.get("daemon")), beside, measured, wanted, met])
    print(f"\nBenchmark{' (stand-in: not a measurement)' if stand_in else ''}\n")
    report.table(["what", "gradsync", "beside", "measured", "wanted", "met"], rows)


# ---- All of it -----------------------------------------------------------------------------------


def carry_out(parts: list[Part], title: str, body: Callable[[Part], None]) -> None:
    part = Part(title)
    parts.append(part)
    start = time.monotonic()
    try:
        body(part)
    except Exception as error:  # the other parts go on
        part.failures[title] = f"{type(error).__name__}: {error}"
    part.seconds = time.monotonic() - start
    counts = f"{part.passed} passed, {len(part.failures)} failed, {len(part.skips)} skipped"
    verdict = "FAIL" if part.failures else "ok"
    print(f"{verdict:5}{title:40}{counts:>40}{part.seconds:9.1f} s", flush=True)
    for name, output in part.failures.items():
        print(f"\n--- failed: {name}\n{output[-6000:].rstrip()}\n", flush=True)


def find_bundle(named: Path | None) -> Path:
    if named is not None:
        bundle = named.resolve()
    elif (ROOT / "MANIFEST").exists():
        bundle = ROOT
    else:
        bundle = ROOT / "build/bundle"
        if not (bundle / "MANIFEST").exists() and (ROOT / "build/CMakeCache.txt").exists():
            status = subprocess.run([ROOT / "scripts/bundle", bundle], check=False).returncode
            if status != 0:
                raise UnavailableError("scripts/bundle has failed")
    if not (bundle / "MANIFEST").exists():
        raise UnavailableError(
            f"{bundle} is no bundle: make one with scripts/bundle, where it was built"
        )
    return bundle


def check(machine: Machine, parts: list[Part]) -> dict[str, Any]:
    commit = (machine.bundle / "MANIFEST").read_text().splitlines()[0].removeprefix("commit ")
    found = facts(machine)
    print(f"gradsync {commit}")
    for name, text in found.items():
        print(f"  {name}: " + text.replace("\n", "\n    "))
    lines: list[Line] = []
    carry_out(parts, "programs", lambda part: programs(machine, part))
    compilation = None if machine.stand_in else Compilation(machine)
    carry_out(parts, "C++ tests", lambda part: cxx_tests(machine, part))
    if compilation is None:
        carry_out(
            parts,
            "gradsync.torch",
            lambda part: part.skips.update({"gradsync.torch on GPUs": "needs a GPU"}),
        )
    else:
        carry_out(parts, "gradsync.torch", lambda part: torch_tests(machine, part, compilation))
    carry_out(parts, "benchmark", lambda part: bench(machine, part, lines))
    show_bench(lines, machine.stand_in)
    return {
        "commit": commit,
        "stand_in": machine.stand_in,
        "machine": found,
        "parts": [vars(part) for part in parts],
        "benchmark": lines,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stand-in", action="store_true", help="over tests/fakes, without a GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all that came of it")
    parser.add_argument("bundle", nargs="?", type=Path, help="a folder made by scripts/bundle")
    options = parser.parse_args()
    if options.json is None and "OUT" in os.environ:
        options.json = Path(os.environ["OUT"]) / "gpu-check.json"
    parts: list[Part] = []
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        try:
            if not options.stand_in:
                print(f"GPUs: {count_gpus()}")
            machine = Machine(find_bundle(options.bundle), options.stand_in, Path(scratch))
        except UnavailableError as error:
            print(f"gpu-check: {error}", file=sys.stderr)
            return 2
        results = check(machine, parts)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print()
    for part in parts:
        for name, reason in part.skips.items():
            print(f"skipped: {name}: {reason}")
    failures = [name for part in parts for name in part.failures]
    for name in failures:
        print(f"failed: {name}")
    if options.stand_in:
        print("Over stand-ins: this says nothing of GPUs.")
    passed = sum(part.passed for part in parts)
    skipped = sum(len(part.skips) for part in parts)
    print(f"{passed} passed, {len(failures)} failed, {skipped} skipped", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
