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

Who may recycle a block:

* never published, and no object in the worker refers to it any more; or
* published, released by the main process, and no object in the worker refers to it (a collate
  function may have kept the batch in a cache).

A block is published once. If the worker sends the same memory again it is copied, so that each
block has one owner at a time and main's in-place changes never show up in a later batch.

When a worker dies its replacement maps the same file and is told which blocks are still lent; all
else is free. When the slot is closed, unused memory goes back to the system at once, and lent
blocks follow one by one as they are released. Tensors the user has kept stay valid for ever.

Weak-reference callbacks may run at any moment, in any thread, inside any statement that allocates.
Here they do one thing, ``deque.append``, which is a single C call: it cannot be interrupted by a
signal handler, needs no lock, and is harmless in a process that was forked off.

This module has the worker's side and what both sides share; the main process's is in `window`.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import weakref
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from threading import get_ident
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast import kernel

__all__ = [
    "PAGE",
    "Arena",
    "Block",
    "Bytes",
    "Extents",
    "Mapping",
    "Ref",
    "create",
    "default_capacity",
    "outside",
    "rounded_up",
]

Bytes = npt.NDArray[np.uint8]

GRAIN = 64
"""Offsets and sizes are multiples of this: a cache line, which also aligns vector loads."""
PAGE = 4096
LARGE = 64 << 10
"""Blocks from this size on begin and end on a page, so that their pages can be given back."""
CHUNK = 256 << 10
"""Memory is reserved and given back in pieces of this size."""
RESERVE_STEP = 4 << 20
"""One ``posix_fallocate`` call. tmpfs undoes a call that a signal interrupts: with a profiler's
timer running, one call for a whole gigabyte would start again for ever."""
SMALLEST = 64 << 20
LAST_RESORT = 1 << 20  # under a tight RLIMIT_FSIZE: what does not fit travels in the message
LARGEST = 256 << 30
"""Address space has a limit too (128 TiB, for all workers of all loaders)."""
SLACK = 16 << 20
MEMORY_OF_PEAK = 64
_NO_ROOM = frozenset({errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT})


def rounded_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _rounded(nbytes: int) -> int:
    if nbytes >= LARGE:
        return rounded_up(nbytes, PAGE)
    return rounded_up(nbytes, GRAIN) or GRAIN


