"""The file behind an arena, and its memory in this process."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from holdfast import kernel
from holdfast.transport.extents import PAGE, rounded_up

SMALLEST = 64 << 20
LAST_RESORT = 1 << 20  # under a tight RLIMIT_FSIZE: what does not fit travels in the message
LARGEST = 256 << 30
"""Address space has a limit too (128 TiB, for all workers of all loaders)."""


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

    def populate(self, start: int, end: int) -> None:
        """Map whole pages that the file has, in one call: a fault for each of them would take five
        times as long. A kernel before 5.14 cannot, and then there are faults."""
        _libc.madvise(self.address + start, end - start, kernel.POPULATE_WRITE)


def outside(blocks: Iterable[tuple[int, int]], end: int) -> Iterator[tuple[int, int]]:
    """The page ranges below `end` that touch none of the blocks."""
    at = 0
    for offset, nbytes in sorted(blocks):
        yield at, offset - offset % PAGE
        at = max(at, rounded_up(offset + nbytes, PAGE))
    yield at, end
