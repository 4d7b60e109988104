"""One recycled piece of shared memory per worker.

The problem. A batch is made in one process and used in another, and how long it is used is up to
the user: some drop it after a step, some keep a tensor of it for ever, in any thread, in a cycle
that the collector finds an hour later.

What does not work:

* One shared file per tensor (torch's way) costs a descriptor and a mapping per tensor that is
  kept, fresh zeroed pages for every batch, and a page fault for each of them on both sides.
* A ring of fixed slots waits for the user: ``list(loader)`` fills it and stops it for ever.
* Names in ``/dev/shm`` outlive a SIGKILL, and the mount is 64 MB in a container.
* Writing into a sparse file is a SIGBUS when there is no room.

The design. Each worker slot has one anonymous file (``memfd_create``) that is as large as the
machine's memory but sparse, so that its size is address space and costs nothing. Both sides map it
once. Only the worker allocates in it (`Arena`), so there is nothing to lock, and nothing a SIGKILL
could leave locked. Pages are reserved (``posix_fallocate``) before they are first written: lack
of room is then an answer (`Arena.take` returns None and the batch travels through the socket) and
never a signal. The main process (`window`) lends out NumPy arrays that lie directly on its mapping.
Tensors are built on such an array and keep it alive; when it dies, a weak reference puts the
block's offset on a deque, from where it goes back to the worker with the next task.

When a block may be recycled:

* never published, and no object in the worker refers to it any more; or
* published, released by the main process, and no object in the worker refers to it (a collate
  function may have kept the batch in a cache).

A block is published once. If the worker sends the same memory again it is copied, so that each
block has one owner at a time and main's in-place changes never show up in a later batch.

When a worker dies its replacement maps the same file and is told which blocks are still lent; all
else is free. Its pages are used again, which is quicker than new ones, unless they may be why the
worker died. When the slot is closed, unused memory goes back to the system at once, and lent
blocks follow one by one as they are released. Tensors the user has kept stay valid for ever.

Weak-reference callbacks may run at any moment, in any thread, inside any statement that allocates.
Here they do one thing, ``deque.append``, which is a single C call: it cannot be interrupted by a
signal handler, needs no lock, and is harmless in a process that was forked off.

This module has the worker's side; the main process's is in `window`.
"""

from __future__ import annotations

import errno
import os
import weakref
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable
from threading import get_ident

import numpy as np
import numpy.typing as npt

from holdfast import kernel
from holdfast.transport.extents import PAGE, Extents, rounded_up
from holdfast.transport.mapping import Mapping, outside

Bytes = npt.NDArray[np.uint8]

CHUNK = 256 << 10
"""Memory is reserved and given back in pieces of this size."""
RESERVE_STEP = 4 << 20
"""One ``posix_fallocate`` call. tmpfs undoes a call that a signal interrupts: with a profiler's
timer running, one call for a whole gigabyte would start again for ever."""
SLACK = 16 << 20
MEMORY_OF_PEAK = 64
_NO_ROOM = frozenset({errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT})


class Ref(weakref.ref[Bytes]):
    """A weak reference to the array on a block; the callback finds the block in it."""

    __slots__ = ("delivered", "nbytes", "offset")
    offset: int
    nbytes: int
    delivered: bool  # only for leases: whether the batch was given to the user


class Block:
    """A piece of the arena. It lives as long as `array` or anything built on it."""

    __slots__ = ("array", "nbytes", "offset")

    def __init__(self, offset: int, nbytes: int, array: Bytes) -> None:
        self.offset = offset
        self.nbytes = nbytes
        self.array = array


