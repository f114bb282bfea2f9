"""pytest's side of what a person sees: one line for each test, and the sentence of each that failed. `-p` loads it."""

import sys

import pytest

_WIDTH = 48
_shown: set[str] = set()


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str]:
    """No letters: lines are printed below. What is around a test counts only if it fails."""
    return ("" if report.passed and report.when != "call" else report.outcome), "", ""


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """No line of pytest's own about a stop after the first failure."""
    session.shouldfail = ""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A line when a test has ended."""
    if report.when != "call" and report.passed:
        return
    name = report.location[2].removeprefix("test_")
    if report.when == "teardown" or name in _shown:
        return
    _shown.add(name)
    print(f"{name.replace('[', ' (').replace(']', ')'):{_WIDTH}}{report.outcome}", file=sys.stdout, flush=True)
    if report.failed:
        print(f"\n{report.longrepr}\n", flush=True)
