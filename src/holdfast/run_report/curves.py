"""The curves of a report: records at any times become points at the same times.

All curves of a page have the same points in time, so that one cursor is in all of them. There are
at most `POINTS`, however long the run was, and fewer if there are many curves. What is counted
(batches, seconds) is a difference between two points. Of what is measured (memory) a point has the
highest value of its interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

POINTS: Final = 1200  # of a curve
VALUES: Final = 200_000  # of all curves together
Floats = NDArray[np.float64]


def number(value: Any) -> float | None:
    """A number from a record; None if it is something else."""
    if type(value) is not float and type(value) is not int:
        return None
    return float(value) if -1e300 < value < 1e300 else None


class Grid:
    """Points in time."""

    def __init__(self, times: Sequence[float], curves: int) -> None:
        """`times` of all records, in order; `curves`: how many there will be."""
        first, last = (times[0], times[-1]) if times else (0.0, 0.0)
        most = max(60, min(POINTS, VALUES // max(1, curves)))
        # No finer than records are: one a second at first, then one in five seconds.
        self.width = max(1.0 if last - first <= 70 else 5.0, (last - first) / most)
        count = max(1, math.ceil((last - first) / self.width))
        self.edges: Floats = np.array([first + self.width * one for one in range(count + 1)])

    @property
    def times(self) -> list[float]:
        """The end of each interval."""
        return [round(float(edge), 1) for edge in self.edges[1:]]

    def gained(self, times: Sequence[float], counts: Sequence[float]) -> Floats:
        """How much a count grew in each interval."""
        if not times:
            return np.zeros(len(self.edges) - 1)
        at, so_far = np.array(times, float), np.maximum.accumulate(np.array(counts, float))
        gained: Floats = np.diff(np.interp(self.edges, at, so_far))
        gained[0] += np.interp(self.edges[0], at, so_far) - so_far[0]
        return gained

    def highest(self, points: Iterable[tuple[float, float | None]]) -> list[float | None]:
        """The highest value in each interval; None where there is none."""
        found: Floats = np.full(len(self.edges) - 1, np.nan)
        known = [(at, value) for at, value in points if value is not None]
        if known:
            at, values = (np.array(one, float) for one in zip(*known, strict=True))
            places = np.clip(((at - self.edges[0]) // self.width).astype(int), 0, len(found) - 1)
            highest: Floats = np.full(len(found), -np.inf)
            np.maximum.at(highest, places, values)
            found = np.where(np.isinf(highest), np.nan, highest)
        return plain(found)

    def ratio(self, part: Floats, whole: Floats, least: float) -> list[float | None]:
        """Part by whole; None where the whole is less than `least`."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return plain(np.where(whole >= least, part / whole, np.nan))


def plain(values: Floats) -> list[float | None]:
    """As JSON has it: short, and None for what is unknown."""
    return [None if math.isnan(one) else float(f"{one:.4g}") for one in values.tolist()]


def total(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sums of all parts, by name."""
    sums: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums
