"""The black box: what a worker was doing, in memory that survives it.

A killed process cannot report, and a zombie has no memory to read. So each worker has a region in a
memory file that it shares with the parent. It contains:

- the *note*: which batch and which sample the worker works on, written before every step. Inside a
  batch only the position changes from sample to sample, which is a single store (less than a tenth
  of a microsecond; asking for the time would cost as much as a small sample). The parent reads the
  note now and then, and knows how long it has been the same.
- its last random states: before the current batch, before the next, and those after the batches
  that the consumer has not had yet.
- the *doorbell*: a number that the parent increments when an order should not wait behind the tasks
  that are in the channel already. The worker compares it between two batches, which costs nothing.
- a fatal signal that the worker is about to send to itself (if a sample is being tested alone, see
  `processes.isolation`).
- its size when it was last measured.
- with a logbook, where its time went and how long samples took (`tally`).
- the end of what it wrote to standard error. The nursery, which forks the workers and reads their
  standard error, writes it.

All workers of a pool share one anonymous memory file: a region for each, and behind all regions, in
the sparse part of the file, a place for each worker's `faulthandler` dump. How many slots a region
has for random states is written at its beginning.

Random states are numbered by how many items (tasks, notices and epoch resumptions) the worker had
answered when they were saved. State n+1 is written before answer n+1 is sent, and its number is
written last. There are three slots or more, used in turn, so it overwrites neither state n nor n-1.
Whenever a SIGKILL comes, the state for the number of answers that the parent has received is
complete, and so is the one before it, from which the last batch of a stream can be made again. If
answer n+1 has not changed the state, only the range of slot n is extended to n+1.

A pool has three slots more than a worker can have answers that the consumer has not had. So the
state as of the last batch that the consumer has had is always there, for ``loader.state_dict()``.
That costs an ordinary batch nothing: the parent reads it only when it is asked for.

A slot has room for the states of many generators of the dataset. The unused part of it is a hole in
the file: a slot without such generators takes 12 KiB once it has been used. Where there are no
memory files, and the file is in a folder, all of it is reserved at once, 256 KiB for each slot: the
folder may be full before memory is, and a hole that cannot be filled would be a SIGBUS.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Collection, Iterable, Mapping
from time import monotonic
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast import kernel
from holdfast.autopsy.tally import SampleWatch, Tally, step_seconds

STEPS = ("boot", "start-up", "fetch", "collate", "send", "idle", "replay", "stop", "broadcast")
BOOT, START, FETCH, COLLATE, SEND, IDLE, REPLAY, STOP, BROADCAST = range(len(STEPS))

NAME = "holdfast-blackbox"
NURSERY = "hf_nursery"
"""The process name of the nursery, by which it is recognised from outside."""
_NOTE = struct.Struct("<qqqd")  # task, position in the batch, step, since (monotonic)
_NUMBER = struct.Struct("<q")
# The first and the last number for which a state is valid, each + 1; and its size in bytes.
_RANGE = struct.Struct("<qqq")
_SLOT_BYTES = 256 * 1024
_STDERR_AT = 4096  # a page after the note
_SLOTS_AT = _STDERR_AT + 8192
STATE = _SLOT_BYTES - _RANGE.size
"""Bytes that a random state may have."""
FEWEST_SLOTS = 3
STDERR_TAIL = 8192 - _NUMBER.size  # bytes of standard error that are kept
_SIZE = struct.Struct("<qqd")  # resident and shared bytes, when (monotonic)
_SIZE_AT = 64  # in a cache line of its own, behind the note
_DOORBELL_AT = 128  # in a cache line of its own: the parent writes it
_OWN_SIGNAL_AT = 192  # a signal that it is about to send to itself
_COUNT_AT = 224  # how many slots there are
_DUMP_BYTES = 4 << 20  # bytes for one worker's dumps, sparse
_SHORT_DUMP_BYTES = 32 << 10  # the same under a tight `ulimit -f`
_DUMP_PART = 16 << 10  # bytes of a dump that are read at once
_NOTHING = -1


class Note(NamedTuple):
    """The last note of a worker."""

    task: int | None
    position: int | None
    step: str
    since: float  # when this step began; the position may have changed since

    @property
    def phase(self) -> str:
        """The step; "replay" for batches without a number, which were delivered before."""
        return "replay" if self.step in ("fetch", "collate") and self.task is None else self.step

    def in_words(self, now: float) -> str:
        """What it is doing, and for how long."""
        words = self.step
        if self.step != "idle" and self.task is not None:
            words += f" batch {self.task}"
            if self.position is not None:
                words += f" sample {self.position}"
        return f"{words}, {max(0.0, now - self.since):.1f} s"


class NotedSize(NamedTuple):
    """The size of a worker when it last measured itself, in bytes."""

    resident: int
    shared: int
    at: float  # monotonic


class BlackBoxes:
    """The parent's view of all black boxes of a pool; owns the memory file."""

    def __init__(self, workers: int, slots: int = FEWEST_SLOTS) -> None:
        """`slots`: how many random states of each worker are kept."""
        self.workers = workers
        self._slots = slots
        self._region = region = _region_bytes(slots)
        self.fd = kernel.memory_file(NAME, room=workers * region)
        try:
            try:
                os.ftruncate(self.fd, workers * (region + _DUMP_BYTES))
            except OSError:
                os.ftruncate(self.fd, workers * (region + _SHORT_DUMP_BYTES))
            for worker in range(workers):
                os.pwrite(self.fd, _NUMBER.pack(slots), worker * region + _COUNT_AT)
            self._memory = kernel.mapped(self.fd, workers * region)
        except BaseException:
            os.close(self.fd)
            raise
        for worker in range(workers):
            self.clear(worker)

    def clear(self, worker: int) -> None:
        """Before a worker starts: clear the notes of its predecessor, but not its random states."""
        at = worker * self._region
        _NOTE.pack_into(self._memory, at, _NOTHING, _NOTHING, BOOT, monotonic())
        _SIZE.pack_into(self._memory, at + _SIZE_AT, 0, 0, 0.0)
        _NUMBER.pack_into(self._memory, at + _DOORBELL_AT, 0)
        _NUMBER.pack_into(self._memory, at + _OWN_SIGNAL_AT, 0)
        _NUMBER.pack_into(self._memory, at + _STDERR_AT, _NOTHING)

    def ring_doorbell(self, worker: int) -> None:
        """Make the worker read all its orders as soon as it has finished a batch."""
        at = worker * self._region + _DOORBELL_AT
        _NUMBER.pack_into(self._memory, at, _NUMBER.unpack_from(self._memory, at)[0] + 1)

    def note(self, worker: int) -> Note:
        return _read_note(self._memory, worker * self._region)

    def size(self, worker: int) -> NotedSize | None:
        """What the worker measured last; None if it had not measured yet."""
        size = NotedSize(*_SIZE.unpack_from(self._memory, worker * self._region + _SIZE_AT))
        return size if size.resident else None

    def tally(self, workers: Iterable[int], alive: Collection[int], now: float) -> Tally:
        """What these workers have counted so far, with the step that those alive are in."""
        tally = Tally()
        for worker in workers:
            tally.add(self._memory, worker * self._region)
            if worker in alive:
                note = self.note(worker)
                tally.seconds[STEPS.index(note.step)] += max(0.0, now - note.since)
        return tally

    def own_signal(self, worker: int) -> int:
        """The number of the fatal signal that it was about to send to itself; 0 for none."""
        number: int = _NUMBER.unpack_from(self._memory, worker * self._region + _OWN_SIGNAL_AT)[0]
        return number

    def stderr_tail(self, worker: int) -> str | None:
        """The end of what it wrote to standard error; None if that was not read."""
        at = worker * self._region + _STDERR_AT
        length = _NUMBER.unpack_from(self._memory, at)[0]
        if length == _NOTHING:
            return None
        written = self._memory[at + _NUMBER.size : at + _NUMBER.size + length]
        if length == STDERR_TAIL:  # the first line has probably lost its beginning
            written = written.partition(b"\n")[2] or written
        return written.decode(errors="replace")

    def random_state(self, worker: int, number: int) -> bytes | None:
        """The random state saved after `number` answers, if the worker got that far."""
        return _find_state(self._memory, worker * self._region, self._slots, number)

    def put_random_states(self, worker: int, states: Mapping[int, bytes]) -> None:
        """Before the first worker of a seat starts, in the middle of a run: have these random
        states kept, by number, as if a predecessor had saved them."""
        for slot, (number, state) in enumerate(sorted(states.items())):
            at = worker * self._region + _SLOTS_AT + slot * _SLOT_BYTES
            _RANGE.pack_into(self._memory, at, number + 1, number + 1, len(state))
            self._memory[at + _RANGE.size : at + _RANGE.size + len(state)] = state

    def take_dump(self, worker: int) -> str:
        """What `faulthandler` wrote for this worker. It is then cleared."""
        at, end = (_dump_at(self.fd, self.workers, one) for one in (worker, worker + 1))
        text = b""
        # The rest is zeros, and its 4 MiB take milliseconds to read, while a batch is waited for.
        while not text.endswith(b"\0") and at < end:
            part = os.pread(self.fd, min(_DUMP_PART, end - at), at)
            if written := part.rstrip(b"\0"):
                os.pwrite(self.fd, bytes(len(written)), at)
            text += part
            at += len(part)
        return text.rstrip(b"\0").decode(errors="replace")

    def close(self) -> None:
        self._memory.close()
        os.close(self.fd)


