"""Keeps a worker's memory small, from inside the worker.

Garbage. Python decides by the number of objects when to collect cycles: a cycle that holds an array
of 20 MB is one object, so a worker that makes such cycles grows by gigabytes before a collection. A
full ``gc.collect()`` for every sample would prevent that, but takes up to 100 ms, most of it for
torch's modules. So everything that exists at the start is frozen, and young objects are collected
when the process has *grown* by a number of bytes. If a collection does not help, that number
doubles.

The allocator. Free memory that the allocator keeps is returned to the system when the process has
grown and a collection did not help; less and less often if that does not help either.

Measurement. A worker's size is its anonymous memory now, less that at its start, because the
kernel's quick figures count pages inherited by fork as its own. Pages that it has copied since then
appear only in ``smaps_rollup``, which is read rarely because the kernel walks all pages for it.
Each copy is a page fault, and counting faults costs nothing: when there were enough for the limit
to be reached, ``smaps_rollup`` is read. But fresh memory causes faults too, so after a reading that
finds few copies the next one is delayed.
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
from holdfast.autopsy.readers import HERE, procfs
from holdfast.limits import gauge
from holdfast.limits.growth import Point
from holdfast.limits.shares import BASE
from holdfast.limits.worker_limit import Allowance, Ladder, Rung

STEP: Final = 32 << 20  # growth after which young garbage is collected
LARGEST_STEP: Final = 1 << 30
QUICK: Final = 0.004  # seconds between two measurements while a batch is made
FEW: Final = 4  # samples until the clock is read again for that,
MANY: Final = 16  # or if samples are much quicker
OFTEN: Final = 0.01  # seconds between two comparisons with the limit
# Seconds between two readings of smaps_rollup: at least 100 times as long as one takes, unless page
# faults give a reason for one.
SELDOM: Final = 10.0
_PAGE = os.sysconf("SC_PAGE_SIZE")
_libc = ctypes.CDLL(None)


def trim() -> None:
    """Return free memory of the allocator to the system. Only glibc can."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


class Garbage:
    """Decides when to collect garbage: pure."""

    def __init__(self, size: int) -> None:
        self.floor = size
        self.step = STEP

    def due(self, size: int) -> bool:
        if size < self.floor:
            self.floor = size
        return size - self.floor >= self.step

    def collected(self, before: int, after: int) -> bool:
        """Whether the collection helped; if not, the next one comes later."""
        helped = before - after >= (before - self.floor) // 4
        self.step = STEP if helped else min(2 * self.step, LARGEST_STEP)
        self.floor = after
        return helped


class Copies:
    """Decides by page faults when to look for inherited pages that were copied: pure."""

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
        """`copied`: bytes of inherited pages that were copied so far."""
        since = faulted - self._faulted
        helped = copied - self._copied >= since // 4
        self.step = self.FIRST if helped else min(max(self.step, 2 * since), self.LARGEST)
        self._faulted, self._copied = faulted, copied


class Housekeeper:
    """Made at the worker's start; called between samples and between batches."""

    def __init__(self, allowance: Allowance) -> None:
        self.allowance = allowance
        self.noted: Callable[[int, int, float], None] | None = None
        """Called with every measurement: resident and shared bytes, and the time."""
        self._statm = _open_statm()
        self._birth = self._anonymous()
        self._trimmed = 0
        self.measured = True
        """Whether all pages were measured since the last `point`."""
        self.batches = 0
        """Batches made so far; counted by the worker's loop."""
        self._copied = 0  # bytes of inherited pages that it has copied, beyond those that all copy
        self._walk_at = time.monotonic() + SELDOM
        self._copies = Copies(_faulted())
        self._quick_at = self._asked_at = 0.0
        self.due_at = 0.0
        """When to call `may_continue`, after a batch."""
        self._garbage = Garbage(self._birth)
        self._ladder: Ladder | None = None
        self._own_limit = 0
        self.asked = False  # it has said that it is too large
        self._stays = False
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
        """A measurement, to be compared with others."""
        self.measured = False
        return Point(
            time.monotonic(),
            self.batches,
            max(0, self._anonymous() - self._birth),
            self.private(),
            self._trimmed,
            sys.getallocatedblocks(),
            arena,
        )

    def begin(self) -> None:
        """The worker is set up: what exists now is not collected any more."""
        gc.collect()
        gc.freeze()
        size = self._anonymous()
        self._garbage = Garbage(size)
        # From now on: starting touches pages of libraries, the more the larger the build of torch.
        self._copies = Copies(_faulted())
        if self.allowance.private is not None:
            self._ladder = Ladder(self.allowance.private, self.private())
            self._own_limit = self._ladder.limit
        self._limit_data()

    def _limit_data(self) -> None:
        """Let one allocation that is far too large fail where it is made."""
        data = procfs.data("self", HERE)
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
        """It has said that it is too large, and continues until it gets an answer. No allocation
        may fail meanwhile because of its size."""
        self.asked = True
        if self._data_before is not None:
            limits = kernel.limit(resource.RLIMIT_DATA)
            if limits is not None:
                kernel.set_limit(resource.RLIMIT_DATA, self._data_before, limits[1])
            self.limits_allocations, self._data_before = False, None

    def stay(self, *, for_good: bool) -> None:
        """It is not replaced, now or ever. It asks again when it is twice as large, or in the next
        epoch."""
        self.asked = False
        self._stays = for_good
        if self._ladder is not None:
            self._ladder.limit = 2 * max(self._ladder.limit, self.private())

    def begin_epoch(self) -> None:
        """Another epoch of a persistent worker."""
        if self._ladder is not None:
            self._ladder.limit = self._own_limit

    def between_samples(self) -> int:
        """Measure, if it is time to; after how many samples to call again."""
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

    def may_continue(self, now: float) -> bool:
        """Whether this worker may take another task; if not, it should be replaced."""
        self.due_at = now + OFTEN
        self._collect_if_grown()
        if now >= self._walk_at:
            took = self._measure_copies()
            self.measured = True
            self._walk_at = now + max(SELDOM, 100 * took)
        elif self._may_have_copied():
            self._measure_copies()
        if self._ladder is None or self.asked or self._stays:
            return True
        rung = self._ladder.climb(self.private())
        if rung is Rung.NOTHING:
            return True
        self._clean()
        if rung is Rung.GO:
            return self.private() < self._ladder.limit
        return True

    def _may_have_copied(self) -> bool:
        """Whether it may have copied so many pages that it is over its limit."""
        if self._ladder is None:
            return False
        return self._copies.due(_faulted(), self._ladder.limit - self.private())

    def _measure_copies(self) -> float:
        """Have the kernel walk all pages; how many seconds that took."""
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
    """None without /proc: then every size is 0."""
    try:
        return kernel.open_file("/proc/self/statm", os.O_RDONLY)
    except (FileNotFoundError, PermissionError):
        return None


def _faulted() -> int:
    """Bytes of all pages that this process has touched for the first time."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt * _PAGE
