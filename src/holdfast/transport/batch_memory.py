"""Memory of large batches that worker threads make, used again.

The problem. A large batch in fresh memory costs more than to copy its samples there: the kernel
clears each page when it is first touched. Allocators keep small blocks for themselves, but return
large ones to the system.

The design. Each pool has a `BatchMemory`. A batch is made on a NumPy array that lies on one of its
blocks. Tensors are built on such an array and keep it alive, for as long as the user has them. When
it dies, a weak reference puts the block on a deque, from where a later batch takes it. No thread
waits for that: if no block is free, a new one is made.

Blocks that are free are limited in bytes (`allow`). They are released when none was used for some
seconds (`rest`), and when the pool closes. What the user keeps is the user's, and is freed with its
last tensor, also after the pool has closed.

Weak-reference callbacks run at any moment, in any thread, inside any statement that allocates. Here
they do one thing, ``deque.append``, which is a single C call: no signal handler runs in it, and it
takes no lock. The deque has a fixed length. So a user who drops a thousand batches at once leaves
only the last few of them there. They are counted against the limit when the next batch is made.

A block is private memory of the process. A forked child has its own copy of a page from the moment
one of the two writes to it, so that blocks are used again here changes nothing there.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque

import numpy as np

from holdfast.transport.placement import Bytes

LARGE = 1 << 20
"""Bytes from which on memory is used again. Allocators keep smaller blocks."""
ALIGNMENT = 64  # bytes, as in torch
FEW = 8  # blocks that have come back and were not looked at yet: those of one batch, or of a few


# Classes of their own: NumPy puts in place of an array's base the base of that, and so on, as long
# as all are of the array's class. Then an array on a block could die before what is built on it.
class _Memory(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """A block."""


class _Lease(weakref.ref[Bytes]):
    """A weak reference to the array on a block, and the block."""

    __slots__ = ("block",)
    block: _Memory


class _Base(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """What the array of a batch lies on. It keeps the lease alive until the callback was called,
    and no longer: so nothing else has to know of the blocks that are in use."""

    lease: _Lease | None = None


class Block:
    """Memory for one tensor. It is in use as long as `array` or anything built on it."""

    __slots__ = ("array",)

    def __init__(self, array: Bytes) -> None:
        self.array = array


class BatchMemory:
    """The blocks of one pool. Any thread may call any method."""

    def __init__(self) -> None:
        # Callbacks never take it. A signal handler of the user may use the loader that has it.
        self._lock = threading.RLock()
        self._returned: deque[_Lease] = deque(maxlen=FEW)
        self._free: list[_Memory] = []  # the last one returned is the last
        self._lent: list[weakref.ref[_Base]] = []  # in use, and some that were
        self._most_lent = 2 * FEW  # of them, before those that were are removed
        self._allowed = 0
        self._closed = False
        self._taken = False  # since the last `rest`

    def take(self, nbytes: int) -> Block | None:
        """Memory for a tensor of this size; None if it is small, or if the pool is closed."""
        if nbytes < LARGE or self._closed:
            return None
        with self._lock:
            self._taken = True
            self._sort()
            block = self._fitting(nbytes)
        if block is None:
            block = _new(nbytes)
        base = _Base(nbytes, np.uint8, block)
        array: Bytes = np.ndarray(nbytes, np.uint8, base)
        lease = _Lease(array, self._returned.append)
        lease.block = block
        with self._lock:
            if not self._closed:
                base.lease = lease
                self._note(base)
        return Block(array)

    def allow(self, nbytes: int) -> None:
        """Keep no more than so many bytes free from now on."""
        with self._lock:
            self._allowed = nbytes
            self._sort()

    def rest(self) -> None:
        """Release what is free if nothing was taken since the last call."""
        with self._lock:
            self._sort()
            if not self._taken:
                self._free.clear()
            self._taken = False

    def close(self) -> None:
        """Release what is free, now and later. What is in use stays valid."""
        with self._lock:
            self._closed = True
            for one in self._lent:
                base = one()
                if base is not None:
                    base.lease = None  # and with it the callback
            self._lent.clear()
            self._returned.clear()
            self._free.clear()

    # -- with the lock --------------------------------------------------------------------

    def _sort(self) -> None:
        """Take in what has come back, and release what is too much."""
        while self._returned:
            self._free.append(self._returned.popleft().block)
        while self._free and sum(map(len, self._free)) > self._allowed:
            self._free.pop(0)

    def _fitting(self, nbytes: int) -> _Memory | None:
        """The free block that fits best: not smaller, and less than twice as large."""
        fitting = [block for block in self._free if nbytes <= len(block) < 2 * nbytes]
        if not fitting:
            return None
        best = min(fitting, key=len)
        self._free = [block for block in self._free if block is not best]
        return best

    def _note(self, base: _Base) -> None:
        self._lent.append(weakref.ref(base))
        if len(self._lent) > self._most_lent:
            self._lent = [one for one in self._lent if one() is not None]
            self._most_lent = 2 * (FEW + len(self._lent))


def _new(nbytes: int) -> _Memory:
    """A new block. Sizes are rounded up by less than an eighth, so that batches of about the same
    size can use each other's. NumPy asks the kernel for huge pages, where that pays."""
    step = max(ALIGNMENT, 1 << max(0, nbytes.bit_length() - 4))
    nbytes = -(-nbytes // step) * step
    memory = _Memory(nbytes + ALIGNMENT, np.uint8)
    before = -memory.__array_interface__["data"][0] % ALIGNMENT
    return memory[before : before + nbytes].view(_Memory)