class Recorder:
    """The worker's view of its own black box."""

    room = STATE
    watch: SampleWatch | None = None  # measures samples, if there is a logbook

    def __init__(self, fd: int, workers: int, worker: int, dump: int | None = None) -> None:
        """`dump`: a file for its dumps, where the black boxes cannot be opened again."""
        self._count = count = _slots_in(fd)
        region = _region_bytes(count)
        self._memory = kernel.mapped(fd, workers * region)
        self._at = worker * region
        view = memoryview(self._memory)
        # The position, for the loop over samples: cell[0] = 3.
        self.cell = view[self._at + 8 : self._at + 16].cast("q")
        # How often the parent has rung, to be compared with the value read before.
        doorbell = self._at + _DOORBELL_AT
        self.doorbell = view[doorbell : doorbell + 8].cast("q").toreadonly()
        whole: NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8)
        starts = [self._at + _SLOTS_AT + slot * _SLOT_BYTES for slot in range(count)]
        # Cast to integers, because each must be written by a single store.
        self._ranges = [view[start : start + _RANGE.size].cast("q") for start in starts]
        self._slots = [whole[start + _RANGE.size : start + _SLOT_BYTES] for start in starts]
        self._current = 0  # the slot of the last state
        if dump is not None:
            self.dump_fd = dump
            return
        # An open file description of its own, so that its offset is not shared.
        self.dump_fd = kernel.reopen(fd, os.O_RDWR)
        os.lseek(self.dump_fd, _dump_at(fd, workers, worker), os.SEEK_SET)

    def note(self, task: int, position: int, step: int) -> None:
        _NOTE.pack_into(self._memory, self._at, task, position, step, monotonic())

    def measured(self, resident: int, shared: int, at: float) -> None:
        """Note this worker's size."""
        _SIZE.pack_into(self._memory, self._at + _SIZE_AT, resident, shared, at)

    def note_own_signal(self, number: int) -> None:
        """Note that this process is about to send itself a fatal signal."""
        _NUMBER.pack_into(self._memory, self._at + _OWN_SIGNAL_AT, number)

    @property
    def position(self) -> int | None:
        """The position in the last note."""
        position = self.cell[0]
        return None if position == _NOTHING else position

    def take_up(self, number: int) -> bool:
        """Continue after `number` answers. Returns whether a predecessor has saved that random
        state. Later states are invalidated."""
        known = False
        for slot, place in enumerate(self._ranges):
            first, last, _ = place
            if first <= number + 1 <= last:
                self._current = slot
                place[1] = number + 1
                known = True
            elif first <= number <= last and not known:
                self._current = slot  # so that it is not overwritten before there is another
            elif first > number + 1:
                place[1] = 0
        return known

    def kept(self, number: int) -> bytes | None:
        """Random state `number`, if it is one of the last."""
        return _find_state(self._memory, self._at, self._count, number)

    def free_slot(self) -> NDArray[np.uint8]:
        """The memory for the next random state; `commit` makes it valid."""
        free = (self._current + 1) % self._count
        self._ranges[free][1] = 0
        return self._slots[free]

    def commit(self, number: int, size: int) -> None:
        """The first `size` bytes of the free slot are now random state `number`."""
        self._current = (self._current + 1) % self._count
        place = self._ranges[self._current]
        place[2] = size
        place[0] = number + 1
        place[1] = number + 1

    def still(self, number: int) -> None:
        """Random state `number` is the same as the one before it."""
        self._ranges[self._current][1] = number + 1


