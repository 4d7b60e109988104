"""The main process's side of an arena: what is lent out, who still has it, and when it is free.

`arena` tells how the two sides work together. A lease is an array on the mapping and a weak
reference to it; what the user has of it may outlive the worker, the window and the loader.

A child that the user forks off the main process has the same pages; what is lent out then stays
lent until that child is gone: see `forks`.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import ClassVar

import numpy as np

from holdfast.memory import forks
from holdfast.memory.arena import PAGE, Bytes, Mapping, Ref, outside, rounded_up

__all__ = ["Kept", "Released", "Window"]


class Released(deque[Ref]):
    """The offsets the user has let go of, for one consumer to pop, and the books behind them.

    Inside it is a plain deque of weak references, because the collector's callback must be
    nothing but ``deque.append``; whoever pops it sees offsets.
    """

    def __init__(self) -> None:
        super().__init__()
        self.leases: dict[int, Ref] = {}

    def __bool__(self) -> bool:
        while len(self):
            if self._is_current(self[0]):
                return True
            super().popleft()
        return False

    def popleft(self) -> int:  # type: ignore[override]
        """The next offset; IndexError if there is none."""
        while True:
            ref = super().popleft()
            if self._is_current(ref):
                self.forget(ref)
                return ref.offset

    def forget(self, ref: Ref) -> None:
        del self.leases[ref.offset]

    def _is_current(self, ref: Ref) -> bool:
        # After a handover a late callback may still bring in a lease of the worker before; its
        # offset may by now be another block's.
        return self.leases.get(ref.offset) is ref


class Window:
    """The main process's side: lends out the blocks that arrive and notices when they are free.

    All methods, and popping `released`, belong to one thread at a time; leases may die in any.
    """

    def __init__(self, fd: int, kept: Kept | None = None) -> None:
        """`kept`: the books to count in what the user has of it, now and after it is closed."""
        self.capacity = os.fstat(fd).st_size
        self.kept = Kept() if kept is None else kept
        self.released = Released()
        self._pid = os.getpid()
        self._map: Mapping | None = Mapping(fd, self.capacity)
        # Last, because other threads ask whoever is in the books.
        _windows[id(self)] = self
        self.kept.open(self)

    @property
    def kept_bytes(self) -> int:
        """Bytes of what the user has been given and still has."""
        leases = list(self.released.leases.values())
        return sum(ref.nbytes for ref in leases if ref.delivered and ref() is not None)

    @property
    def closed(self) -> bool:
        return self._map is None

    def lease(self, offset: int, nbytes: int) -> Bytes:
        """The block's memory. When the array and all that is built on it are gone, the block's
        offset appears in `released`."""
        if self._map is None:
            raise ValueError("the window is closed")
        if offset in self.released.leases:
            raise ValueError(f"the block at {offset} is already lent out")
        array: Bytes = np.ndarray(nbytes, np.uint8, self._map.buffer, offset)
        ref = Ref(array, self.released.append)
        ref.offset = offset
        ref.nbytes = nbytes
        ref.delivered = False
        self.released.leases[offset] = ref
        return array

    def deliver(self, offsets: Iterable[int]) -> None:
        """The user gets these: from now on a fork may copy them."""
        leases = self.released.leases
        for offset in offsets:
            ref = leases.get(offset)
            if ref is not None:
                ref.delivered = True

    def delivered(self, getpid: Callable[[], int] = os.getpid) -> list[Bytes]:
        """The memory the user has of the blocks that are lent out."""
        if getpid() != self._pid:
            return []  # our parent's
        leases = list(self.released.leases.values())
        return [array for ref in leases if ref.delivered and (array := ref()) is not None]

    def take_released(self) -> list[int]:
        """All offsets released since the last call: tell them to the worker."""
        forks.sweep()
        offsets: list[int] = []
        if not self.released.leases:
            return offsets  # nothing was lent, or all was told already
        while self.released:
            offsets.append(self.released.popleft())
        return offsets

    def handover(self) -> list[tuple[int, int]]:
        """The worker is dead and all its messages have been read: what its successor must spare.

        Releases meant for the dead worker are dropped. What is listed will be released to the
        successor later; what is not listed never will. Listing and dropping must be one step: a
        lease that dies in between would be lost for ever or, worse, be released to the successor
        when it has already put another block in that place.
        """
        leases = list(self.released.leases.values())
        alive = [(ref, ref()) for ref in leases]
        for ref, array in alive:
            if array is None:
                self.released.forget(ref)
        return [(ref.offset, ref.nbytes) for ref, array in alive if array is not None]

    def close(self) -> None:
        """No worker writes here any more: give all memory back, that of live leases as they die.

        The mapping itself goes with the last lease, also if this object is gone by then.
        """
        mapping, self._map = self._map, None
        if mapping is None:
            return
        forks.sweep()
        alive = [(ref, ref()) for ref in self.released.leases.values()]
        self.released.leases.clear()
        self.released.clear()
        if os.getpid() != self._pid:
            return  # the pages are still our parent's
        spare = []
        for ref, array in alive:
            if array is not None:
                spare.append((ref.offset, ref.nbytes))
                _Orphan.adopt(array, ref, mapping, self.kept)
        for start, end in outside(spare, self.capacity - self.capacity % PAGE):
            mapping.give_back(start, end)


class Kept:
    """What the user has of the batches of some windows, whether or not they are closed by now.

    It is held by the windows, and by what the user has: when both are gone nobody needs it.
    """

    def __init__(self) -> None:
        self._windows: weakref.WeakValueDictionary[int, Window] = weakref.WeakValueDictionary()

    def open(self, window: Window) -> None:
        self._windows[id(window)] = window

    @property
    def nbytes(self) -> int:
        """For any thread."""
        windows = [ref() for ref in self._windows.valuerefs()]
        ours = [one for one in list(_Orphan.all.values()) if one.kept is self]
        return sum(one.kept_bytes for one in windows if one is not None) + sum(
            one.nbytes for one in ours if one() is not None
        )


class _Orphan(weakref.ref[Bytes]):
    """A lease whose window is closed: there is no worker to recycle it, so its pages are freed."""

    __slots__ = ("end", "kept", "mapping", "nbytes", "pid", "start")
    start: int
    end: int
    nbytes: int  # that the user has
    kept: Kept
    mapping: Mapping
    pid: int
    all: ClassVar[dict[int, _Orphan]] = {}

    @classmethod
    def adopt(cls, array: Bytes, ref: Ref, mapping: Mapping, kept: Kept) -> None:
        orphan = cls(array, _bury)
        orphan.nbytes = ref.nbytes if ref.delivered else 0
        orphan.kept = kept
        orphan.start = rounded_up(ref.offset, PAGE)
        orphan.end = (ref.offset + ref.nbytes) // PAGE * PAGE
        orphan.mapping = mapping
        orphan.pid = os.getpid()
        cls.all[id(orphan)] = orphan


def _bury(
    orphan: weakref.ref[Bytes],
    all_orphans: dict[int, _Orphan] = _Orphan.all,
    getpid: Callable[[], int] = os.getpid,
) -> None:
    # Default arguments, because this may run while the interpreter takes its modules apart.
    known = all_orphans.pop(id(orphan), None)
    if known is not None and getpid() == known.pid:
        known.mapping.give_back(known.start, known.end)


_windows: weakref.WeakValueDictionary[int, Window] = weakref.WeakValueDictionary()


def _delivered(
    windows: weakref.WeakValueDictionary[int, Window] = _windows,
    all_orphans: dict[int, _Orphan] = _Orphan.all,
    getpid: Callable[[], int] = os.getpid,
) -> list[Bytes]:
    """All memory of batches that the user of this process has, by all loaders."""
    pid = getpid()
    found = [ref() for ref in windows.valuerefs()]  # a copy: other threads add to it
    arrays = [array for window in found if window is not None for array in window.delivered()]
    for orphan in list(all_orphans.values()):
        array = orphan() if orphan.pid == pid else None
        if array is not None:
            arrays.append(array)
    return arrays


forks.protect(_delivered)
