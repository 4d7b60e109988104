"""Keeping a worker's memory small, from the inside.

Garbage. Python collects cycles by the number of objects: a cycle that holds an array of 20 MB is
one object, so a worker that makes such cycles grows by gigabytes before anything happens. A full
``gc.collect()`` for every sample mends that and costs up to 100 ms each, most of it for looking at
torch's modules. Here everything that was there at the start is frozen, and what is young is
collected when the process has *grown* by so many bytes. A collection that did not help doubles the
step until the next one.

The allocator. What is free but was not returned to the system is returned when the process has
grown and collecting did not help; again at growing distances if that does not help either.

What it measures: anonymous memory now, less what was there at birth. Pages inherited by fork are
counted as its own by the kernel's quick figures, and are not; those it has copied since by touching
them show only in ``smaps_rollup``, which is read rarely because it walks all pages. Each copy is a
page fault, and to count those costs nothing: when there were enough for the limit to be reached, it
is time for a look. But fresh memory costs faults too, so a look that finds few copies puts the next
one further off.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Final

from holdfast import kernel
from holdfast.autopsy.readers import HERE, process
from holdfast.memory import gauge
from holdfast.memory.growth import Point
from holdfast.memory.ladder import Allowance, Ladder, Rung
from holdfast.memory.shares import BASE

__all__ = ["Copies", "Garbage", "Housekeeper", "trim"]

STEP: Final = 32 << 20  # growth after which young garbage is collected
LARGEST_STEP: Final = 1 << 30
QUICK: Final = 0.004  # seconds between two looks at the size while a batch is made
FEW: Final = 4  # samples until it is asked again whether it is time for that ...
MANY: Final = 16  # ... and if they are so quick that it never is
OFTEN: Final = 0.01  # seconds between two looks at the limit
SELDOM: Final = 10.0  # and between two walks through all pages; 100 times what one costs at least,
# unless there was a reason to look sooner
_PAGE = os.sysconf("SC_PAGE_SIZE")
_libc = ctypes.CDLL(None)


def trim() -> None:
    """Return what the allocator keeps. Only glibc can."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


class Garbage:
    """When to collect what: pure, but for whoever carries it out."""

    def __init__(self, size: int) -> None:
        self.floor = size
        self.step = STEP

    def due(self, size: int) -> bool:
        if size < self.floor:
            self.floor = size
        return size - self.floor >= self.step

    def collected(self, before: int, after: int) -> bool:
        """Whether it helped; if not, the next one is further away."""
        helped = before - after >= (before - self.floor) // 4
        self.step = STEP if helped else min(2 * self.step, LARGEST_STEP)
        self.floor = after
        return helped


class Copies:
    """When to look for inherited pages that were copied, by page faults: pure."""

    FIRST: Final = 4 << 20
    LARGEST: Final = 64 << 30

    def __init__(self, faulted: int) -> None:
        self.step = self.FIRST
        self._faulted = faulted
        self._copied = 0

    def due(self, faulted: int, room: int) -> bool:
        """`faulted`: bytes of all pages touched for the first time so far; `room` to the limit."""
        return faulted - self._faulted >= max(self.step, room)

    def looked(self, faulted: int, copied: int) -> None:
        """`copied` bytes there were in all."""
        since = faulted - self._faulted
        helped = copied - self._copied >= since // 4
        self.step = self.FIRST if helped else min(max(self.step, 2 * since), self.LARGEST)
        self._faulted, self._copied = faulted, copied


