"""Runs the checks and test suites: a line for each, what failed in full, and the total at the end.

    suites.py [SUITE...]    some of: lint tidy release python conformance gpu demo bench asan tsan

Without arguments it runs all but the slow one (tidy), and counts that as skipped.

The last line is `N passed, N failed, N skipped`, over everything that ran. A build that breaks, a
runner that crashes, and a suite without any test count as failures. The exit status is 0 if nothing
failed. Full output is kept in build/logs.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
LOGS = BUILD / "logs"
VENV = ROOT / ".venv" / "bin"
JOBS = str(os.cpu_count() or 1)
LIMIT_S = 30 * 60  # for one command: each test has its own limit, this one is for the unforeseen


@dataclass
class Outcome:
    """What came of one suite."""

    passed: int = 0
    failures: dict[str, str] = field(default_factory=dict)  # name of the test: its output
    skips: dict[str, str] = field(default_factory=dict)  # name of the test: the reason


Suite = Callable[[], Outcome]


def run(log: str, command: Iterable[str | Path], **environment: str) -> tuple[int, str]:
    """Runs `command` in the root folder; returns its exit status and all that it printed."""
    path = LOGS / f"{log}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("GRADSYNC_")}
    with path.open("wb") as output:
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=ROOT,
            env=inherited | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
            output.write(f"\nEnded after {LIMIT_S} s.\n".encode())
    return status, path.read_text(errors="replace")


def check(name: str, command: Iterable[str | Path]) -> Outcome:
    """A command that is one test by itself."""
    status, output = run(name, command)
    return Outcome(passed=1) if status == 0 else Outcome(failures={name: output})


def read_junit(path: Path) -> Outcome:
    """The outcome in a JUnit file of ctest's or pytest's."""
    outcome = Outcome()
    for case in ET.parse(path).iter("testcase"):
        name = ".".join(filter(None, [case.get("classname"), case.get("name")]))
        if case.get("classname") == case.get("name"):  # ctest's
            name = case.get("name", "")
        printed = case.findtext("system-out", "")
        faults = [*case.iter("failure"), *case.iter("error")]
        skipped = case.find("skipped")
        if faults:
            outcome.failures[name] = "\n".join([*(fault.text or "" for fault in faults), printed])
        elif skipped is not None or case.get("status") == "disabled":
            outcome.skips[name] = reason_of_skip(skipped, printed)
        elif case.get("status") in (None, "run"):
            outcome.passed += 1
        else:
            outcome.failures[name] = printed or f"ctest says: {case.get('status')}"
    return outcome


def reason_of_skip(skipped: ET.Element | None, printed: str) -> str:
    if skipped is None:
        return "disabled in the source"
    # GoogleTest prints `file:line: Skipped`, then the reason, then `[  SKIPPED ]`.
    found = re.search(r": Skipped\n(.*?)\n+\[  SKIPPED \]", printed, re.DOTALL)
    return found[1].strip() if found else skipped.get("message", "no reason given")


def settle(outcome: Outcome, name: str, status: int, output: str) -> Outcome:
    """A runner that failed without naming a test, or ran none, is a failure itself."""
    if not outcome.failures and (status != 0 or outcome.passed + len(outcome.skips) == 0):
        outcome.failures[f"{name} (exit status {status})"] = output
    return outcome


def ctest(name: str, build: Path, wrapper: Iterable[str] = (), **environment: str) -> Outcome:
    """All tests of a build tree."""
    junit = LOGS / f"{name}.xml"
    junit.unlink(missing_ok=True)
    arguments: list[str | Path] = [
        "--test-dir",
        build,
        "-j",
        JOBS,
        "--output-on-failure",
        "--no-tests=error",
    ]
    arguments += ["--test-output-size-passed", "65536", "--test-output-size-failed", "1048576"]
    status, output = run(
        name, [*wrapper, "ctest", *arguments, "--output-junit", junit], **environment
    )
    return settle(read_junit(junit) if junit.exists() else Outcome(), name, status, output)


def pytest(name: str, *paths: Path) -> Outcome:
    junit = LOGS / f"{name}.xml"
    junit.unlink(missing_ok=True)
    status, output = run(
        name,
        [VENV / "python", "-m", "pytest", "-ra", "--timeout=300", f"--junitxml={junit}", *paths],
    )
    return settle(read_junit(junit) if junit.exists() else Outcome(), name, status, output)


def conformance(section: str, world_size: int, *options: str) -> Outcome:
    """PyTorch's own tests that pass over gloo, over our backend or with our wrapper as well."""
    name = f"conformance-{section}-{world_size}"
    junit = LOGS / f"{name}.xml"
    junit.unlink(missing_ok=True)
    folder = ROOT / "tests/conformance"
    suite = section.partition("-")[0]
    command: list[str | Path] = [VENV / "python", folder / "run_conformance.py", suite]
    command += ["--baseline", folder / f"baselines/{suite}_ws{world_size}.json"]
    command += ["--expected", folder / "expected_failures.toml", "--section", section]
    command += ["--world-size", str(world_size), "--timeout", "300", "--junit", junit, *options]
    status, output = run(name, command)
    return settle(read_junit(junit) if junit.exists() else Outcome(), name, status, output)


