"""The black box: what a worker was doing, in memory that survives it.

A zombie has no memory to look at and a killed process cannot report. So each worker notes, before
every step, which batch and which sample it works on, in a page shared with the parent, and keeps
there its last random states: before the last batch, before the current one and before the next.
Inside a batch only the position changes from sample to sample, which is a single store (less than a
tenth of a microsecond, where asking for the time would cost as much as a small sample); the parent
reads the note now and then, and knows how long it has been the same.

There too is a bell: the parent rings it when an order should not wait behind the tasks that are in
the channel already. To look at it between two batches costs nothing.

There too are a fatal signal that it sends to itself (where somebody listens for it, see
`engine.alone`), its size when it was last measured, and the last it wrote to standard error; the
latter is written by the nursery, which reads it.

All workers of a pool share one anonymous memory file: a region for each, and far behind them, in
the sparse part of the file, a place for each worker's `faulthandler` dump.

Random states are numbered by how many items (tasks and epoch resumptions) the worker had answered
when they were saved. State n+1 is written before answer n+1 is sent, and gets its number last.
There are three slots, used in turn, so it goes neither where state n is nor where n-1 is: whatever
moment a SIGKILL chooses, the state that fits the number of answers the parent has received is
whole, and so is the one before it, from which the last batch of a stream can be made again. If
answer n+1 has left the state as it was, nothing is written but that the slot of state n holds for
n+1 too. A slot has room for the states of many generators of the dataset's own; what is not used of
it is a hole in the file and takes none: a worker without such generators takes 44 KiB. Where there
are no memory files, and the file lies in a folder, all of it is reserved at once, 780 KiB for each
worker: a folder may be full before memory is, and a hole that cannot be filled then is a SIGBUS.
"""

from __future__ import annotations

import mmap
import os
import struct
from time import monotonic
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast import kernel

__all__ = [
    "STATE",
    "STEPS",
    "WORDS",
    "BlackBoxes",
    "NoRecorder",
    "Note",
    "Recorder",
    "Size",
    "can_be_opened",
    "keep_dump",
    "keep_words",
]

STEPS = ("boot", "start-up", "fetch", "collate", "send", "idle", "replay", "stop")
BOOT, START, FETCH, COLLATE, SEND, IDLE, REPLAY, STOP = range(len(STEPS))

NAME = "holdfast-blackbox"
NURSERY = "hf_nursery"
"""What the process that forks the workers is called, so that it is known from outside."""
_NOTE = struct.Struct("<qqqd")  # task, position in the batch, step, since (monotonic)
_NUMBER = struct.Struct("<q")
# For which numbers a state holds, the first and the last, each + 1; and how many bytes it has.
_RANGE = struct.Struct("<qqq")
_SLOT = 256 * 1024
_SLOTS = 4096  # the first slot starts a page after the note
STATE = _SLOT - _RANGE.size
"""Bytes that a random state may have."""
_COUNT = 3  # of slots
_WORDS = _SLOTS + _COUNT * _SLOT
_REGION = _WORDS + 8192
WORDS = 8192 - _NUMBER.size  # bytes of standard error that are kept
_SIZE = struct.Struct("<qqd")  # resident and shared bytes, when (monotonic)
_SIZE_AT = 64  # in a cache line of its own, behind the note
_BELL_AT = 128  # in a cache line of its own: it is the parent's
_CONFESSED_AT = 192  # a signal it has sent to itself
_DUMP = 4 << 20  # sparse room for one worker's dumps ...
_SHORT_DUMP = 32 << 10  # ... and under a tight `ulimit -f`
_NOTHING = -1


class Note(NamedTuple):
    """What a worker wrote last."""

    task: int | None
    position: int | None
    step: str
    since: float  # when it came to this step; the position may have changed since


class Size(NamedTuple):
    """How large a worker was when it measured itself, in bytes."""

    resident: int
    shared: int
    at: float  # monotonic


