"""The exit of a worker process, as a fact."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Final

__all__ = ["SHORTAGES", "Exit"]

SHORTAGES: Final = frozenset(
    getattr(errno, name)
    for name in ("EAGAIN", "ENOMEM", "EMFILE", "ENFILE", "ENOSPC", "ENOBUFS", "ETOOMANYREFS")
)
"""Errors that mean a resource is exhausted now and may be available again in a moment."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How a worker process ended: what is known when the machine has to decide, and no more.

    `signal` is a name. A worker that died because its nursery (the process that forks the workers)
    died has neither a signal nor an exit code.
    """

    at: float  # monotonic time at which the exit was reported
    kind: str = "exited"  # or "crashed", "killed", "stalled", "unkillable", "start-failed"
    signal: str | None = None
    exitcode: int | None = None
    errno: int | None = None  # of a start that failed
    renewed: bool = False  # it was alive, and was ended: its nursery was replaced, or it moves
    with_nursery: bool = False  # it died because its nursery died
    nursery_killed: bool = False  # that nursery was killed from outside
    nursery: tuple[str, str] = ("", "")  # how that nursery ended, and its traceback
    unexplained: bool = False  # killed or not, nothing says how its process ended
    by_itself: bool = False  # it sent itself the signal that ended it
    memory: bool = False  # memory was short: a counter of the kernel or its own size shows it
    inherited: bool = False  # it stalled on a lock that was held when it was forked
    task: int | None = None  # the number of the task it was working on
    position: int | None = None  # the sample of that task
    step: str = "unknown"  # what it was doing with that sample
    seconds: float | None = None  # since this step began
    stack: str = ""
    stuck: int = 0  # abandoned workers of this program that still run, this one included
    no_way: str = ""  # why its stream cannot be continued, if more of it was to come

    @property
    def from_outside(self) -> bool:
        """Whether another process may have sent the SIGKILL or SIGTERM that ended it."""
        if self.kind != "killed" or self.by_itself:
            return False
        return self.signal is not None or self.nursery_killed or self.unexplained

    @property
    def for_memory(self) -> bool:
        return self.memory and self.from_outside

    @property
    def unproven(self) -> bool:
        """Whether it may have been killed from outside, and there is no evidence of the reason."""
        return self.from_outside and not self.memory

    @property
    def shortage(self) -> bool:
        """Whether the process could not be started because a resource was exhausted."""
        return self.errno in SHORTAGES

    @property
    def catching_up(self) -> bool:
        """For a process that had started: whether it had not reached the state of its predecessor
        yet."""
        return self.step in ("start-up", "replay")