class Extents:
    """Which parts of ``[0, capacity)`` are in use: first fit, neighbours merged, no I/O.

    Free extents are kept in sorted lists by size class (powers of two), so that a search looks
    at one entry for each class that surely fits and scans only the class that may or may not.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity - capacity % GRAIN
        self.in_use = 0
        self._used: dict[int, int] = {}
        self._free: dict[int, int] = {}
        self._free_by_end: dict[int, int] = {}
        self._classes: list[list[int]] = [[] for _ in range(64)]
        self._nonempty = 0
        if self.capacity:
            self._add_free(0, self.capacity)

    @property
    def top(self) -> int:
        """The end of the highest block in use."""
        return self._free_by_end.get(self.capacity, self.capacity)

    def __len__(self) -> int:
        return len(self._used)

    def used(self) -> list[tuple[int, int]]:
        return sorted(self._used.items())

    def free_extents(self) -> list[tuple[int, int]]:
        return sorted(self._free.items())

    def allocate(self, nbytes: int) -> int | None:
        size = _rounded(nbytes)
        unit = PAGE if size >= LARGE else GRAIN
        start = self._first_fit(size, unit)
        if start is None:
            return None
        offset = rounded_up(start, unit)
        self._carve(start, offset, size)
        return offset

    def reserve(self, offset: int, nbytes: int) -> None:
        """Mark as used a block that was allocated earlier, by another process."""
        size = _rounded(nbytes)
        for starts in self._classes:
            at = bisect_right(starts, offset) - 1
            if at >= 0 and offset + size <= starts[at] + self._free[starts[at]]:
                self._carve(starts[at], offset, size)
                return
        raise ValueError(f"[{offset}, {offset + size}) is not free")

    def free(self, offset: int) -> None:
        size = self._used.pop(offset)
        self.in_use -= size
        end = offset + size
        before = self._free_by_end.get(offset)
        if before is not None:
            self._drop_free(before)
            offset = before
        if end in self._free:
            end += self._drop_free(end)
        self._add_free(offset, end - offset)

    def _first_fit(self, size: int, unit: int) -> int | None:
        surely = size + unit - GRAIN
        smallest_class = size.bit_length() - 1
        classes = self._nonempty >> smallest_class << smallest_class
        best: int | None = None
        while classes:
            bit = classes & -classes
            classes ^= bit
            starts = self._classes[bit.bit_length() - 1]
            if bit >= surely:
                if best is None or starts[0] < best:
                    best = starts[0]
                continue
            for start in starts:
                if best is not None and start >= best:
                    break
                if rounded_up(start, unit) + size <= start + self._free[start]:
                    best = start
                    break
        return best

    def _carve(self, start: int, offset: int, size: int) -> None:
        end = start + self._drop_free(start)
        if offset > start:
            self._add_free(start, offset - start)
        if offset + size < end:
            self._add_free(offset + size, end - offset - size)
        self._used[offset] = size
        self.in_use += size

    def _add_free(self, start: int, size: int) -> None:
        self._free[start] = size
        self._free_by_end[start + size] = start
        number = size.bit_length() - 1
        insort(self._classes[number], start)
        self._nonempty |= 1 << number

    def _drop_free(self, start: int) -> int:
        size = self._free.pop(start)
        del self._free_by_end[start + size]
        number = size.bit_length() - 1
        starts = self._classes[number]
        del starts[bisect_left(starts, start)]
        if not starts:
            self._nonempty ^= 1 << number
        return size


def default_capacity(meminfo: str = "/proc/meminfo") -> int:
    """Memory and swap together, rounded up to a power of two: more than can ever be in use."""
    total = 0
    try:
        with open(meminfo) as lines:
            for line in lines:
                if line.startswith(("MemTotal:", "SwapTotal:")):
                    total += int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        total = 0
    total = total or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    capacity = min(1 << (total - 1).bit_length(), LARGEST)
    limit = (kernel.limit(resource.RLIMIT_AS) or (resource.RLIM_INFINITY,))[0]
    if limit != resource.RLIM_INFINITY:
        # Under `ulimit -v` address space is what runs out first: leave it to the user's heap.
        capacity = min(capacity, 1 << max(limit // 32, 1).bit_length() - 1)
    return max(capacity, SMALLEST)


def create(name: str, capacity: int | None = None) -> int:
    """A new sparse memory file; the caller owns the descriptor. Its size is the capacity.

    Where limits forbid the size (RLIMIT_FSIZE, RLIMIT_AS) it is halved until it fits.
    """
    capacity = rounded_up(capacity or default_capacity(), PAGE)
    smallest = min(capacity, LAST_RESORT)
    fd = kernel.memory_file(name)
    while True:
        try:
            os.ftruncate(fd, capacity)
            Mapping(fd, capacity)
            return fd
        except OSError:
            if capacity <= smallest:
                os.close(fd)
                raise
            capacity = max(rounded_up(capacity // 2, PAGE), smallest)


def _new_libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes = (address, size, number, number, number, ctypes.c_int64)
    libc.mmap.restype = ctypes.c_void_p
    libc.munmap.argtypes = (address, size)
    libc.madvise.argtypes = (address, size, number)
    return libc


_libc = _new_libc()
_MAP_FAILED = ctypes.c_void_p(-1).value


class Mapping:
    """A file's memory, shared with every other process that maps it.

    Python's own `mmap` keeps a descriptor of the file open (before 3.13, always). Each batch that
    the user keeps after its loader is closed would then cost a descriptor.
    """

    __slots__ = ("address", "buffer", "size")

    def __init__(self, fd: int, size: int) -> None:
        address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if address == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.address: int = address
        self.size = size
        self.buffer: Any = (ctypes.c_ubyte * size).from_address(address)
        # Arrays and tensors hold the buffer, not this object.
        weakref.finalize(self.buffer, _libc.munmap, address, size).atexit = False
        # The file is mostly a hole: a core dump would read, and so allocate, every page of it.
        _libc.madvise(address, size, kernel.DONTDUMP)

    # Default arguments, because batches may die, and call this, during interpreter shutdown, when
    # the module's globals are cleared.
    def give_back(
        self,
        start: int,
        end: int,
        advise: Callable[[int, int, int], object] = _libc.madvise,
        remove: int = kernel.REMOVE,
    ) -> None:
        """Return whole pages to the system: they read as zero afterwards, in every process.

        A kernel that does not support this keeps the pages until the file is closed; the error is
        ignored.
        """
        if end > start:
            advise(self.address + start, end - start, remove)


def outside(blocks: Iterable[tuple[int, int]], end: int) -> Iterator[tuple[int, int]]:
    """The page ranges below `end` that touch none of the blocks."""
    at = 0
    for offset, nbytes in sorted(blocks):
        yield at, offset - offset % PAGE
        at = max(at, rounded_up(offset + nbytes, PAGE))
    yield at, end


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

    def __init__(self, fd: int, held: Iterable[tuple[int, int]] = ()) -> None:
        """`held`: blocks of the file's previous worker that the main process still uses."""
        status = os.fstat(fd)
        self.capacity = status.st_size
        self._fd = kernel.duplicate(fd)
        weakref.finalize(self, os.close, self._fd)
        self._map = Mapping(fd, self.capacity)
        # Where the mapping begins in this process.
        self.base = self._map.address
        self._pid = os.getpid()
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
        if status.st_blocks:
            # The predecessor's unfinished batch may be gigabytes, and may be why it died.
            for start, end in outside(held, self.capacity):
                self._map.give_back(start, end)

    @property
    def in_use(self) -> int:
        """Bytes in blocks that cannot be recycled yet."""
        self._recycle()
        return self._extents.in_use

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
        if os.getpid() != self._pid:
            return
        self._recycle()
        self._trims += 1
        if self._trims % MEMORY_OF_PEAK == 0:
            self._last_peak, self._peak = self._peak, self._extents.in_use
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
        if os.getpid() != self._pid:
            return
        self._recycle()
        self._peak = self._last_peak = self._extents.in_use
        for start, size in self._extents.free_extents():
            self._give_back_chunks(start, min(start + size, self._reach))

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

    def _give_back_chunks(self, start: int, end: int) -> None:
        first, last = -(-start // CHUNK), end // CHUNK
        if last > first:
            # Even if none is reserved: small blocks of a predecessor may have been there.
            self._map.give_back(first * CHUNK, last * CHUNK)
            self._reserved_chunks -= self._reserved.count(1, first, last)
            self._reserved[first:last] = bytes(last - first)
