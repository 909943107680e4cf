"""A list of expected failures must only be able to shrink, and a baseline hide nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_processes import Result, short
from verdicts import expected_failures, judge, passing, write_junit


@pytest.mark.parametrize(
    ("status", "expected", "may_skip", "verdict"),
    [
        ("pass", None, False, "pass"),
        ("fail", None, True, "fail"),
        ("skip", None, True, "skip"),
        ("skip", None, False, "fail"),
        ("fail", "not yet", False, "skip"),
        ("pass", "not yet", False, "fail"),
    ],
)
def test_what_counts(status: str, expected: str | None, may_skip: bool, verdict: str) -> None:
    result = judge(Result(status, "why"), expected=expected, may_skip=may_skip)
    assert result.status == verdict
    if expected is not None:
        assert expected in result.reason


def test_an_expectation_may_hold_at_one_world_size_only(tmp_path: Path) -> None:
    path = tmp_path / "expected.toml"
    path.write_text('[ddp-torch]\ntest_a = "x"\n"test_b@4" = "y"\n[other]\ntest_c = "z"\n')
    assert expected_failures(path, "ddp-torch", 2) == {"test_a": "x"}
    assert expected_failures(path, "ddp-torch", 4) == {"test_a": "x", "test_b": "y"}
    assert expected_failures(path, "unknown", 4) == {}


def test_a_baseline_names_what_passed(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    path.write_text('{"tests": {"test_a": "pass", "test_b": "fail: why", "test_c": "skip: why"}}')
    assert passing(path) == {"test_a"}


def test_the_junit_file_has_every_test(tmp_path: Path) -> None:
    path = tmp_path / "junit.xml"
    results = {"a": Result("pass"), "b": Result("fail", "why", "in\x00 full"), "c": Result("skip")}
    write_junit(path, "title", results)
    text = path.read_text()
    assert text.count("<testcase ") == 3
    assert "<failure>in full</failure>" in text
    assert text.count("<skipped ") == 1


def test_reasons_say_nothing_of_the_machine() -> None:
    assert short("RuntimeError: [/a/b-c/d.cc:7] no\nmore") == "RuntimeError: [d.cc:7] no"