class Arena:
    """The worker's side: the only one that allocates in the file."""

    def __init__(
        self,
        fd: int,
        held: Iterable[tuple[int, int]] = (),
        *,
        keeps_pages: bool = False,
        takes_over: bool = False,
    ) -> None:
        """`held`: blocks of the file's previous worker that the main process still uses.
        `keeps_pages`: memory is never returned to the system, because a device may have been told
        of its pages (`pinned_in_place`). `takes_over`: whether memory that the previous worker has
        left is used again. What was not needed by then is given back after some batches."""
        status = os.fstat(fd)
        self.capacity = status.st_size
        self._fd = kernel.duplicate(fd)
        weakref.finalize(self, os.close, self._fd)
        self._map = Mapping(fd, self.capacity)
        # Where the mapping begins in this process.
        self.base = self._map.address
        self._pid = os.getpid()
        self._keeps_pages = keeps_pages
        self._thread = get_ident()
        self._extents = Extents(self.capacity)
        self._reserved = bytearray(-(-self.capacity // CHUNK))
        self._reserved_chunks = 0
        self._reach = 0
        self._views: dict[int, Ref] = {}
        self._lent: set[int] = set()
        self._private: list[int] = []
        self._gone: deque[Ref] = deque()
        self._peak = self._last_peak = self._trims = self._quiet_until = 0
        # Called before more memory is reserved: reads releases that have arrived, passes them to
        # `release`, and returns whether there were any.
        self.look_for_released: Callable[[], bool] = lambda: False
        held = list(held)
        for offset, nbytes in held:
            self._extents.reserve(offset, nbytes)
            self._lent.add(offset)
            self._reach = max(self._reach, offset + nbytes)
            # Only whole chunks: the rest of a chunk that is held in part is given back below.
            self._flag(-(-offset // CHUNK), (offset + nbytes) // CHUNK)
        self._leftovers = bool(status.st_blocks) and not keeps_pages
        if self._leftovers and not takes_over:
            # The predecessor's unfinished batch may be gigabytes, and may be why it died.
            self._leftovers = False
            for start, end in outside(held, self.capacity):
                self._map.give_back(start, end)

    @property
    def reserved(self) -> int:
        """Bytes of memory that this worker has reserved, in use or not."""
        return self._reserved_chunks * CHUNK

    def take(self, nbytes: int) -> Block | None:
        """A block of `nbytes`, or None if there is no room for it."""
        if os.getpid() != self._pid or get_ident() != self._thread:
            # A process forked off the worker must not write into the worker's batches, and this
            # class is not thread-safe. Without a block the batch travels through the socket.
            return None
        self._recycle()
        offset = self._extents.allocate(nbytes)
        if (offset is None or not self._is_reserved(offset, nbytes)) and self.look_for_released():
            if offset is not None:
                self._extents.free(offset)
            offset = self._extents.allocate(nbytes)
        if offset is None:
            return None
        if not self._reserve(offset, nbytes or 1):
            self._extents.free(offset)
            return None
        if self._extents.in_use > self._peak:
            self._peak = self._extents.in_use
        array: Bytes = np.ndarray(nbytes, np.uint8, self._map.buffer, offset)
        view = Ref(array, self._gone.append)
        view.offset = offset
        view.nbytes = nbytes
        self._views[offset] = view
        insort(self._private, offset)
        return Block(offset, nbytes, array)

    def find(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """(block, offset in it) if the memory lies in a block that is not published yet."""
        place = address - self.base
        if not 0 <= place < self.capacity:
            return None
        at = bisect_right(self._private, place) - 1
        if at < 0:
            return None
        offset = self._private[at]
        inside = place - offset
        if inside + nbytes > self._views[offset].nbytes:
            return None
        return offset, inside

    def nbytes_of(self, offset: int) -> int:
        """The size of a block that is not published yet."""
        return self._views[offset].nbytes

    def publish(self, offset: int) -> None:
        """The block goes to the main process and stays until `release`."""
        if not self._remove_private(offset):
            raise ValueError(f"no unpublished block at {offset}")
        self._lent.add(offset)

    def release(self, offset: int) -> None:
        """The main process no longer uses the block. Unknown offsets are ignored."""
        if offset in self._lent:
            self._lent.discard(offset)
            if offset not in self._views:
                self._extents.free(offset)

    def trim(self) -> None:
        """Give back memory that the last batches did not need. Call it between batches."""
        if not self._may_give_back():
            return
        self._trims += 1
        if self._trims % MEMORY_OF_PEAK == 0:
            self._last_peak, self._peak = self._peak, self._extents.in_use
            self._give_back_leftovers()
        peak = max(self._peak, self._last_peak)
        if self.reserved <= 2 * peak + SLACK or self._trims < self._quiet_until:
            return
        self._quiet_until = self._trims + MEMORY_OF_PEAK
        for start, size in reversed(self._extents.free_extents()):
            self._give_back_chunks(start, min(start + size, self._reach))
            if self.reserved <= peak + SLACK:
                break

    def shrink(self) -> None:
        """Give back all memory that no block uses. Call it between batches."""
        if not self._may_give_back():
            return
        self._peak = self._last_peak = self._extents.in_use
        self._give_back_leftovers()
        for start, size in self._extents.free_extents():
            self._give_back_chunks(start, min(start + size, self._reach))

    def _may_give_back(self) -> bool:
        if os.getpid() != self._pid:
            return False
        self._recycle()
        return not self._keeps_pages

    def _recycle(self) -> None:
        gone = self._gone
        while gone:
            offset = gone.popleft().offset
            del self._views[offset]
            if offset not in self._lent:
                self._remove_private(offset)
                self._extents.free(offset)

    def _remove_private(self, offset: int) -> bool:
        at = bisect_left(self._private, offset)
        if at == len(self._private) or self._private[at] != offset:
            return False
        del self._private[at]
        return True

    def _is_reserved(self, offset: int, nbytes: int) -> bool:
        end = (offset + nbytes - 1) // CHUNK + 1
        return self._reserved.find(0, offset // CHUNK, end) < 0

    def _reserve(self, offset: int, nbytes: int) -> bool:
        flags = self._reserved
        end = (offset + nbytes - 1) // CHUNK + 1
        at = flags.find(0, offset // CHUNK, end)
        if at < 0:
            return True  # recycled memory: no system call
        while at >= 0:
            until = flags.find(1, at, min(end, at + RESERVE_STEP // CHUNK))
            if until < 0:
                until = min(end, at + RESERVE_STEP // CHUNK)
            try:
                stop = min(until * CHUNK, self.capacity)
                kernel.reserve(self._fd, at * CHUNK, stop, lambda: self._all_but(offset))
            except OSError as error:
                if error.errno in _NO_ROOM:
                    return False
                raise
            self._map.populate(at * CHUNK, stop)
            self._flag(at, until)
            self._reach = max(self._reach, stop)
            at = flags.find(0, until, end)
        return True

    def _all_but(self, new: int) -> list[tuple[int, int]]:
        """The blocks in use that have their memory already."""
        return [(offset, nbytes) for offset, nbytes in self._extents.used() if offset != new]

    def _flag(self, first: int, last: int) -> None:
        """Mark chunks as reserved, none of which was before."""
        if last > first:
            self._reserved[first:last] = b"\1" * (last - first)
            self._reserved_chunks += last - first

    def _give_back_leftovers(self) -> None:
        """Give back what the previous worker has left and this one has not used."""
        if not self._leftovers:
            return
        self._leftovers = False
        for start, size in self._extents.free_extents():
            at, end = start // CHUNK, -(-(start + size) // CHUNK)
            while (at := self._reserved.find(0, at, end)) >= 0:
                until = self._reserved.find(1, at, end)
                until = end if until < 0 else until
                first, last = max(start, at * CHUNK), min(start + size, until * CHUNK)
                self._map.give_back(rounded_up(first, PAGE), last - last % PAGE)
                at = until

    def _give_back_chunks(self, start: int, end: int) -> None:
        first, last = -(-start // CHUNK), end // CHUNK
        if last > first:
            # Even if none is reserved: small blocks of a predecessor may have been there.
            self._map.give_back(first * CHUNK, last * CHUNK)
            self._reserved_chunks -= self._reserved.count(1, first, last)
            self._reserved[first:last] = bytes(last - first)
