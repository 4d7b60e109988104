"""Which parts of an arena are registered as pinned memory, and when a block of them may be reused.

Experimental, and never run on a GPU by its authors: see docs/accelerators.md.

The idea. Copying a batch to pinned memory is a copy too many: the batch already lies in memory that
the trainer has mapped. `cudaHostRegister` makes such memory pinned where it is. It takes some
milliseconds for 40 MB, about as long as the copy, but a block of the arena is used again and again
and has to be registered once.

What a registered block lacks, compared with torch's pinned allocator, and what is done about it:

* An asynchronous copy to the device may still be reading when the user drops the batch, and the
  worker must not write there before it has ended. torch's allocator knows which streams have used a
  block. We do not. So a block that is released waits behind a *fence*: events that are recorded,
  after the release, on all streams that may have used it (`cuda_host_memory` says which).
* Pages that are returned to the system while they are registered are replaced in the mapping, but
  the device goes on reading the old ones. So the workers of such a loader never return pages.
* A copy may not begin in one registration and end in another, or outside of one. So a block is used
  in place only if it lies inside of one chunk. One that lies across a border is copied before the
  user gets it.
* A mapping must be unregistered before it is unmapped. So chunks hold the mapping's memory, and a
  chunk is unregistered only when no tensor lives in it and its fence has passed.

Chunks. The first block in a place is registered exactly. Workers place batches of equal size in the
same places again, so that is the end of it. If sizes vary, a block lies across borders sooner or
later. Then the chunks it touches take no further blocks; when they are empty they are registered
again as one, together with the block. Chunks only ever grow, so this ends after a few batches.

Threads. Chunks are changed by the pinning thread only. Blocks are released in any thread that holds
the pool's lock, and go back to the worker there; a lock of this module protects what they share. No
call to the device's driver is made while it is held.
"""

from __future__ import annotations

import os
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from .arena import Bytes
from .extents import PAGE, rounded_up

LEAST = 1 << 20
"""Bytes of a block from which on it is worth a registration. Smaller ones are copied."""
SLACK = 16 << 20
"""Joined chunks end at a multiple of this, because the next block may be a little larger."""
MOST_JOINS = 32
"""Joins in one arena, after which blocks that lie across borders are copied for good."""
PATIENCE = 64
"""Blocks that are copied while a chunk does not become empty, before it is used again as it is."""
LOOK_EVERY = 0.02  # seconds between two looks at fences

Claim = Literal["in place", "elsewhere", "across"]


class Fence(Protocol):
    """Everything that was in the queues of the device when it was made."""

    def passed(self) -> bool: ...


class HostMemory(Protocol):
    """The device's driver."""

    def register(self, address: int, nbytes: int) -> str | None:
        """Pin memory where it is; the error, if that failed."""

    def unregister(self, address: int) -> None: ...

    def fence(self) -> Fence:
        """A fence behind all that may read or write memory that was released before this call."""


