"""What "auto" promises of the memory there is: to batches in flight, and to each worker.

It is one function, because the promises are kept at the same time: a dataset that leaks *and* has
large samples takes all that either of them allows. What is promised, reckoned as it is really used,
is never more than the room. (Where workers are so many that `LEAST` for each is more than half of
the room they are told `LEAST` all the same, by `ladder.allowance`: nothing would get done else.)

How it is really used:

- a worker has some memory of its own before its first batch (`BASE`);
- a byte in flight takes up to two: samples are made outside of the arena before they are copied
  there, and an arena keeps some of what it had in use;
- a batch that is larger than the budget passes all the same, alone;
- a worker that could not grow by a little would be replaced for having begun (`LEAST`);
- the trainer grows too, and so do readings that are a moment old (`RESERVE`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["BASE", "IN_FLIGHT", "LEAST", "RESERVE", "TAKES", "WORKERS", "Shares", "shares"]

BASE: Final = 8 << 20
"""Bytes a forked worker has of its own when it has done nothing yet. Where workers are so many that
this alone would fill the room, a quarter of it is set aside for them: nothing would be left."""
IN_FLIGHT: Final = 0.25
"""The part of a large room that batches in flight may take,"""
WORKERS: Final = 0.40
"""and the part that all workers of a loader together may grow by."""
TAKES: Final = 2
"""Bytes that a byte in flight takes at the most."""
RESERVE: Final = 1 - TAKES * IN_FLIGHT - WORKERS
LARGEST: Final = 0.375
"""The part of what can be used at all that one batch is reckoned with, however large it is: workers
have to live too, and it may never come."""
LEAST: Final = 8 << 20
"""By so much every worker should be able to grow, or in a small room it would be replaced for
having begun: rather than that, less is in flight,"""
CROWDED: Final = 0.75
"""but this part of what can be used at all is the most that workers get for it."""


@dataclass(frozen=True)
class Shares:
    """In bytes."""

    in_flight: int  # for all loaders of this process
    worker: int  # by how much each worker may grow
    base: int  # what is set aside for each worker to begin with

    def promised(self, workers: int) -> int:
        """All of it together, as it is really used."""
        return TAKES * self.in_flight + workers * (self.worker + self.base)


def shares(room: int, workers: int, batch: int = 0) -> Shares:
    """For a process that may use `room` bytes more, with so many workers that are not born yet.

    `batch` is the size of the largest batch as far as it is known.
    """
    bases = min(workers * BASE, room / 4)
    usable = room * (1 - RESERVE) - bases
    in_flight = usable * IN_FLIGHT / (1 - RESERVE)
    grown = usable * WORKERS / (1 - RESERVE)
    grown -= TAKES * max(0.0, min(batch, LARGEST * usable) - in_flight)
    least = min(workers * LEAST, CROWDED * usable)
    if grown < least:
        grown, in_flight = least, min(in_flight, (usable - least) / TAKES)
    many = max(1, workers)
    return Shares(max(1, int(in_flight)), max(1, int(grown / many)), int(bases / many))
