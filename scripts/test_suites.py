"""suites.py must count everything, and take no kind of trouble for success."""

from __future__ import annotations

from pathlib import Path

import pytest
import suites

CTEST = """<?xml version="1.0" encoding="UTF-8"?>
<testsuite name="Linux-c++" tests="4" failures="1" disabled="1" skipped="1">
  <testcase name="Ring.Wraps" classname="Ring.Wraps" time="0.1" status="run">
    <system-out>fine</system-out>
  </testcase>
  <testcase name="Ring.Breaks" classname="Ring.Breaks" time="0.1" status="fail">
    <failure message=""/>
    <system-out>expected 1, got 2</system-out>
  </testcase>
  <testcase name="Ring.Skips" classname="Ring.Skips" time="0.1" status="notrun">
    <skipped message="SKIP_REGULAR_EXPRESSION_MATCHED"/>
    <system-out>ring_test.cc:7: Skipped
needs two cores

[  SKIPPED ] Ring.Skips (0 ms)</system-out>
  </testcase>
  <testcase name="Ring.DISABLED_Off" classname="Ring.DISABLED_Off" status="disabled"/>
</testsuite>
"""

PYTEST = """<testsuites><testsuite name="pytest">
  <testcase classname="tests.test_ddp" name="test_averages" time="0.1"/>
  <testcase classname="tests.test_ddp" name="test_raises" time="0.1">
    <failure message="assert 1 == 2">assert 1 == 2</failure>
  </testcase>
  <testcase classname="tests.test_ddp" name="test_cannot_start" time="0.1">
    <error message="no daemon">no daemon</error>
  </testcase>
  <testcase classname="tests.test_ddp" name="test_later" time="0.1">
    <skipped message="needs a GPU">test_ddp.py:3: needs a GPU</skipped>
  </testcase>
</testsuite></testsuites>
"""


def read(tmp_path: Path, text: str) -> suites.Outcome:
    path = tmp_path / "junit.xml"
    path.write_text(text)
    return suites.read_junit(path)


def test_ctest_outcomes_are_counted_with_output_and_reasons(tmp_path: Path) -> None:
    outcome = read(tmp_path, CTEST)
    assert outcome.passed == 1
    assert "expected 1, got 2" in outcome.failures["Ring.Breaks"]
    assert outcome.skips == {
        "Ring.Skips": "needs two cores",
        "Ring.DISABLED_Off": "disabled in the source",
    }


def test_ctest_case_that_could_not_run_is_a_failure(tmp_path: Path) -> None:
    text = '<testsuite><testcase name="a" classname="a" status="notrun"/></testsuite>'
    assert list(read(tmp_path, text).failures) == ["a"]


def test_pytest_outcomes_are_counted_with_output_and_reasons(tmp_path: Path) -> None:
    outcome = read(tmp_path, PYTEST)
    assert outcome.passed == 1
    assert set(outcome.failures) == {
        "tests.test_ddp.test_raises",
        "tests.test_ddp.test_cannot_start",
    }
    assert outcome.skips == {"tests.test_ddp.test_later": "needs a GPU"}


@pytest.mark.parametrize(("status", "passed"), [(1, 3), (-11, 3), (0, 0)])
def test_runner_that_crashes_or_finds_no_test_is_a_failure(status: int, passed: int) -> None:
    outcome = suites.settle(suites.Outcome(passed=passed), "ctest", status, "what it printed")
    assert list(outcome.failures.values()) == ["what it printed"]


def test_runner_whose_failures_are_known_is_not_counted_twice() -> None:
    outcome = suites.Outcome(passed=3, failures={"a": "why"})
    assert suites.settle(outcome, "ctest", 8, "").failures == {"a": "why"}


def test_check_reports_the_output_of_a_command_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suites, "LOGS", tmp_path)
    outcome = suites.check("complains", ["sh", "-c", "echo wrong; exit 3"])
    assert outcome.passed == 0
    assert outcome.failures == {"complains": "wrong\n"}


def test_command_that_does_not_end_is_ended_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suites, "LOGS", tmp_path)
    monkeypatch.setattr(suites, "LIMIT_S", 0.1)
    assert suites.check("sleeps", ["sleep", "60"]).failures
