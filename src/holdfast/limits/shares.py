"""How "auto" divides the free memory: between batches in flight and the growth of each worker.

One function computes both, because both are used up at the same time by a dataset that leaks *and*
has large samples. The sum of the shares, counted as they are really used, is never more than the
free memory. There is one exception. With so many workers that `LEAST` for each is more than half of
the free memory, `worker_limit.allowance` gives them `LEAST` all the same: otherwise they could not
work at all.

How memory is really used:

- a worker has some memory of its own before its first batch (`BASE`);
- a byte in flight takes up to two: samples are made outside of the arena before they are copied
  there, and an arena keeps some memory that it no longer uses;
- a batch that is larger than the budget is allowed all the same, alone;
- a worker that may not grow at all would be replaced as soon as it starts (`LEAST`);
- the trainer grows too, and a reading of the free memory is a moment old (`RESERVE`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BASE: Final = 8 << 20
"""Bytes of its own that a forked worker has before its first task. For all workers together, at
most a quarter of the free memory is set aside."""
IN_FLIGHT: Final = 0.25
"""The part of the free memory that batches in flight may take, if there is plenty."""
WORKERS: Final = 0.40
"""The part by which all workers of a loader together may grow."""
TAKES: Final = 2
"""Bytes of memory that a byte in flight takes at most."""
RESERVE: Final = 1 - TAKES * IN_FLIGHT - WORKERS
LARGEST: Final = 0.375
"""The part of the usable memory that is set aside for one batch at most, however large it is:
workers need memory too, and the batch may never come."""
LEAST: Final = 8 << 20
"""Bytes by which every worker should be able to grow. With less it would be replaced as soon as it
starts. Where memory is short, less is in flight instead."""
CROWDED: Final = 0.75
"""The part of the usable memory that `LEAST` for all workers may take at most."""


@dataclass(frozen=True)
class Shares:
    """In bytes."""

    in_flight: int  # for all loaders of this process
    worker: int  # by how much each worker may grow
    base: int  # what is set aside for each worker's start


def shares(room: int, workers: int, batch: int = 0) -> Shares:
    """For a process that may use `room` bytes more, with `workers` that have not started yet.

    `batch` is the size of the largest batch so far.
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