class Housekeeper:
    """Made with the worker's first instruction; asked between samples and between batches."""

    def __init__(self, allowance: Allowance) -> None:
        self.allowance = allowance
        self.noted: Callable[[int, int, float], None] | None = None
        """Told of every measurement: resident and shared bytes, and when."""
        self._statm = _open_statm()
        self._birth = self._anonymous()
        self._trimmed = 0
        self._measured = True  # nobody has asked for the last measurement yet
        self.batches = 0
        """How many it has made so far; counted by whoever makes them."""
        self._copied = 0  # inherited pages that it has made its own, beyond those that all do
        self._walk_at = time.monotonic() + SELDOM
        self._copies = Copies(_faulted())
        self._quick_at = self._asked_at = 0.0
        self.due_at = 0.0
        """When to call `look`, after a batch."""
        self._garbage = Garbage(self._birth)
        self._ladder: Ladder | None = None
        self._own_limit = 0
        self.asked = False  # it has said that it is too large
        self._may_not_go = False
        self._data_before: int | None = None
        self.limits_allocations = False

    def close(self) -> None:
        if self._statm is not None:
            os.close(self._statm)

    @property
    def limit(self) -> int | None:
        return None if self._ladder is None else self._ladder.limit

    @property
    def raised(self) -> bool:
        """Whether it was over the limit before its first batch."""
        return self._ladder is not None and self._ladder.raised

    def private(self) -> int:
        return max(0, self._anonymous() - self._birth) + self._copied

    def point(self, arena: int) -> Point:
        """How it is now, for whoever compares it with other moments."""
        self._measured = False
        return Point(
            time.monotonic(),
            self.batches,
            max(0, self._anonymous() - self._birth),
            self.private(),
            self._trimmed,
            sys.getallocatedblocks(),
            arena,
        )

    @property
    def measured(self) -> bool:
        """Whether there is a new measurement, all pages walked through."""
        return self._measured

    def begin(self) -> None:
        """All is loaded: what is there now stays, and is not looked at again."""
        gc.collect()
        gc.freeze()
        size = self._anonymous()
        self._garbage = Garbage(size)
        if self.allowance.private is not None:
            self._ladder = Ladder(self.allowance.private, self.private())
            self._own_limit = self._ladder.limit
        self._limit_data()

    def _limit_data(self) -> None:
        """Let one allocation that is far too large fail, where it is asked for."""
        data = process.data("self", HERE)
        if self.allowance.beyond is None or self._ladder is None or data is None:
            return
        limits = kernel.limit(resource.RLIMIT_DATA)
        if limits is None:
            return
        soft, hard = limits
        wanted = data + max(0, self._ladder.limit - self.private()) + self.allowance.beyond
        self._data_before = soft
        for bound in (soft, hard):
            if bound != resource.RLIM_INFINITY:
                wanted = min(wanted, bound)
        self.limits_allocations = kernel.set_limit(resource.RLIMIT_DATA, wanted, hard)

    def ask(self) -> None:
        """It has said that it is too large, and goes on until it is told what is to be done: no
        allocation may fail meanwhile because it is."""
        self.asked = True
        if self._data_before is not None:
            limits = kernel.limit(resource.RLIMIT_DATA)
            if limits is not None:
                kernel.set_limit(resource.RLIMIT_DATA, self._data_before, limits[1])
            self.limits_allocations, self._data_before = False, None

    def stay(self, *, for_good: bool) -> None:
        """It is not replaced: now, or never. Before it asks again it is twice as large, or there is
        another epoch."""
        self.asked = False
        self._may_not_go = for_good
        if self._ladder is not None:
            self._ladder.limit = 2 * max(self._ladder.limit, self.private())

    def begin_epoch(self) -> None:
        """Another epoch of a persistent worker."""
        if self._ladder is not None:
            self._ladder.limit = self._own_limit

    def between_samples(self) -> int:
        """Look at the size, if it is time; after how many samples to call again."""
        now = time.monotonic()
        if now >= self._quick_at:
            self._quick_at = now + QUICK
            self._collect_if_grown()
        quick = now - self._asked_at < QUICK / 4
        self._asked_at = now
        return MANY if quick else FEW

    def _collect_if_grown(self) -> None:
        before = self._anonymous()
        if not self._garbage.due(before):
            return
        gc.collect(1)
        after = self._anonymous()
        if not self._garbage.collected(before, after) and self._garbage.step > 2 * STEP:
            self._clean()
            self._garbage.collected(before, self._anonymous())

    def _clean(self) -> None:
        gc.collect()
        before = self._anonymous()
        trim()
        self._trimmed += max(0, before - self._anonymous())

    def look(self, now: float) -> bool:
        """Whether this worker may take another task; if not, it should go."""
        self.due_at = now + OFTEN
        self._collect_if_grown()
        if now >= self._walk_at:
            took = self._walk()
            self._measured = True
            self._walk_at = now + max(SELDOM, 100 * took)
        elif self._may_have_copied():
            self._walk()
        if self._ladder is None or self.asked or self._may_not_go:
            return True
        rung = self._ladder.climb(self.private())
        if rung is Rung.NOTHING:
            return True
        self._clean()
        if rung is Rung.GO:
            return self.private() < self._ladder.limit
        return True

    def _may_have_copied(self) -> bool:
        """So much that it is over its limit."""
        if self._ladder is None:
            return False
        return self._copies.due(_faulted(), self._ladder.limit - self.private())

    def _walk(self) -> float:
        """Look at all pages; how many seconds that took."""
        began = time.monotonic()
        exact = gauge.private("self")
        if exact is not None:
            grown = max(0, self._anonymous() - self._birth)
            self._copied = max(0, exact - grown - BASE)
        self._copies.looked(_faulted(), self._copied)
        return time.monotonic() - began

    def _anonymous(self) -> int:
        if self._statm is None:
            return 0
        fields = os.pread(self._statm, 128, 0).split()
        resident, shared = int(fields[1]) * _PAGE, int(fields[2]) * _PAGE
        if self.noted is not None:
            self.noted(resident, shared, time.monotonic())
        return resident - shared


def _open_statm() -> int | None:
    """None without /proc: then nothing is known, and nothing seems to grow."""
    try:
        return kernel.open_file("/proc/self/statm", os.O_RDONLY)
    except (FileNotFoundError, PermissionError):
        return None


def _faulted() -> int:
    """Bytes of the pages that this process has made its own so far, or had already."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt * _PAGE
