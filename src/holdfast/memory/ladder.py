"""How large a worker may grow, and what it does on the way there.

Above 70 % of its limit it collects garbage and gives free memory back; above 85 % it does so before
it takes another task; above the limit it goes, and a fresh process takes its place. Each rung is
climbed once: what did not help is tried again only when it has grown by another tenth, or has been
down in between. A worker whose memory is simply in use must not spend its time collecting.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from holdfast.memory.shares import LEAST, shares

__all__ = ["Allowance", "Ladder", "Rung", "allowance"]

TIDY: Final = 0.70
CLEAN: Final = 0.85
BACK: Final = 0.60  # below this all is forgotten
STEP: Final = 0.10
ALONE: Final = 0.8
"""The part of the free memory that one worker may ask for, in a group with a limit: beyond it the
kernel would kill. The rest is what workers have from the start, and batches in flight."""
BEYOND: Final = 64 << 20
ROOM: Final = 256 << 20
"""What an allocation may go beyond a limit at least, given as a number and automatic: stacks of
threads and the like count as asked for, though nobody uses them."""


class Rung(Enum):
    """What to do now."""

    NOTHING = "nothing"
    TIDY = "tidy"
    CLEAN = "clean"
    GO = "go"


@dataclass(frozen=True)
class Allowance:
    """What one worker is told."""

    private: int | None  # bytes of its own after which it is replaced
    beyond: int | None = None  # bytes more, at which an allocation fails; None for never


def allowance(
    given: int | str | None,
    *,
    free: int | None,
    confined: bool,
    workers: int,
    ranks: int,
    batch: int = 0,
) -> Allowance:
    """From the option and what is free. In a group with a limit even "auto" stops a sample that
    asks for more than there is: the kernel would kill for it. On a whole machine it does not,
    because mappings of large files count too, and the kernel refuses what is absurd by itself."""
    if given is None:
        return Allowance(None)
    if isinstance(given, int):
        return Allowance(given, max(BEYOND, given // 4))
    if free is None:
        return Allowance(None)
    private = max(LEAST, shares(free // ranks, workers, batch).worker)
    return Allowance(private, max(int(free * ALONE) - private, ROOM) if confined else None)


class Ladder:
    """Private bytes in, what to do out."""

    def __init__(self, limit: int, start: int = 0) -> None:
        """`start`: what it had before its first batch. Over the limit already, a successor would
        be no better: then it may grow by half the limit."""
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
        return Rung.CLEAN if level >= CLEAN else Rung.TIDY
