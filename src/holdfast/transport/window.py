"""The main process's side of an arena: which blocks are lent out, and when they are free again.

`arena` explains how the two sides work together. A lease is an array on the mapping and a weak
reference to it. The user's tensors on it may outlive the worker, the window and the loader.

A child that the user forks off the main process has the same pages. Blocks that are lent out at
the fork stay lent until that child has ended: see `forks`.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import ClassVar

import numpy as np

from holdfast.transport import forks
from holdfast.transport.arena import Bytes, Ref
from holdfast.transport.extents import PAGE, rounded_up
from holdfast.transport.mapping import Mapping, outside
from holdfast.transport.pinned_in_place import HostMemory, PinnedBlocks, Quota


class Released(deque[Ref]):
    """A queue of the offsets that the user has released, for one consumer, and the open leases.

    It stores weak references, because the callback of a weak reference must be nothing but
    ``deque.append``. `popleft` returns offsets.
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
        # After a handover a late callback may still append a lease of the previous worker, whose
        # offset may belong to another block by now.
        return self.leases.get(ref.offset) is ref


class Window:
    """The main process's side: lends out the blocks that arrive and notices when they are free.

    Only one thread at a time may call methods or pop `released`; a lease may die in any thread.
    """

    def __init__(self, fd: int, kept: Kept | None = None) -> None:
        """`kept`: counts the bytes of it that the user keeps, now and after it is closed."""
        self.capacity = os.fstat(fd).st_size
        self.kept = Kept() if kept is None else kept
        self.released = Released()
        self.pinned: PinnedBlocks | None = None
        """If blocks are pinned where they are: which, and which of these may be reused."""
        self._pid = os.getpid()
        self._map: Mapping | None = Mapping(fd, self.capacity)
        # Last, because other threads call the windows that are registered here.
        _windows[id(self)] = self
        self.kept.open(self)

    @property
    def kept_bytes(self) -> int:
        """Bytes that were given to the user and are still referenced."""
        leases = list(self.released.leases.values())
        return sum(ref.nbytes for ref in leases if ref.delivered and ref() is not None)

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
        """The user is given these blocks: from now on a forked child may read them."""
        leases = self.released.leases
        for offset in offsets:
            ref = leases.get(offset)
            if ref is not None:
                ref.delivered = True

    def delivered(self, getpid: Callable[[], int] = os.getpid) -> list[Bytes]:
        """The lent blocks that were given to the user and are still referenced."""
        if getpid() != self._pid:
            return []  # a forked child: the blocks are the parent's
        leases = list(self.released.leases.values())
        return [array for ref in leases if ref.delivered and (array := ref()) is not None]

    def pin_in_place(
        self, memory: HostMemory, quota: Quota, wake: Callable[[], None]
    ) -> PinnedBlocks | None:
        """From now on blocks may be pinned where they are; None if it is too late for that."""
        mapping = self._map
        if self.pinned is None and mapping is not None:
            self.pinned = PinnedBlocks(
                memory, mapping.address, self.capacity, quota, keep=mapping.buffer, wake=wake
            )
        return self.pinned

    @property
    def has_released(self) -> bool:
        """Whether `take_released` may return something."""
        return bool(self.released) or (self.pinned is not None and self.pinned.has_free)

    def take_released(self) -> list[int]:
        """All offsets released since the last call, to be sent to the worker."""
        forks.sweep()
        offsets: list[int] = []
        if self.released.leases:  # else nothing is lent
            while self.released:
                offsets.append(self.released.popleft())
        return offsets if self.pinned is None else self.pinned.release(offsets)

    def handover(self) -> list[tuple[int, int]]:
        """The worker is dead and all its messages have been read: the blocks (offset, size) that
        its successor must not overwrite.

        Releases meant for the dead worker are dropped. A block that is listed will be released to
        the successor later; one that is not listed never will. Listing and dropping must be one
        step. Otherwise the release of a lease that dies in between would be lost for ever or,
        worse, reach the successor when it has already put another block in that place.
        """
        leases = list(self.released.leases.values())
        alive = [(ref, ref()) for ref in leases]
        for ref, array in alive:
            if array is None:
                self.released.forget(ref)
        held = [(ref.offset, ref.nbytes) for ref, array in alive if array is not None]
        if self.pinned is not None:
            held += self.pinned.handover()
        return held

    def close(self) -> None:
        """No worker writes here any more: give all memory back, that of live leases as they die.

        The mapping itself is removed with the last lease, even if this object no longer exists.
        """
        mapping, self._map = self._map, None
        if mapping is None:
            return
        forks.sweep()
        alive = [(ref, ref()) for ref in self.released.leases.values()]
        self.released.leases.clear()
        self.released.clear()
        if os.getpid() != self._pid:
            return  # a forked child: the pages are the parent's
        spare = []
        for ref, array in alive:
            if array is not None:
                spare.append((ref.offset, ref.nbytes))
                _Orphan.adopt(array, ref, mapping, self.kept)
        for start, end in outside(spare, self.capacity - self.capacity % PAGE):
            mapping.give_back(start, end)


class Kept:
    """The bytes that the user keeps of the batches of some windows, open or closed.

    The windows and the user's leases hold a reference to it; it is deleted with the last of them.
    """

    def __init__(self) -> None:
        self._windows: weakref.WeakValueDictionary[int, Window] = weakref.WeakValueDictionary()

    def open(self, window: Window) -> None:
        self._windows[id(window)] = window

    @property
    def nbytes(self) -> int:
        """Bytes that the user keeps. May be read in any thread."""
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
    nbytes: int  # 0 if it was not given to the user
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
    # Default arguments, because this may run during interpreter shutdown, when globals are cleared.
    known = all_orphans.pop(id(orphan), None)
    if known is not None and getpid() == known.pid:
        known.mapping.give_back(known.start, known.end)


_windows: weakref.WeakValueDictionary[int, Window] = weakref.WeakValueDictionary()


def _delivered(
    windows: weakref.WeakValueDictionary[int, Window] = _windows,
    all_orphans: dict[int, _Orphan] = _Orphan.all,
    getpid: Callable[[], int] = os.getpid,
) -> list[Bytes]:
    """All memory of batches that the user of this process keeps, over all loaders."""
    pid = getpid()
    found = [ref() for ref in windows.valuerefs()]  # a copy: other threads add to it
    arrays = [array for window in found if window is not None for array in window.delivered()]
    for orphan in list(all_orphans.values()):
        array = orphan() if orphan.pid == pid else None
        if array is not None:
            arrays.append(array)
    return arrays


forks.protect(_delivered)