class CountingRecorder(Recorder):
    """Also counts where the time goes, for a logbook."""

    def __init__(self, fd: int, workers: int, worker: int, dump: int | None = None) -> None:
        super().__init__(fd, workers, worker, dump)
        self.watch = SampleWatch(self._memory, self._at, worker)
        self._seconds = step_seconds(self._memory, self._at)
        self._step, self._since = BOOT, monotonic()

    def note(self, task: int, position: int, step: int) -> None:
        now = monotonic()
        _NOTE.pack_into(self._memory, self._at, task, position, step, now)
        self._seconds[self._step] += now - self._since
        self._step, self._since = step, now


def keep_stderr_tail(fd: int, worker: int, tail: bytes | None) -> None:
    """Store the end of what a worker has written to standard error; None if that is not read."""
    length = _NOTHING if tail is None else len(tail)
    at = worker * _region_bytes(_slots_in(fd)) + _STDERR_AT
    os.pwrite(fd, _NUMBER.pack(length) + (tail or b""), at)


def can_be_opened(fd: int) -> bool:
    """Whether a worker can open the black boxes itself, which needs /proc."""
    try:
        os.close(kernel.reopen(fd, os.O_RDWR))
    except (FileNotFoundError, PermissionError):
        return False
    return True


def keep_dump(fd: int, workers: int, worker: int, dump: int) -> None:
    """Store the dump that a dead worker has left in a file of its own."""
    text = os.pread(dump, _dump_size(fd, workers), 0)
    os.pwrite(fd, text, _dump_at(fd, workers, worker))


