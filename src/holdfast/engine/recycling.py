"""Which worker to replace when memory is short.

When a fresh process takes the place of a worker, all private memory of the worker is freed. So when
memory is nearly full, the largest worker is told to exit after its batch.

- A worker is replaced only for a sufficient amount of private memory (`WORTH_REPLACING`, or less if
  even less is free). Measuring takes milliseconds per worker, so if no worker is large enough, the
  next measurement waits for `SEARCH_PAUSE_FACTOR` times the time that this one took.
- After a replacement there is a gap (`GAP_SECONDS`), so that the next reading shows what it freed.
- The same worker is replaced again only after a back-off, which doubles each time. A worker that
  needs its memory would grow again at once, and if it is the trainer that needs the memory, fresh
  workers do not help. The back-off ends when memory is no longer short, or if the replacement has
  helped: about as much memory became free as the worker had. Much more or much less than that has
  another reason, such as a trainer whose memory use changes with each step.
- If memory is used up so fast that it would run out before a worker can be replaced, the
  replacement is *urgent*. It then begins at a lower fill level and without the gap. The memory of
  workers that are already about to exit counts as free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from holdfast.limits import gauge
from holdfast.limits.pressure import Level, Pace
from holdfast.limits.shares import BASE

GAP_SECONDS: Final = 0.2  # between two replacements
SEARCH_PAUSE_FACTOR: Final = 100
REPLACEMENT_SECONDS: Final = 0.5  # for a worker to finish its batch, exit and free its memory
FIRST_BACK_OFF: Final = 1.0  # seconds
LONGEST_BACK_OFF: Final = 300.0
WORTH_REPLACING: Final = 32 << 20  # private bytes
LEAST_WORTH_REPLACING: Final = 2 * BASE  # the same if less is free, or if it is urgent


@dataclass
class ExitRequest:
    """A worker was told to exit."""

    at: float
    nbytes: int  # its private memory
    fill: float  # how full memory was
    lowest_free: int  # the least memory that was free since then


@dataclass(frozen=True)
class _BackOff:
    until: float = 0.0
    seconds: float = FIRST_BACK_OFF / 2


_NO_BACK_OFF = _BackOff()


class Recycler:
    """Chooses workers of one pool. `full_at` is the fill level above which one is replaced."""

    def __init__(self, pace: Pace, full_at: float) -> None:
        self._pace = pace
        self._full_at = full_at
        self._next_replacement = 0.0  # at the earliest, unless it is urgent
        self._next_search = 0.0  # at the earliest
        self._back_offs: dict[int, _BackOff] = {}
        self._requests: dict[int, ExitRequest] = {}  # until a successor starts
        self._replaced: list[tuple[int, ExitRequest]] = []  # since the last reading

    def choose(
        self,
        reading: gauge.MemoryReading,
        level: Level,
        workers: Iterable[int],
        size_of: Callable[[int], int | None],
        now: float,
    ) -> int | None:
        """The worker to replace now, if any, among those that can be told to exit. `size_of`
        measures the private bytes of one."""
        free = reading.free or 0
        self._check_whether_it_helped(free)
        if level is Level.CALM:
            self._back_offs.clear()
        urgent = level > Level.CALM and self._is_urgent(free, now)
        due = reading.fill >= self._full_at and now >= self._next_replacement
        if now < self._next_search or not (urgent or due):
            return None
        began = time.monotonic()
        sizes = {
            worker: size_of(worker) or 0
            for worker in workers
            if now >= self._back_offs.get(worker, _NO_BACK_OFF).until
        }
        if not sizes:
            return None
        largest = max(sizes, key=lambda worker: sizes[worker])
        if sizes[largest] < min(WORTH_REPLACING, max(LEAST_WORTH_REPLACING, 0 if urgent else free)):
            pause = SEARCH_PAUSE_FACTOR * (time.monotonic() - began)
            self._next_search = now + max(GAP_SECONDS, pause)
            return None
        seconds = 2 * self._back_offs.get(largest, _NO_BACK_OFF).seconds
        seconds = min(seconds, LONGEST_BACK_OFF)
        self._back_offs[largest] = _BackOff(now + seconds, seconds)
        self._next_replacement = now + GAP_SECONDS
        self._requests[largest] = ExitRequest(now, sizes[largest], reading.fill, free)
        return largest

    def request(self, worker: int) -> ExitRequest | None:
        """When and why this worker was told to exit, if it was."""
        return self._requests.get(worker)

    def started(self, worker: int) -> None:
        """A fresh process is about to take the place of this worker."""
        request = self._requests.pop(worker, None)
        if request is not None:
            self._replaced.append((worker, request))

    def stays(self, worker: int) -> None:
        """The worker is not replaced after all."""
        self._requests.pop(worker, None)

    def _check_whether_it_helped(self, free: int) -> None:
        if self._replaced:
            had = sum(request.nbytes for _, request in self._replaced)
            freed = free - min(request.lowest_free for _, request in self._replaced)
            if had / 2 <= freed <= 2 * had:
                for worker, _ in self._replaced:
                    self._back_offs.pop(worker, None)
            self._replaced.clear()
        for request in self._requests.values():
            request.lowest_free = min(request.lowest_free, free)

    def _is_urgent(self, free: int, now: float) -> bool:
        coming = sum(
            request.nbytes
            for request in self._requests.values()
            if now - request.at <= REPLACEMENT_SECONDS
        )
        left = self._pace.seconds_for(free + coming)
        return left is not None and left < REPLACEMENT_SECONDS and self._pace.steady
