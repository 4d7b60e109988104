"""Batches on their way: drawn, handed to a worker, made, delivered.

Which worker makes a batch is decided when its indices are drawn, and they are drawn when torch
would draw them: both show in random states. What the budget decides is when a task is *handed* to
its worker. Until then it waits, in one queue for all, so that the batch the consumer needs next is
always among those in flight. In flight is what is being made, each counted as large as the largest
batch so far, and what has arrived and is not unpacked.

A worker answers *items* one after the other: tasks, and resumptions (the start of another epoch on
persistent workers); trials stand between them and leave no trace in what a worker does later.

Batches that are small and quick are made further ahead than ``prefetch`` (`Hurried`), where it
cannot be seen: map-style data, in order, workers that are not kept for another epoch, and a sampler
whose draws leave no trace. With large batches nothing is gained by it, and memory would be lost.

Tasks left over when the consumer starts a new epoch early are still executed, because torch's
workers execute them too and their random state shows it; their results are dropped.
"""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Literal

from holdfast.engine.seats import Seat, SeatState
from holdfast.engine.vocabulary import (
    END,
    Action,
    BatchReady,
    Deliver,
    Delivery,
    Dispatch,
    Drained,
    Draw,
    Drawn,
    End,
    EpochBegan,
    GaveUp,
    Hurried,
    Item,
    Position,
    ReplicaEnded,
    Resumed,
    Resumption,
    RoomChanged,
    Task,
    TaskState,
)

__all__ = ["NONE", "BeforeSizesAreKnown", "Flow"]

DEEPEST: Final = 16  # batches ahead for each worker, at most, when they are small and quick,
AHEAD: Final = 1 << 20  # and bytes of them
BeforeSizesAreKnown = Literal["one", "one-each", "any"]
NONE: Final[tuple[Action, ...]] = ()
_DRAW_ONE: Final = Draw(1)
_SENT, _DONE, _RUNNING = TaskState.SENT, TaskState.DONE, SeatState.RUNNING


