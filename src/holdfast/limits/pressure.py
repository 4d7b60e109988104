"""How close memory is to running out, as a level that rises at once and falls slowly.

The kernel's pressure stall information gives no warning in a control group without swap. The use
relative to the limit does. So that is what is read, more often the less memory is left.
"""

from __future__ import annotations

import itertools
from collections import deque
from enum import IntEnum
from typing import Final


class Level(IntEnum):
    CALM = 0
    LESS = 1  # a quarter of the free memory may be in flight
    LITTLE = 2  # a sixteenth
    RECYCLE = 3  # a sixteenth, and the largest worker is replaced


CAPS: Final = {Level.LESS: 4, Level.LITTLE: 16, Level.RECYCLE: 16}
"""The free memory is divided by this. A part of the free memory, not of the budget: fewer batches
in flight would free nothing if they are small."""


THRESHOLDS: Final = (0.80, 0.88, 0.93)
FURTHER_AWAY: Final = 0.10  # lower thresholds where the kernel kills the whole group at once
BACK: Final = 0.05  # how far below its threshold a level is left
SLOWLY: Final = 5.0  # seconds for each level on the way down
AFTER_A_DEATH: Final = 30.0  # seconds of one batch at a time
TIGHT: Final = {Level.LESS: 5.0, Level.LITTLE: 1.0, Level.RECYCLE: 0.5}
"""Seconds after which workers are told again to give back memory they do not use."""
READINGS_LEFT: Final = 8  # readings before memory runs out, at the present rate of use
FASTEST: Final = 256 << 20
"""Bytes per second that are assumed before a rate was measured. Where little is free, memory could
otherwise run out between two readings."""
SHORTEST: Final = 0.02  # seconds between two readings
RECENT: Final = 0.5  # seconds over which the rate is measured
STEADY: Final = 4  # readings in a row with less free; the memory of a single batch comes back


class Pressure:
    """Computes the level from fill levels and times."""

    def __init__(self, *, oom_group: bool = False) -> None:
        away = FURTHER_AWAY if oom_group else 0.0
        self.thresholds = tuple(one - away for one in THRESHOLDS)
        self.level = Level.CALM
        self._since = 0.0
        self._careful_until = 0.0

    def observe(self, fill: float, now: float) -> Level:
        """`fill`: the part of memory in use."""
        reached = sum(fill >= one for one in self.thresholds)
        if reached >= self.level:
            if reached > self.level:
                self.level = Level(reached)
            self._since = now
        elif fill >= self.thresholds[self.level - 1] - BACK:
            self._since = now
        elif now - self._since >= SLOWLY:
            self.level = Level(self.level - 1)
            self._since = now
        return self.level

    def cap(self, free: int | None) -> int | None:
        """How many bytes may be in flight at this level; None if only the budget limits them."""
        divisor = CAPS.get(self.level)
        return None if divisor is None or free is None else free // divisor

    def careful(self, now: float) -> bool:
        """Whether a worker died of memory less than `AFTER_A_DEATH` seconds ago."""
        return now < self._careful_until

    def worker_died(self, now: float) -> None:
        """A worker died of memory."""
        self._careful_until = now + AFTER_A_DEATH

    def interval(
        self, fill: float, seconds_left: float | None = None, free: int | None = None
    ) -> float:
        """Seconds until the next reading. `seconds_left`: until memory runs out, at this rate."""
        left = self.thresholds[0] - fill
        if left > 0.3:
            pause = 5.0
        elif left > 0.15:
            pause = 1.0
        else:
            pause = 0.3 if left > 0 else 0.1
        if free is not None:
            pause = min(pause, max(SHORTEST, free / FASTEST / READINGS_LEFT))
        if seconds_left is not None:
            pause = min(pause, max(SHORTEST, seconds_left / READINGS_LEFT))
        return pause


class Pace:
    """How fast memory is being used up."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()  # when, and how much was free
        self._per_second = 0.0

    def observe(self, free: int | None, now: float) -> float | None:
        """Seconds until memory runs out at the present rate; None if it does not, or is unknown."""
        if free is None:
            return None
        seen = self._seen
        seen.append((now, free))
        while len(seen) > 2 and seen[1][0] <= now - RECENT:
            seen.popleft()
        began, before = seen[0]
        self._per_second = (before - free) / (now - began) if now > began else 0.0
        return self.seconds_for(free)

    @property
    def steady(self) -> bool:
        """Whether every reading found less free than the one before."""
        free = [one for _, one in self._seen]
        return len(free) >= STEADY and all(a > b for a, b in itertools.pairwise(free))

    def seconds_for(self, nbytes: int) -> float | None:
        """Seconds that `nbytes` last at the present rate; None if memory is not being used up."""
        return nbytes / self._per_second if self._per_second > 0 else None