CONFORMANCE = {  # sections of expected_failures.toml
    "collectives": ("--backend", "gradsync", "--import", "gradsync.torch"),
    "ddp-torch": ("--backend", "gradsync", "--import", "gradsync.torch"),
    "ddp-gradsync": (
        *("--backend", "gradsync", "--import", "gradsync.torch"),
        *("--ddp", "gradsync.torch:DistributedDataParallel"),
    ),
    "ddp-gradsync-gloo": (
        *("--backend", "gloo", "--import", "gradsync.torch"),
        *("--ddp", "gradsync.torch:DistributedDataParallel"),
    ),
}


def sanitized(preset: str, **environment: str) -> Outcome:
    """Builds a preset and runs its tests, with the address space where the sanitizer expects it."""
    fixed = ["setarch", "--addr-no-randomize"]
    wrapper = fixed if subprocess.run([*fixed, "true"], check=False).returncode == 0 else []
    for step, command in (
        ("configure", ["cmake", "--preset", preset]),
        ("build", ["cmake", "--build", "--preset", preset, "--", "-j", JOBS]),
    ):
        status, output = run(f"{preset}-{step}", [*wrapper, *command], **environment)
        if status != 0:
            return Outcome(failures={f"{preset}: {step}": output})
    return ctest(preset, ROOT / f"build-{preset}", wrapper, **environment)


def lint() -> dict[str, Suite]:
    folders = [ROOT / name for name in ("shm", "client", "server", "tests", "scripts", ".ci")]
    files = sorted(path for folder in folders for path in folder.rglob("*") if path.is_file())
    cxx = [path for path in files if path.suffix in {".c", ".cc", ".h", ".hpp"}]
    shell = [path for path in files if path.suffix == ".sh" or is_shell(path)]
    python = [path for path in files if path.suffix == ".py"]
    # mypy knows one module of a name, and pytest wants each folder's to be called so.
    typed = [path for path in python if path != ROOT / "client/torch/gpu_tests/conftest.py"]
    commands: dict[str, list[str | Path]] = {
        "clang-format": ["clang-format", "--dry-run", "--Werror", *cxx],
        "shellcheck": ["shellcheck", "--external-sources", *shell],
        "ruff": [VENV / "ruff", "check", "--no-cache", *python],
        "ruff-format": [VENV / "ruff", "format", "--check", "--no-cache", *python],
        "mypy": [VENV / "mypy", "--cache-dir", BUILD / "mypy", *typed],
    }
    return {name: partial(check, name, command) for name, command in commands.items()}


