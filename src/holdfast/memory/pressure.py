"""How near the end of memory is, as a level that rises at once and falls slowly.

Stall information of the kernel does not announce the end of a group without swap; use against the
limit does. So that is what is looked at, the more often the less is left.
"""

from __future__ import annotations

import itertools
from collections import deque
from enum import IntEnum
from typing import Final

__all__ = ["CAPS", "TIGHT", "Level", "Pace", "Pressure"]


class Level(IntEnum):
    CALM = 0
    LESS = 1  # a quarter of what is left may be in flight
    LITTLE = 2  # a sixteenth
    RECYCLE = 3  # and the fattest worker is replaced


CAPS: Final = {Level.LESS: 4, Level.LITTLE: 16, Level.RECYCLE: 16}
"""By what the free memory is divided: small batches need not be fewer, they would free nothing."""


THRESHOLDS: Final = (0.80, 0.88, 0.93)
FURTHER_AWAY: Final = 0.10  # where one kill takes everybody
BACK: Final = 0.05  # below a threshold, before a level is left
SLOWLY: Final = 5.0  # seconds for each level on the way down
AFTER_A_DEATH: Final = 30.0  # seconds of one batch at a time
TIGHT: Final = {Level.LESS: 5.0, Level.LITTLE: 1.0, Level.RECYCLE: 0.5}
"""Seconds after which workers are told again to give back what they do not use just now."""
LOOKS_LEFT: Final = 8  # before the end, at the speed at which memory is being used up
FASTEST: Final = 256 << 20
"""Bytes per second that must be reckoned with, before anybody has seen how fast memory goes: in a
small room a run may begin, and end, between two looks."""
SHORTEST: Final = 0.02  # seconds between two looks
RECENT: Final = 0.5  # seconds over which the speed is taken, or since the last look before them
STEADY: Final = 4  # looks in a row at which less was free: what a single batch takes comes back


class Pressure:
    """Fill levels and times in, a level out."""

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
        """How many bytes may be in flight at this level; None for what the budget says."""
        divisor = CAPS.get(self.level)
        return None if divisor is None or free is None else free // divisor

    def careful(self, now: float) -> bool:
        """Whether somebody died of memory a moment ago."""
        return now < self._careful_until

    def somebody_died(self, now: float) -> None:
        """Of memory."""
        self._careful_until = now + AFTER_A_DEATH

    def interval(
        self, fill: float, seconds_left: float | None = None, free: int | None = None
    ) -> float:
        """Seconds until the next look; `seconds_left` until the end, if it goes on as it does."""
        left = self.thresholds[0] - fill
        if left > 0.3:
            pause = 5.0
        elif left > 0.15:
            pause = 1.0
        else:
            pause = 0.3 if left > 0 else 0.1
        if free is not None:
            pause = min(pause, max(SHORTEST, free / FASTEST / LOOKS_LEFT))
        if seconds_left is not None:
            pause = min(pause, max(SHORTEST, seconds_left / LOOKS_LEFT))
        return pause


class Pace:
    """How fast memory goes, over the last moments."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()  # when, and how much was free
        self._per_second = 0.0

    def observe(self, free: int | None, now: float) -> float | None:
        """Seconds until memory ends at the present speed; None if it does not, or nobody knows."""
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
        """Whether there was less at every look."""
        free = [one for _, one in self._seen]
        return len(free) >= STEADY and all(a > b for a, b in itertools.pairwise(free))

    def seconds_for(self, nbytes: int) -> float | None:
        """How long so many bytes last."""
        return nbytes / self._per_second if self._per_second > 0 else None
