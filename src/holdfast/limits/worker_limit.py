"""How large a worker may grow, and what it does on the way there.

Above 70 % of its limit it collects garbage and gives free memory back, before it takes another
task. It does so again only when it has grown by another tenth of the limit, or was below 60 % in
between: a worker whose memory is simply in use must not spend its time collecting. Above the limit
it exits, and a new process takes its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from holdfast.limits.shares import LEAST, shares

TIDY: Final = 0.70
BACK: Final = 0.60  # below this it may tidy up at once again
STEP: Final = 0.10
ALONE: Final = 0.8
"""The part of the free memory that one worker may allocate in a control group with a limit, where
the kernel would kill it beyond that. The rest is for new workers and batches in flight."""
BEYOND: Final = 64 << 20
ROOM: Final = 256 << 20
"""By how much an allocation may at least exceed the limit before it fails: `BEYOND` if the limit is
a number, `ROOM` if it is automatic. Stacks of threads and the like count, though mostly unused."""


class Rung(Enum):
    """What to do now."""

    NOTHING = "nothing"
    TIDY = "tidy"
    GO = "go"


@dataclass(frozen=True)
class Allowance:
    """The memory limits of one worker."""

    private: int | None  # bytes of its own after which it is replaced
    beyond: int | None = None  # bytes over `private` at which allocations fail; None for never


def allowance(
    given: int | str | None,
    *,
    free: int | None,
    confined: bool,
    workers: int,
    ranks: int,
    batch: int = 0,
) -> Allowance:
    """From the option `given` and the free memory. In a control group with a limit, "auto" also
    makes an allocation fail that is larger than the free memory: the kernel would kill the worker
    for it. On a whole machine it does not, because mappings of large files would count too, and the
    kernel refuses absurd sizes by itself."""
    if given is None:
        return Allowance(None)
    if isinstance(given, int):
        return Allowance(given, max(BEYOND, given // 4))
    if free is None:
        return Allowance(None)
    private = max(LEAST, shares(free // ranks, workers, batch).worker)
    return Allowance(private, max(int(free * ALONE) - private, ROOM) if confined else None)


class Ladder:
    """Decides from a worker's private bytes what it does next."""

    def __init__(self, limit: int, start: int = 0) -> None:
        """`start`: private bytes before the first batch. If they are over the limit already, a
        successor's would be too, so the worker may then grow by half the limit."""
        self.raised = start >= limit
        self.limit = start + max(limit // 2, LEAST) if self.raised else limit
        self._tried = 0.0

    def climb(self, private: int) -> Rung:
        level = private / self.limit
        if level >= 1:
            return Rung.GO
        if level < BACK:
            self._tried = 0.0
        if level < TIDY or level < self._tried + STEP:
            return Rung.NOTHING
        self._tried = level
        return Rung.TIDY
