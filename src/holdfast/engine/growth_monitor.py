"""Follows the sizes of the workers of a pool: is their growth worth a warning, and which lines
leak?

Workers report their sizes. `limits.growth` classifies the growth. When a worker was replaced
because of a leak, a *leak probe* (a separate process, see `worker.leak_probe`) can find out which
lines hold the memory. It makes batches in rounds and compares what is allocated after each of them,
so each round must leave enough to be seen, and all rounds together must fit into the free memory.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from holdfast.limits.growth import Growth, GrowthWarnings, Point, classify

KEPT_POINTS: Final = 64  # for each worker; even, so that thinning keeps the last one
MAX_PROBES: Final = 3  # leak probes of a pool, if they do not live long enough or find nothing
MAX_ROUND_BATCHES: Final = 8
ENOUGH_TO_SEE: Final = 8 << 20  # bytes that a round should leave
ROUNDS_THAT_FIT: Final = 7  # in the free memory, and in the batches that the worker made
PART_OF_FREE: Final = 4  # a probe may use the free memory divided by this


class LeakSearch(NamedTuple):
    """How a leak probe searches."""

    batches: int  # in each round
    nbytes: int  # by which the probe may grow


class GrowthMonitor:
    """One for each pool."""

    def __init__(self, warnings: GrowthWarnings | None) -> None:
        self.warnings = GrowthWarnings() if warnings is None else warnings
        """What the user was told, over all pools of a loader."""
        self._points: dict[int, list[Point]] = {}
        self._probes = 0

    def started(self, worker: int) -> None:
        """A fresh process is about to take the place of this worker."""
        self._points.pop(worker, None)

    def add(self, worker: int, point: Point) -> Growth | None:
        """A worker has reported its sizes. Returns its growth, if it was not reported yet."""
        points = self._points.setdefault(worker, [])
        points.append(point)
        if len(points) > KEPT_POINTS:
            del points[1::2]  # the first and the last stay
        growth = classify(points)
        return growth if growth is not None and self.warnings.is_news(growth) else None

    def private(self, worker: int) -> int | None:
        """Private bytes of a worker, as it last reported them."""
        points = self._points.get(worker)
        return points[-1].private if points else None

    def leak_search(self, worker: int, room: int) -> LeakSearch | None:
        """How to search for the leak of this worker, within a share of `room` bytes; None if it has
        none, or a search would not fit."""
        points = self._points.get(worker, [])
        growth = classify(points)
        if growth is None or growth.kind not in ("python-leak", "native-leak"):
            return None
        if self._probes >= MAX_PROBES:
            return None
        room //= PART_OF_FREE
        fit = int(room / growth.per_batch) // ROUNDS_THAT_FIT
        visible = math.ceil(ENOUGH_TO_SEE / growth.per_batch)
        made = points[-1].batches // ROUNDS_THAT_FIT
        batches = max(1, min(MAX_ROUND_BATCHES, visible, made, fit))
        return LeakSearch(batches, room) if fit else None

    def probe_started(self) -> None:
        self._probes += 1

    def probe_failed(self) -> None:
        """Tracing does not work here: start no further probe."""
        self._probes = MAX_PROBES
