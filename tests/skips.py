"""The skips a run may have. Each is printed with its reason; one that is not listed fails the run.

An expected failure counts as a skip: it is a test that proves nothing.
"""

from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class AllowedSkip:
    """Tests that carry `marker` may skip where `reason` is what they say."""

    marker: str
    reason: str


NEEDS_GPU = AllowedSkip("gpu", "needs a CUDA device")
ALLOWED = (NEEDS_GPU,)


class SkipReport:
    """Collects the skips of one run; a pytest plugin."""

    def __init__(self, allowed: tuple[AllowedSkip, ...] = ALLOWED) -> None:
        self._allowed = allowed
        self._listed: list[str] = []
        self._unlisted: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self._note(report.nodeid, _reason(report), report.keywords)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._note(report.nodeid, _reason(report), {})

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._unlisted and session.exitstatus in (
            pytest.ExitCode.OK,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self._listed:
            terminalreporter.write_line(f"skipped: {line}")
        for line in self._unlisted:
            terminalreporter.write_line(f"skipped, which tests/skips.py does not allow: {line}")

    def _note(self, nodeid: str, reason: str, keywords: "dict[str, object]") -> None:
        is_listed = any(a.marker in keywords and a.reason == reason for a in self._allowed)
        (self._listed if is_listed else self._unlisted).append(f"{nodeid}: {reason}")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if (expected := getattr(report, "wasxfail", None)) is not None:
        return f"expected to fail: {expected}"
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return str(report.longrepr)
