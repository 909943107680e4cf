"""What counts as passed: the baseline, the failures that are expected, and the JUnit file."""

from __future__ import annotations

import json
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

from rank_processes import Result


def passing(baseline: Path) -> set[str]:
    """The tests that passed when `baseline` was written by --json."""
    tests: dict[str, str] = json.loads(baseline.read_text())["tests"]
    return {name for name, status in tests.items() if status == "pass"}


def expected_failures(path: Path, section: str, world_size: int) -> dict[str, str]:
    """Test and reason. A key `name@4` holds at that world size only."""
    entries: dict[str, str] = tomllib.loads(path.read_text()).get(section, {})
    expected = {}
    for key, reason in entries.items():
        name, _, only_at = key.partition("@")
        if not only_at or int(only_at) == world_size:
            expected[name] = reason
    return expected


def judge(result: Result, *, expected: str | None, may_skip: bool) -> Result:
    """An expected failure is skipped, with its reason; one that passes, and a test that is skipped
    though the baseline says that it can run, have failed."""
    if expected is not None:
        if result.status == "pass":
            reason = f"passes, but is listed as failing ({expected}): take it off the list"
            return Result("fail", reason, seconds=result.seconds)
        return Result("skip", f"expected to fail: {expected}", seconds=result.seconds)
    if result.status == "skip" and not may_skip:
        reason = f"skipped ({result.reason}), but it runs on gloo"
        return Result("fail", reason, seconds=result.seconds)
    return result


def write_junit(path: Path, title: str, results: dict[str, Result]) -> None:
    suite = ET.Element("testsuite", name=title)
    for name, result in results.items():
        seconds = f"{result.seconds:.2f}"
        case = ET.SubElement(suite, "testcase", classname=title, name=name, time=seconds)
        if result.status == "fail":
            ET.SubElement(case, "failure").text = _printable(result.detail or result.reason)
        elif result.status == "skip":
            ET.SubElement(case, "skipped", message=_printable(result.reason))
    ET.ElementTree(suite).write(path, encoding="unicode")


def _printable(text: str) -> str:
    return "".join(c for c in text if c.isprintable() or c in "\n\t")