class BlackBoxes:
    """The parent's view of all black boxes of a pool; owns the memory file."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.fd = kernel.memory_file(NAME, room=workers * _REGION)
        try:
            try:
                os.ftruncate(self.fd, workers * (_REGION + _DUMP))
            except OSError:
                os.ftruncate(self.fd, workers * (_REGION + _SHORT_DUMP))
            self._dump = _dump_size(self.fd, workers)
            self._memory = kernel.mapped(self.fd, workers * _REGION)
        except BaseException:
            os.close(self.fd)
            raise
        for worker in range(workers):
            self.clear(worker)

    def clear(self, worker: int) -> None:
        """Before a worker starts: forget what its predecessor noted (not its random states)."""
        at = worker * _REGION
        _NOTE.pack_into(self._memory, at, _NOTHING, _NOTHING, BOOT, monotonic())
        _SIZE.pack_into(self._memory, at + _SIZE_AT, 0, 0, 0.0)
        _NUMBER.pack_into(self._memory, at + _BELL_AT, 0)
        _NUMBER.pack_into(self._memory, at + _CONFESSED_AT, 0)
        _NUMBER.pack_into(self._memory, at + _WORDS, _NOTHING)

    def ring(self, worker: int) -> None:
        """Have the worker look at all its orders as soon as it has finished a batch."""
        at = worker * _REGION + _BELL_AT
        _NUMBER.pack_into(self._memory, at, _NUMBER.unpack_from(self._memory, at)[0] + 1)

    def note(self, worker: int) -> Note:
        return _read_note(self._memory, worker * _REGION)

    def size(self, worker: int) -> Size | None:
        """What the worker measured last; None if it had not begun to."""
        size = Size(*_SIZE.unpack_from(self._memory, worker * _REGION + _SIZE_AT))
        return size if size.resident else None

    def confessed(self, worker: int) -> int:
        """The number of the fatal signal that it was about to send to itself; 0 for none."""
        number: int = _NUMBER.unpack_from(self._memory, worker * _REGION + _CONFESSED_AT)[0]
        return number

    def words(self, worker: int) -> str | None:
        """The end of what it wrote to standard error; None if nobody listened."""
        at = worker * _REGION + _WORDS
        length = _NUMBER.unpack_from(self._memory, at)[0]
        if length == _NOTHING:
            return None
        written = self._memory[at + _NUMBER.size : at + _NUMBER.size + length]
        if length == WORDS:  # the first line has probably lost its beginning
            written = written.partition(b"\n")[2] or written
        return written.decode(errors="replace")

    def random_state(self, worker: int, number: int) -> bytes | None:
        """The random state saved after `number` answers, if the worker got that far."""
        return _find_state(self._memory, worker * _REGION, number)

    def take_dump(self, worker: int) -> str:
        """What `faulthandler` wrote for this worker, which is then forgotten."""
        at = _dump_at(self.fd, self.workers, worker)
        text = os.pread(self.fd, self._dump, at).rstrip(b"\0")
        if text:
            for start in range(0, len(text), 1 << 16):
                os.pwrite(self.fd, bytes(min(1 << 16, len(text) - start)), at + start)
        return text.decode(errors="replace")

    def close(self) -> None:
        self._memory.close()
        os.close(self.fd)


class Recorder:
    """The worker's view of its own black box."""

    def __init__(self, fd: int, workers: int, worker: int, dump: int | None = None) -> None:
        """`dump`: a file for its dumps, where the black boxes cannot be opened anew."""
        self._memory = kernel.mapped(fd, workers * _REGION)
        self._at = worker * _REGION
        view = memoryview(self._memory)
        # The position, for the loop over samples: cell[0] = 3.
        self.cell = view[self._at + 8 : self._at + 16].cast("q")
        # How often the parent has rung, to be compared with how often it had.
        bell = self._at + _BELL_AT
        self.bell = view[bell : bell + 8].cast("q").toreadonly()
        whole: NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8)
        starts = [self._at + _SLOTS + slot * _SLOT for slot in range(_COUNT)]
        # Cells, because a number must be there whole or not at all.
        self._ranges = [view[start : start + _RANGE.size].cast("q") for start in starts]
        self._slots = [whole[start + _RANGE.size : start + _SLOT] for start in starts]
        self._current = 0  # the slot of the last state
        if dump is not None:
            self.dump_fd = dump
            return
        # A file description of its own, so that its offset is nobody else's.
        self.dump_fd = kernel.reopen(fd, os.O_RDWR)
        os.lseek(self.dump_fd, _dump_at(fd, workers, worker), os.SEEK_SET)

    def note(self, task: int, position: int, step: int) -> None:
        _NOTE.pack_into(self._memory, self._at, task, position, step, monotonic())

    def measured(self, resident: int, shared: int, at: float) -> None:
        """Note this worker's size."""
        _SIZE.pack_into(self._memory, self._at + _SIZE_AT, resident, shared, at)

    def confess(self, number: int) -> None:
        """Note that this process is about to send itself a fatal signal."""
        _NUMBER.pack_into(self._memory, self._at + _CONFESSED_AT, number)

    @property
    def position(self) -> int | None:
        """The position of the last note: which sample it was that raised."""
        position = self.cell[0]
        return None if position == _NOTHING else position

    def take_up(self, number: int) -> bool:
        """Whether a predecessor has saved random state `number`; any later one is forgotten."""
        known = False
        for slot, place in enumerate(self._ranges):
            first, last, _ = place
            if first <= number + 1 <= last:
                self._current = slot
                place[1] = number + 1
                known = True
            elif first <= number <= last and not known:
                self._current = slot  # not to be written over before there is another
            elif first > number + 1:
                place[1] = 0
        return known

    def kept(self, number: int) -> bytes | None:
        """Random state `number`, if it is one of the last."""
        return _find_state(self._memory, self._at, number)

    def free_slot(self) -> NDArray[np.uint8]:
        """Where to save the next random state; `commit` makes it valid."""
        free = (self._current + 1) % _COUNT
        self._ranges[free][1] = 0
        return self._slots[free]

    def commit(self, number: int, size: int) -> None:
        """What is in the free slot now, so many bytes of it, is random state `number`."""
        self._current = (self._current + 1) % _COUNT
        place = self._ranges[self._current]
        place[2] = size
        place[0] = number + 1
        place[1] = number + 1

    def still(self, number: int) -> None:
        """Random state `number` is the same as the one before it."""
        self._ranges[self._current][1] = number + 1


