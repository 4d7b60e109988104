"""One thing that went wrong with a worker, and what was done about it."""

from __future__ import annotations

import os
import signal as signals
from dataclasses import dataclass
from typing import Any

__all__ = ["Incident", "describe_end", "describe_status"]


@dataclass(frozen=True, slots=True)
class Incident:
    """A death, stall or failed start of a worker.

    ``print(incident)`` tells it in one line; the fields tell it to a program.
    """

    cause: str
    """``killed``, ``crashed``, ``exited``, ``stalled``, ``unkillable``, ``start-failed``."""
    worker_id: int
    pid: int | None
    signal: str | None
    """The name of the signal it died of, such as ``"SIGSEGV"``."""
    exitcode: int | None
    """As :mod:`multiprocessing` gives it: negative for a signal."""
    batch: int | None
    """The number of the batch in flight, counted from 0 in its epoch."""
    sample: Any
    """The index of the sample in flight, as the sampler gave it."""
    position: int | None
    """The place of that sample in its batch."""
    step: str
    """What it was doing: boot, start-up, fetch, collate, send, replay, idle, stop."""
    stack: str
    """Its Python stack, if it left one."""
    action: str
    """What was done: ``replaced, nothing lost``, ``replaced; the sample is given up``, ``the sample
    is given up``, ``none needed``, ``gave up``."""
    time: float
    """When it was noticed, in seconds since the epoch."""

    def __str__(self) -> str:
        return (
            f"worker {self.worker_id} (pid {self.pid}) {self.what()}{self.where()}; {self.action}"
        )

    def what(self) -> str:
        """The death itself, in words."""
        if self.cause == "stalled":
            return "made no progress and was killed"
        if self.cause == "unkillable":
            return "made no progress and cannot even be killed; the run goes on without it"
        return describe_end(self.signal, self.exitcode)

    def where(self) -> str:
        """What it was doing then, in words."""
        if self.step == "fetch" and self.position is not None:
            name = f"sample {self.sample!r}" if self.sample is not None else "a sample"
            return f" while loading {name} (position {self.position} of batch {self.batch})"
        words = {
            "boot": " while it was starting",
            "start-up": " while it was starting",
            "fetch": f" while loading batch {self.batch}",
            "collate": f" while collating batch {self.batch}",
            "send": f" while sending batch {self.batch}",
            "replay": " while catching up with its predecessor",
            "idle": " while it had nothing to do",
            "stop": " while it was stopping",
        }
        return words.get(self.step, "")


_SIGNALS = {
    "SIGKILL": "was killed",
    "SIGTERM": "was terminated",
    "SIGSEGV": "crashed with a segmentation fault",
    "SIGBUS": "crashed with a bus error",
    "SIGABRT": "aborted",
    "SIGFPE": "crashed with an arithmetic error",
    "SIGILL": "crashed on an illegal instruction",
    "SIGXCPU": "used up its CPU time limit",
}
_OUTSIDE = {"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP"}


def describe_end(signal: str | None, exitcode: int | None) -> str:
    """How a process ended, in words that follow its name."""
    if signal is not None:
        words = _SIGNALS.get(signal, "died of a signal")
        return f"{words} ({signal})"
    if exitcode is None:
        return "disappeared"
    return f"exited by itself with code {exitcode}"


def describe_status(status: int | None) -> tuple[str, str | None, int | None]:
    """Cause, signal name and exit code of a wait status."""
    if status is None:
        return "killed", None, None
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name = signals.Signals(number).name
        except ValueError:
            name = f"signal {number}"  # a real-time signal without a name
        return ("killed" if name in _OUTSIDE else "crashed"), name, -number
    return "exited", None, os.WEXITSTATUS(status)