class Quota:
    """How many bytes may be registered, over all loaders of this process."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> bool:
        with self._lock:
            if self.used + nbytes > self.limit:
                return False
            self.used += nbytes
            return True

    def give(self, nbytes: int) -> None:
        with self._lock:
            self.used -= nbytes


@dataclass(eq=False, slots=True)
class Chunk:
    """A part of the arena that is registered."""

    start: int
    end: int
    blocks: set[int] = field(default_factory=set)
    """Offsets of blocks that the user has, or that wait behind a fence."""
    refused: int | None = None
    """Blocks that were copied since it takes none because it is to be joined; None if it does."""
    stays: bool = False
    """It did not become empty: it is not joined."""
    fence: Fence | None = None
    """After the end of its loader: what has to pass before it is unregistered."""

    def holds(self, start: int, end: int) -> bool:
        return self.start <= start and end <= self.end


class PinnedBlocks:
    """The registered chunks of one arena, and the blocks in them."""

    def __init__(
        self,
        memory: HostMemory,
        address: int,
        capacity: int,
        quota: Quota,
        *,
        keep: object = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`address`: where the arena is mapped. `keep`: what keeps it mapped. `wake` is called when
        `attend` has something to do."""
        self.chunks: list[Chunk] = []
        self.failure: str | None = None
        """Why nothing more is registered."""
        self._memory = memory
        self._address = address
        self._capacity = capacity
        self._quota = quota
        self._keep = keep
        self._wake = wake
        self._joins = 0
        self._lock = threading.RLock()  # a signal handler of the user's may use the loader
        self._claimed: dict[int, tuple[int, Chunk, weakref.ref[Bytes]]] = {}
        self._released: list[int] = []  # and behind no fence yet
        self._waiting: deque[tuple[Fence, list[int]]] = deque()
        self._free: list[int] = []  # may go back to the worker

    # -- in the pinning thread ------------------------------------------------------------

    def claim(self, offset: int, block: Bytes) -> Claim:
        """The user is about to get this block. "in place": it is pinned. "elsewhere": it is not,
        and no part of it is. "across": a part of it may be, so it must be copied."""
        start = offset - offset % PAGE
        end = rounded_up(offset + block.nbytes, PAGE)
        touched = self._touched(start, end)
        if len(touched) == 1 and touched[0].holds(start, end):
            return self._claim_inside(touched[0], offset, block)
        if not touched and block.nbytes < LEAST:
            return "elsewhere"
        if touched and not self._may_join(touched):
            return "across"
        chunk = self._register(start, end, touched)
        if chunk is None:
            return "elsewhere"
        self._note(chunk, offset, block)
        return "in place"

    def attend(self) -> float | None:
        """Let blocks whose fence has passed go back; seconds until the next look, if there is
        something to wait for."""
        with self._lock:
            released, self._released = self._released, []
        if released:
            self._waiting.append((self._memory.fence(), released))
        while self._waiting and self._waiting[0][0].passed():
            with self._lock:
                for offset in self._waiting.popleft()[1]:
                    self._claimed.pop(offset)[1].blocks.discard(offset)
                    self._free.append(offset)
        return LOOK_EVERY if self._waiting else None

    def _touched(self, start: int, end: int) -> list[Chunk]:
        at = max(0, bisect_right(self.chunks, start, key=lambda chunk: chunk.start) - 1)
        found = []
        for chunk in self.chunks[at:]:
            if chunk.start >= end:
                break
            if chunk.end > start:
                found.append(chunk)
        return found

    def _claim_inside(self, chunk: Chunk, offset: int, block: Bytes) -> Claim:
        if chunk.refused is not None:
            chunk.refused += 1
            if chunk.refused <= PATIENCE:
                return "across"
            chunk.refused, chunk.stays = None, True
        self._note(chunk, offset, block)
        return "in place"

    def _note(self, chunk: Chunk, offset: int, block: Bytes) -> None:
        with self._lock:
            chunk.blocks.add(offset)
            self._claimed[offset] = (block.nbytes, chunk, weakref.ref(block))

    def _may_join(self, touched: Sequence[Chunk]) -> bool:
        """Whether these can be registered anew, as one. If not yet, they take no more blocks."""
        if self._joins >= MOST_JOINS or any(chunk.stays for chunk in touched):
            return False
        if not any(chunk.blocks for chunk in touched):
            return True
        for chunk in touched:
            chunk.refused = chunk.refused or 0
        return False

    def _register(self, start: int, end: int, joined: Sequence[Chunk]) -> Chunk | None:
        if self.failure is not None:
            return None
        if joined:
            start = min(start, joined[0].start)
            end = rounded_up(max(end, joined[-1].end), SLACK)
            after = [chunk.start for chunk in self.chunks if chunk.start > joined[-1].start]
            end = min([end, self._capacity - self._capacity % PAGE, *after])
            self._joins += 1
            for chunk in joined:
                self._unregister(chunk)
        if not self._quota.take(end - start):
            return None
        error = self._memory.register(self._address + start, end - start)
        if error is not None:
            self._quota.give(end - start)
            self.failure = error
            return None
        chunk = Chunk(start, end)
        self.chunks.insert(bisect_right(self.chunks, start, key=lambda one: one.start), chunk)
        return chunk

    def _unregister(self, chunk: Chunk) -> None:
        self._memory.unregister(self._address + chunk.start)
        self._quota.give(chunk.end - chunk.start)
        self.chunks.remove(chunk)

    # -- under the pool's lock ------------------------------------------------------------

    def release(self, offsets: Iterable[int]) -> list[int]:
        """The user has dropped these blocks: those that may go back to the worker now, of these and
        of earlier ones."""
        with self._lock:
            behind = [offset for offset in offsets if offset in self._claimed]
            apart = [offset for offset in offsets if offset not in self._claimed]
            self._released += behind
            free, self._free = self._free, []
        if behind:
            self._wake()
        return apart + free

    @property
    def has_free(self) -> bool:
        """Whether `release` would return something by itself."""
        return bool(self._free)

    def handover(self) -> list[tuple[int, int]]:
        """The worker is dead: the blocks (offset, size) that the user has dropped and its successor
        must not overwrite yet. They are released later. Others never are."""
        with self._lock:
            self._free.clear()
            return [
                (offset, nbytes)
                for offset, (nbytes, _, block) in self._claimed.items()
                if block() is None
            ]

    # -- the end, in the pinning thread ---------------------------------------------------

    def close(self) -> None:
        """Unregister what no tensor lives in. The rest follows when a loader calls `sweep`."""
        with self._lock:
            self._released = []
            self._waiting.clear()
            self._free = []
        with _sweeping:
            _left.append(self)
        sweep()

    def unregister_unused(self) -> bool:
        """After `close`: whether nothing is registered any more."""
        for chunk in tuple(self.chunks):
            if any(self._claimed[offset][2]() is not None for offset in chunk.blocks):
                continue
            if chunk.fence is None:
                chunk.fence = self._memory.fence()
            if chunk.fence.passed():
                self._unregister(chunk)
        if not self.chunks:
            self._keep = None
        return not self.chunks


_left: list[PinnedBlocks] = []  # closed, and registered in part
_sweeping = threading.Lock()  # used in pinning threads only, where no signal handler runs


def sweep() -> None:
    """Unregister what closed loaders have left, if no tensor lives in it any more."""
    if not _left:
        return
    with _sweeping:
        _left[:] = [blocks for blocks in _left if not blocks.unregister_unused()]


# Bound here: a process may be forked while the interpreter takes its modules apart.
def _in_child(
    new_lock: Callable[[], threading.Lock] = threading.Lock, left: list[PinnedBlocks] = _left
) -> None:
    """The registrations are the parent's."""
    global _sweeping
    _sweeping = new_lock()
    left.clear()


os.register_at_fork(after_in_child=_in_child)