def keep_words(fd: int, worker: int, words: bytes | None) -> None:
    """The end of what a worker has written to standard error; None if nobody listens to it."""
    length = _NOTHING if words is None else len(words)
    os.pwrite(fd, _NUMBER.pack(length) + (words or b""), worker * _REGION + _WORDS)


def can_be_opened(fd: int) -> bool:
    """Whether a worker can open the black boxes for itself: it takes /proc."""
    try:
        os.close(kernel.reopen(fd, os.O_RDWR))
    except (FileNotFoundError, PermissionError):
        return False
    return True


def keep_dump(fd: int, workers: int, worker: int, dump: int) -> None:
    """What a dead worker has left in a file of its own."""
    text = os.pread(dump, _dump_size(fd, workers), 0)
    os.pwrite(fd, text, _dump_at(fd, workers, worker))


def _dump_at(fd: int, workers: int, worker: int) -> int:
    return workers * _REGION + worker * _dump_size(fd, workers)


def _dump_size(fd: int, workers: int) -> int:
    """The room each worker has for its dumps in this file."""
    return os.fstat(fd).st_size // workers - _REGION


class NoRecorder:
    """For the main process, which nobody outlives to read its notes."""

    def note(self, task: int, position: int, step: int) -> None:
        pass


def _find_state(memory: mmap.mmap, region: int, number: int) -> bytes | None:
    for slot in range(_COUNT):
        at = region + _SLOTS + slot * _SLOT
        first, last, size = _RANGE.unpack_from(memory, at)
        if first <= number + 1 <= last:
            return memory[at + _RANGE.size : at + _RANGE.size + size]
    return None


def _read_note(memory: mmap.mmap | bytes, at: int) -> Note:
    task, position, step, since = _NOTE.unpack_from(memory, at)
    return Note(
        None if task == _NOTHING else task,
        None if position == _NOTHING else position,
        STEPS[step] if 0 <= step < len(STEPS) else "unknown",
        since,
    )


def read_from_outside(path: str, at: int) -> tuple[int, Note] | None:
    """The number of a worker of somebody else's pool, and its note.

    `path` is the file through one of the worker's descriptors, `at` that descriptor's offset: the
    place for dumps, which each worker has opened for itself, says who it is. None if it is not
    that descriptor.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        for dump in (_DUMP, _SHORT_DUMP):
            workers, rest = divmod(size, _REGION + dump)
            if not rest and at >= workers * _REGION:
                worker = (at - workers * _REGION) // dump
                note = os.pread(fd, _NOTE.size, worker * _REGION)
                return (worker, _read_note(note, 0)) if len(note) == _NOTE.size else None
    finally:
        os.close(fd)
    return None
