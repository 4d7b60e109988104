"""Shows the confusion matrices at the end of the run, passed or not."""

from __future__ import annotations

from typing import Any

from tests.autopsy.matrices import MATRICES


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for told in MATRICES:
        terminalreporter.section("injected causes and verdicts")
        terminalreporter.write_line(told)