def _dump_at(fd: int, workers: int, worker: int) -> int:
    return workers * _region_bytes(_slots_in(fd)) + worker * _dump_size(fd, workers)


def _dump_size(fd: int, workers: int) -> int:
    """The bytes that each worker has for its dumps in this file."""
    return os.fstat(fd).st_size // workers - _region_bytes(_slots_in(fd))


def _region_bytes(slots: int) -> int:
    """The size of a worker's region."""
    return _SLOTS_AT + slots * _SLOT_BYTES


def _slots_in(fd: int) -> int:
    """How many slots for random states a worker has in this file."""
    count: int = _NUMBER.unpack(os.pread(fd, _NUMBER.size, _COUNT_AT))[0]
    return count


class NoRecorder:
    """For the main process, whose notes are not read."""

    watch = None

    def __init__(self) -> None:
        self.cell = [0]

    def note(self, task: int, position: int, step: int) -> None:
        pass


def _find_state(memory: mmap.mmap, region: int, slots: int, number: int) -> bytes | None:
    for slot in range(slots):
        at = region + _SLOTS_AT + slot * _SLOT_BYTES
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
    """The number of a worker in a pool of another program, and its note.

    `path` is the file through one of the worker's descriptors, and `at` the offset of that
    descriptor. Each worker has opened the file itself and moved to its place for dumps, so the
    offset identifies it. None if this is another descriptor.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        region = _region_bytes(_slots_in(fd)) if size else 0
        for dump in (_DUMP_BYTES, _SHORT_DUMP_BYTES):
            workers, rest = divmod(size, region + dump)
            if not rest and at >= workers * region:
                worker = (at - workers * region) // dump
                note = os.pread(fd, _NOTE.size, worker * region)
                return (worker, _read_note(note, 0)) if len(note) == _NOTE.size else None
    finally:
        os.close(fd)
    return None
