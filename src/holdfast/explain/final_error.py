"""Which error a text ends with.

Code that goes on after an error logs it with its traceback, and hours later the run dies of another
error. The error that ended the run is the last traceback, with those it was raised from.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TRACEBACK = "Traceback (most recent call last)"
_CHAINED = (
    "The above exception was the direct cause of the following exception",
    "During handling of the above exception, another exception occurred",
)
_HARMLESS = re.compile(r"Exception ignored in|Exception in thread |Process \S+:$|Error in atexit")
"""A line like this above a traceback means that it did not end the run."""
_CONSEQUENCES = re.compile(
    r"ChildFailedError|DistBackendError|DistNetworkError|SignalException|KeyboardInterrupt|"
    r"SystemExit|CalledProcessError|Process(Exited|Raised)Exception|RayTaskError|"
    r"BrokenPipeError|EOFError|Connection(Reset|Refused|Aborted)?Error|Connection (closed|reset)|"
    r"\bNCCL\b|\bGloo\b|\bgloo\b|\bc10d\b"
)
"""Errors in a process that started, or waited for, the process that failed; or Ctrl-C."""


@dataclass(frozen=True)
class FinalError:
    """The last traceback."""

    first: int  # line, counted from 1
    line: int  # of the error
    text: str

    @property
    def follows(self) -> bool:
        """Whether it is usually the consequence of an error in another process."""
        return _CONSEQUENCES.search(self.text) is not None


@dataclass
class FinalErrors:
    """Finds the last traceback among the lines that it is fed, in order."""

    last: FinalError | None = None
    _first: int | None = None  # of a traceback whose error has not come yet
    _chained: bool = False
    _above: str = ""
    _skipped: bool = False  # this traceback did not end the run

    def feed(self, number: int, line: str) -> None:
        if _TRACEBACK in line:
            self._begin(number, line)
        elif self._first is not None and line and not line[0].isspace():
            if not self._skipped:
                self.last = FinalError(self._first, number, line.strip())
            self._first = None
        elif line.startswith(_CHAINED):
            self._chained = True
        if line.strip():
            self._above = line

    def _begin(self, number: int, line: str) -> None:
        joined = self._chained or line.lstrip().startswith("Original ")
        if joined and self.last is not None and not self._skipped:
            self._first = self.last.first
        else:
            self._first = number
            self._skipped = (joined and self._skipped) or bool(_HARMLESS.search(self._above))
        self._chained = False