def is_shell(path: Path) -> bool:
    with path.open("rb") as file:
        return bool(re.match(rb"#!.*\b(ba)?sh\b", file.readline()))


# What each argument stands for: suites by their titles.
GROUPS: dict[str, Callable[[], dict[str, Suite]]] = {
    "lint": lint,
    "tidy": lambda: {
        "clang-tidy": partial(
            check, "clang-tidy", [VENV / "python", ROOT / "scripts" / "tidy.py", BUILD]
        )
    },
    "release": lambda: {"ctest, release": partial(ctest, "release", BUILD)},
    "python": lambda: {
        "pytest, scripts": partial(
            pytest, "pytest-scripts", ROOT / "scripts", ROOT / "tests/conformance"
        ),
        "pytest, gradsync.torch": partial(pytest, "pytest-torch", ROOT / "client/torch/tests"),
        "pytest, planted faults": partial(pytest, "pytest-planted", ROOT / "tests/planted"),
        "pytest, gradsync.tensorplay": partial(
            pytest, "pytest-tensorplay", ROOT / "client/tensorplay/tests"
        ),
    },
    "conformance": lambda: {
        f"torch's tests, {section}, {size} ranks": partial(conformance, section, size, *options)
        for section, options in CONFORMANCE.items()
        for size in (2, 4)
    },
    "gpu": lambda: {
        "pytest, bundle and gpu-check": partial(pytest, "pytest-gpu", ROOT / "tests/gpu")
    },
    "demo": lambda: {"demo": partial(check, "demo", [ROOT / "scripts/demo", "--quick"])},
    "bench": lambda: {"bench": partial(check, "bench", [ROOT / "scripts/bench", "--quick"])},
    "asan": lambda: {
        "ctest, address and undefined-behaviour sanitizers": partial(
            sanitized, "asan", UBSAN_OPTIONS="print_stacktrace=1"
        )
    },
    "tsan": lambda: {
        "ctest, thread sanitizer": partial(
            sanitized, "tsan", TSAN_OPTIONS="second_deadlock_stack=1"
        )
    },
}


SLOW = ("tidy",)  # as long as all the others together


def not_run(names: Iterable[str]) -> Outcome:
    return Outcome(skips={name: f"slow; run it by scripts/test {name}" for name in names})


def report(title: str, outcome: Outcome, seconds: float) -> None:
    counts = f"{outcome.passed} passed"
    if outcome.failures:
        counts += f", {len(outcome.failures)} failed"
    if outcome.skips:
        counts += f", {len(outcome.skips)} skipped"
    verdict = "FAIL" if outcome.failures else "ok"
    print(f"{verdict:5}{title:52}{counts:>28}{seconds:9.1f} s", flush=True)
    for name, output in outcome.failures.items():
        print(f"\n--- failed: {name}\n{output.rstrip()}\n", flush=True)


def main() -> int:
    names = sys.argv[1:] or [name for name in GROUPS if name not in SLOW]
    if unknown := set(names) - set(GROUPS):
        print(f"no such suite: {', '.join(sorted(unknown))}\n{__doc__}", file=sys.stderr)
        return 2
    outcomes: list[Outcome] = []
    for name in names:
        for title, suite in GROUPS[name]().items():
            start = time.monotonic()
            outcomes.append(suite())
            report(title, outcomes[-1], time.monotonic() - start)
    if not sys.argv[1:]:
        outcomes.append(not_run(SLOW))

    print()
    for outcome in outcomes:
        for test, reason in outcome.skips.items():
            print(f"skipped: {test}: {reason}")
    failures = [test for outcome in outcomes for test in outcome.failures]
    for test in failures:
        print(f"failed: {test}")
    passed = sum(outcome.passed for outcome in outcomes)
    skipped = sum(len(outcome.skips) for outcome in outcomes)
    print(f"{passed} passed, {len(failures)} failed, {skipped} skipped", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
