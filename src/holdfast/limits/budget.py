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

import threading

from holdfast import at_fork
from holdfast.limits.shares import shares

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
        self.is_shared = False  # by several pools
        self._shares: tuple[Share, ...] = ()
        self._joining = threading.Lock()
        self.taking = threading.RLock()  # taken again if garbage collection uses another pool
        """Held from reading how much room there is until what was taken of it is counted: two pools
        must not both take the last of it."""

    @property
    def limit(self) -> int | None:
        """How many bytes may be in flight now."""
        return None if self.total is None else max(1, self.total >> self.shrunk)

    @property
    def in_flight(self) -> int:
        return sum([share.in_flight for share in self._shares])

    @property
    def taken(self) -> int:
        """What is in flight, and what is set aside for copies."""
        return sum([share.in_flight + share.set_aside for share in self._shares])

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
        with self._joining:
            self._shares = (*self._shares, share)
            self.is_shared = len(self._shares) > 1

    def leave(self, share: Share) -> None:
        with self._joining:
            self._shares = tuple(one for one in self._shares if one is not share)
            self.is_shared = len(self._shares) > 1


class Share:
    """What one pool has in flight, as its machine counts it, and what it may have."""

    def __init__(self, budget: Budget, ceiling: int | None = None) -> None:
        """`ceiling`: bytes that the way from the workers to the trainer has room for."""
        self.budget = budget
        self.ceiling = ceiling
        self.in_flight = 0
        self.set_aside = 0
        """Bytes of the budget that are left for a copy of a batch that has arrived: in pinned
        memory, while the original is still there."""
        self.cap: int | None = None  # under memory pressure: less than the budget
        self.alone = False  # after a worker died of memory: one batch at a time
        self.budget.join(self)

    def room(self) -> int | None:
        """Bytes this pool may have in flight in all; None without a limit. One batch alone always
        passes."""
        budget = self.budget
        limit = budget.limit
        if self.ceiling is not None:
            limit = self.ceiling if limit is None else min(limit, self.ceiling)
        if limit is None:
            return None
        if self.alone:
            return 0
        if self.cap is not None:
            limit = min(limit, self.cap)
        if budget.is_shared:
            limit -= budget.taken - self.in_flight - self.set_aside
        return limit - self.set_aside

    def may_copy(self, nbytes: int) -> bool:
        """Whether there is room for a copy of a batch of this size, which is in flight itself. Not
        for one that is in flight alone because it is too large for the budget."""
        room = self.room()
        return room is None or self.in_flight + nbytes <= room + self.set_aside

    def close(self) -> None:
        self.in_flight = self.set_aside = 0
        self.budget.leave(self)


_for_all: dict[str, Budget] = {}  # at most one: to add it to a dict is one step


def for_all() -> Budget:
    """The budget that all loaders of this process share unless they have one of their own."""
    found = _for_all.get("all")
    return _for_all.setdefault("all", Budget(None, auto=True)) if found is None else found


def _in_child(budgets: dict[str, Budget] = _for_all) -> None:
    budgets.clear()  # the parent's loaders have nothing in flight in this process


at_fork.in_child(_in_child)