class Flow(abc.ABC):
    """The part of the machine that knows tasks and bytes, and nothing of deaths."""

    def __init__(
        self,
        seats: Sequence[Seat],
        prefetch: int,
        in_order: bool,
        before_sizes_are_known: BeforeSizesAreKnown,
        largest: int | None,
        may_deepen: bool,
    ) -> None:
        workers = len(seats)
        self.seats = seats
        """To be read."""
        self.workers = workers
        self.limit = workers * prefetch
        self.in_order = in_order
        self.epoch = 0
        self.failure: GaveUp | None = None
        self.continued: int | None = None
        """A worker whose stream another process has gone on with, in this epoch."""
        self.room: int | None = None
        """Bytes that may be in flight; None: no limit."""
        self.largest = largest
        self.peak = 0
        """Bytes that were in flight at the most."""
        self._at_first = before_sizes_are_known
        self._making = 0  # tasks handed out and not answered
        self._arrived_bytes = 0  # of answers, until they are unpacked or dropped
        self._unread = 0  # of these: of the batch that the consumer was given last
        self._prefetch = prefetch
        self._may_deepen = may_deepen
        self._depth = prefetch  # tasks ahead for each worker
        self._owed = 0  # draws that are put off, to be made together
        self._together = 1  # so many
        self._tasks: dict[int, Task] = {}  # of this epoch, drawn and not delivered
        self._arrived: deque[Task] = deque()  # only without order
        self._waiting: deque[Task | tuple[Seat, Resumption]] = deque()  # not handed out yet
        self._asked = False  # the consumer waits
        self._next_number = 0
        self._next_out = 0
        self._turn = 0
        self._load = [0] * workers  # tasks of each that are not delivered
        self._active = workers  # seats that take tasks in this epoch
        self._room_each = prefetch  # tasks each of them may have, without order
        self._open = (1 << workers) - 1  # a bit for each seat that can take a task now
        self._drained = False

    @abc.abstractmethod
    def _restart(self, seat: Seat) -> list[Action]:
        """Start a process in a seat that has none, and ask it for what is to be answered there."""

    # -- what may be asked ----------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Bytes: what is being made, and what has arrived and is not unpacked."""
        return self._making * (self.largest or 1) + self._arrived_bytes

    @property
    def held_back(self) -> int:
        """Tasks that wait for memory."""
        return len(self._waiting)

    def awaited(self) -> int | None:
        """The worker that makes the batch the consumer waits for, if it can be told."""
        task = self._tasks.get(self._next_out)
        return None if task is None else task.worker

    # -- epochs ---------------------------------------------------------------------------

    def _go_to(self, position: Position) -> int:
        """Begin in the middle of an epoch; how many tasks are drawn first."""
        self._next_number = self._next_out = position.number
        self._turn = position.turn
        draws = self.limit
        for seat, one in zip(self.seats, position.seats, strict=True):
            seat.answered, seat.passed, seat.replica = one.answered, one.passed, one.replica
            if one.ended:
                seat.exhausted = True
                self._end_seat(seat)
                draws -= self._prefetch - 1  # as if it had ended on the way: see `_close_replica`
        return draws

    def _begin_epoch(self, event: EpochBegan) -> Sequence[Action]:
        """Another epoch on persistent workers. What is still out is executed and dropped."""
        self.epoch += 1
        self.continued = None
        self._asked = False
        self._unpack()
        for task in self._tasks.values():
            if task.state is _DONE:
                self._arrived_bytes -= task.nbytes
        self._tasks.clear()
        self._arrived.clear()
        self._next_number = self._next_out = self._turn = 0
        self._load = [0] * self.workers
        self._active, self._room_each = self.workers, self._prefetch
        self._open = (1 << self.workers) - 1
        self._drained = False
        for seat in self.seats:
            seat.ended = False
            self._waiting.append((seat, Resumption(self.epoch, event.seed)))
        return [Draw(self.limit)]

    # -- from the sampler to a worker -----------------------------------------------------

    def _draw(self, event: Drawn) -> Sequence[Action]:
        """Which worker makes this batch?"""
        worker = self._whose_turn()
        if worker is None:
            return NONE
        number = self._next_number
        self._next_number = number + 1
        task = self._tasks[number] = Task(number, event.index, self.epoch, worker, event.keys)
        load = self._load[worker] + 1
        self._load[worker] = load
        if not self.in_order and load >= self._room_each:
            self._open &= ~(1 << worker)
        if self._waiting or not self._fits(task):
            self._waiting.append(task)
            return NONE
        return self._hand(self.seats[worker], task)

    def _hurry(self, event: Hurried) -> Sequence[Action]:
        """Make more ahead, if batches are small: then neither side has to wake the other for each.

        Draws are put off until a quarter of what is ahead is owed, so that a worker gets several
        tasks at once. What is ahead never falls below three quarters, so nothing waits for them.
        """
        if not self._may_deepen or self.largest is None:
            return NONE
        more = self._deepen(self.largest)
        return (Draw(more),) if more > 0 else NONE

    def _deepen(self, largest: int) -> int:
        """Go as deep as batches of this size allow; how many more, or fewer, tasks that is."""
        depth = max(self._prefetch, min(DEEPEST, AHEAD // largest))
        more = (depth - self._depth) * self.workers
        self._depth = depth
        self.limit += more
        self._together = self.limit // 4 if depth > self._prefetch else 1
        return more

    def _drain(self, event: Drained) -> Sequence[Action]:
        self._drained = True
        return NONE

    def _whose_turn(self) -> int | None:
        """torch's rule: the next worker in turn that can take a task."""
        able = self._open
        if not able:
            return None
        turn = self._turn
        later = able >> turn
        if later & 1:
            worker = turn
        elif later:
            worker = turn + (later & -later).bit_length() - 1
        else:
            worker = (able & -able).bit_length() - 1
        self._turn = worker + 1 if worker + 1 < self.workers else 0
        return worker

    def _end_seat(self, seat: Seat) -> None:
        """It takes no more tasks in this epoch."""
        if seat.ended:
            return
        seat.ended = True
        self._active -= 1
        self._open &= ~(1 << seat.id)
        each = self.limit // self._active if self._active else 0
        if each == self._room_each or self.in_order:
            return
        self._room_each = each  # not often: it takes as many values as twice the root of the limit
        for one in self.seats:
            if not one.ended and self._load[one.id] < each:
                self._open |= 1 << one.id

    def _fits(self, task: Task) -> bool:
        """Whether there is room for another batch."""
        largest = self.largest
        if largest is None:
            # How large they are is not known yet: nothing but one to see, or one for each worker
            # where no limit was set that they might exceed.
            largest = 1
            if self._at_first == "one" and self.in_flight:
                return False
            if self._at_first == "one-each" and self.seats[task.worker].items:
                return False
        room = self.room
        if room is None:
            return True
        in_flight = self._making * largest + self._arrived_bytes
        return not in_flight or in_flight + largest <= room

    def _hand(self, seat: Seat, item: Task | Resumption) -> Sequence[Action]:
        seat.items.append(item)
        if isinstance(item, Task):
            item.state = _SENT
            self._making += 1
            self._note_peak()
        if seat.state is _RUNNING or seat.alive:
            return (Dispatch(seat.id, item),)
        if isinstance(item, Resumption) or seat.state is SeatState.PAUSED:
            return NONE  # no process is started for that alone, or before its time
        return self._restart(seat) if self.failure is None else NONE

    def _hand_out(self) -> list[Action]:
        actions: list[Action] = []
        waiting = self._waiting
        while waiting:
            first = waiting[0]
            if isinstance(first, Task):
                if not self._fits(first):
                    break
                actions += self._hand(self.seats[first.worker], first)
            else:
                actions += self._hand(*first)
            waiting.popleft()
        return actions

    def _change_room(self, event: RoomChanged) -> Sequence[Action]:
        self.room = event.room
        return NONE

    def _note_peak(self) -> None:
        in_flight = self._making * (self.largest or 1) + self._arrived_bytes
        if in_flight > self.peak:
            self.peak = in_flight

    # -- from a worker to the consumer ----------------------------------------------------

    def _batch_ready(self, event: BatchReady) -> None:
        seat = self.seats[event.worker]
        if event.generation != seat.generation:
            return  # from a worker we have gone on without
        task = self._answered(seat)
        _agree(task, event.task)
        assert isinstance(task, Task)
        self._making -= 1
        nbytes = event.nbytes
        if nbytes is None:
            nbytes = 1  # what is out counts: "nothing in flight" is to be true
        else:
            nbytes = max(1, nbytes)
            if self.largest is None or nbytes > self.largest:
                self.largest = nbytes
                if self._depth > self._prefetch:
                    self._owed += self._deepen(nbytes)  # what is too much is not drawn again
        self._finish(task, event.result, nbytes)
        self._note_peak()

    def _finish(self, task: Task, result: Any, nbytes: int) -> None:
        task.state = _DONE
        if task.epoch != self.epoch:
            return  # left over from an epoch the consumer broke off
        task.result = result
        task.nbytes = nbytes
        self._arrived_bytes += nbytes
        if not self.in_order:
            self._arrived.append(task)

    def _answered(self, seat: Seat) -> Item:
        item = seat.items.popleft()
        seat.answered += 1
        seat.failed_catching_up = 0
        if seat.stalls or seat.strikes:
            seat.absolve()
        if isinstance(item, Task):
            seat.replica += 1
        else:
            assert isinstance(item, Resumption), item
            seat.epoch = item.epoch
            seat.passed += seat.replica > 0
            seat.replica = 0
            seat.exhausted = False
        return item

    def _resumed(self, event: Resumed) -> Sequence[Action]:
        self._answered(self.seats[event.worker])
        return NONE

    def _replica_ended(self, event: ReplicaEnded) -> Sequence[Action]:
        seat = self.seats[event.worker]
        task = self._answered(seat)
        _agree(task, event.task)
        self._making -= 1
        return self._close_replica(seat)

    def _close_replica(self, seat: Seat) -> Sequence[Action]:
        """The worker answers nothing more of what it was given for this epoch."""
        seat.exhausted = True
        while seat.items and isinstance(seat.items[0], Task):
            seat.items.popleft()
            self._making -= 1
        if self._waiting:
            self._waiting = deque(one for one in self._waiting if not _is_of(one, seat))
        if seat.epoch != self.epoch:
            return NONE
        self._end_seat(seat)
        return (_DRAW_ONE,)

    def _give(self, actions: Sequence[Action]) -> Sequence[Action]:
        """These, and what the consumer has asked for if it is there."""
        what = self._take()
        if what is None:
            return actions
        self._asked = False
        given: tuple[Action, ...] = (Deliver(what),)
        if type(what) is Delivery:
            self._owed += 1
            if self._owed >= self._together:
                draw = _DRAW_ONE if self._owed == 1 else Draw(self._owed)
                given = (given[0], draw)
                self._owed = 0
        return [*actions, *given] if actions else given

    def _take(self) -> Delivery | End | GaveUp | None:
        """What the consumer gets now; None if it has to wait."""
        if self._arrived:
            return self._deliver(self._arrived.popleft())
        while self._next_out < self._next_number:
            task = self._tasks.get(self._next_out)
            if task is not None:
                if task.state is _DONE:
                    self._next_out += 1
                    return self._deliver(task)
                if not self.seats[task.worker].ended:
                    return self.failure
                del self._tasks[task.number]  # its replica ended before it
            self._next_out += 1
        return END

    def _deliver(self, task: Task) -> Delivery:
        self._tasks.pop(task.number, None)
        worker = task.worker
        self._load[worker] -= 1
        if not self.in_order and self._load[worker] < self._room_each:
            self._open |= (not self.seats[worker].ended) << worker
        if self._unread:
            self._unpack()
        self._unread = task.nbytes
        return Delivery(task, task.result)

    def _unpack(self) -> None:
        self._arrived_bytes -= self._unread
        self._unread = 0


def _agree(item: Item, number: int) -> None:
    """Also without assertions: batches that are mixed up must never be delivered."""
    if not isinstance(item, Task) or item.number != number:
        raise RuntimeError(f"a worker answered task {number}, and {item} was to be answered first")


def _is_of(item: Task | tuple[Seat, Resumption], seat: Seat) -> bool:
    """Whether it is a task of the epoch this seat's replica is in."""
    return isinstance(item, Task) and item.worker == seat.id and item.epoch == seat.epoch
