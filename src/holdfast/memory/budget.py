"""How many bytes of batches may be in flight, over all loaders of this process.

A batch is in flight from the order until it is handed over: while it is made (counted as large as
the largest batch of its loader so far), when it has arrived, and when the consumer has it but has
not unpacked it. Batches that the user keeps do not count. They are reported, but the loader never
waits for them: a user who keeps every batch would stop it.

One batch is always allowed if its loader has nothing else in flight, however large it is and
whatever other loaders have in flight. So a budget that is too small slows a run down but never
stops it.

A `Budget` does arithmetic and nothing else; the free memory of the machine comes from `gauge`.
"""

from __future__ import annotations

import os
import threading

from holdfast.memory.shares import shares

__all__ = ["Budget", "Share", "for_all", "in_bytes"]

_UNITS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "kib": 1 << 10,
    "m": 10**6, "mb": 10**6, "mib": 1 << 20,
    "g": 10**9, "gb": 10**9, "gib": 1 << 30,
    "t": 10**12, "tb": 10**12, "tib": 1 << 40,
}  # fmt: skip


def in_bytes(words: str) -> int | None:
    """``"2GiB"`` or ``"500 MB"`` as a number of bytes; None if `words` is not such a size."""
    text = words.strip().lower()
    digits = text.rstrip("bkmgti ")
    unit = text[len(digits) :].strip()
    if unit not in _UNITS or not digits.replace(".", "", 1).isdigit():
        return None
    return int(float(digits) * _UNITS[unit])


class Budget:
    """How many bytes may be in flight, and the shares of the pools that use it."""

    def __init__(self, total: int | None, *, auto: bool = False) -> None:
        self.total = total
        self.auto = auto
        self.shrunk = 0  # how often it was halved because a worker ran out of memory
        self._shares: tuple[Share, ...] = ()
        self._lock = threading.Lock()

    @property
    def limit(self) -> int | None:
        """How many bytes may be in flight now."""
        return None if self.total is None else max(1, self.total >> self.shrunk)

    @property
    def in_flight(self) -> int:
        return sum([share.in_flight for share in self._shares])

    def adapt(self, free: int | None, ranks: int, unborn: int = 0) -> None:
        """Follow the free memory of the machine, unless the user has given a number. `unborn`
        workers, which have not started yet, will need some of it."""
        if self.auto and free is not None:
            room = max(0, free) // max(1, ranks) + self.in_flight
            self.total = shares(room, unborn).in_flight

    def shrink(self) -> None:
        """A worker ran out of memory and died: halve the budget."""
        self.shrunk = min(self.shrunk + 1, 6)

    def recover(self) -> None:
        """No worker has died of memory for a while: double the budget, up to its full size."""
        self.shrunk = max(0, self.shrunk - 1)

    def join(self, share: Share) -> None:
        with self._lock:
            self._shares = (*self._shares, share)

    def leave(self, share: Share) -> None:
        with self._lock:
            self._shares = tuple(one for one in self._shares if one is not share)

    def take(self, share: Share, nbytes: int) -> bool:
        """Count `nbytes` for this share if they fit; returns whether they did."""
        with self._lock:
            limit = self.limit if share.in_flight else None
            if limit is not None:
                if share.cap is not None:
                    limit = min(limit, share.cap)
                if share.alone or self.in_flight + nbytes > limit:
                    return False
            share.in_flight += nbytes
        return True


class Share:
    """What one pool has in flight. The loader remembers `largest` over all its epochs."""

    def __init__(self, budget: Budget | None = None, largest: int | None = None) -> None:
        self.budget = Budget(None) if budget is None else budget
        self.in_flight = 0
        self.peak = 0
        self.largest = largest  # the largest batch seen; None before the first
        self.cap: int | None = None  # under memory pressure: less than the budget
        self.alone = False  # after a worker died of memory: one batch at a time
        self.budget.join(self)

    def take(self, nbytes: int) -> bool:
        taken = self.budget.take(self, nbytes)
        if taken and self.in_flight > self.peak:
            self.peak = self.in_flight
        return taken

    def became(self, before: int, nbytes: int) -> None:
        """A batch that was counted as `before` bytes turned out to be `nbytes`."""
        self.in_flight += nbytes - before
        if self.in_flight > self.peak:
            self.peak = self.in_flight

    def saw(self, nbytes: int) -> bool:
        """Note the size of a batch that has arrived; returns whether it is the largest so far."""
        record = self.largest is None or nbytes > self.largest
        if record:
            self.largest = nbytes
        return record

    def give(self, nbytes: int) -> None:
        self.in_flight -= nbytes

    def close(self) -> None:
        self.in_flight = 0
        self.budget.leave(self)


_for_all: Budget | None = None


def for_all() -> Budget:
    """The budget that all loaders of this process share unless they have one of their own."""
    global _for_all
    if _for_all is None:
        _for_all = Budget(None, auto=True)
    return _for_all


def _in_child() -> None:
    global _for_all
    _for_all = None  # the parent's loaders have nothing in flight in this process


os.register_at_fork(after_in_child=_in_child)
