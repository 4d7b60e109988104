"""Tasks: from the sampler to a worker, and from the worker to the consumer.

A task is a batch to be made. It is in one of these states (`TaskState`):

| state | meaning                               | event or reason: next state                      |
| ----- | ------------------------------------- | ------------------------------------------------ |
| HELD  | drawn, with a worker assigned; waits  | there is room for its batch: `Dispatch`, SENT    |
|       | in `held_back` for room in the budget | (at once, if so when it is drawn)                |
|       |                                       | its replica ended: dropped                       |
| SENT  | among the `items` of its seat; the    | `BatchReady`: DONE                               |
|       | worker owes an answer                 | `WorkerExited`: `Dispatch` to the successor,     |
|       |                                       | SENT                                             |
|       |                                       | its sample is blamed for deaths and cannot be    |
|       |                                       | left out: DONE, the result is `Poisoned`         |
|       |                                       | its replica ended: dropped                       |
| DONE  | answered                              | the consumer asked, and it is next: `Deliver`    |
|       |                                       | its epoch is over: dropped                       |

`EpochBegan` drops the results of tasks of the epoch before, not the tasks: those that are HELD or
SENT are still made, because torch's workers make them too and it shows in their random state.

Which worker makes a batch is decided when its indices are drawn, and they are drawn when torch
would draw them, because both show in random states. The budget only decides when a task is sent.
Tasks that wait for that are in one queue for all workers, so the batch that the consumer needs next
is always in flight. In flight are the batches being made, each counted with the size of the largest
batch so far, and the batches that have arrived and are not unpacked yet.

A worker answers *items* one after the other: tasks, resumptions (the start of another epoch on
persistent workers), and notices (what all workers are told). Isolation tests come between them and
do not affect later items.

A notice comes after all tasks that were drawn before it was announced, and before all others, in
every seat. A seat keeps the notices that were heard in it: its next process is told them again, in
their order and at their places, before it gets the items that were not answered. So every process
hears each of them once.

Small batches that follow each other quickly (`Hurried`) are made further ahead than ``prefetch``,
where that makes no visible difference: map-style data, in order, with workers that are not kept for
another epoch, and a sampler whose draws have no side effect. With large batches it would save no
time and cost memory.
"""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Literal

from holdfast.engine.events import (
    END,
    Action,
    Announced,
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
    Limits,
    Notice,
    PastNotice,
    Position,
    ReplicaEnded,
    Resumed,
    Resumption,
    RoomChanged,
    SeatPosition,
    Task,
    TaskState,
    Told,
)
from holdfast.engine.seats import Seat, SeatState

BeforeSizesAreKnown = Literal["one", "one-each", "any"]
NO_ACTIONS: Final[tuple[Action, ...]] = ()
_DRAW_ONE: Final = Draw(1)
_SENT, _DONE, _RUNNING = TaskState.SENT, TaskState.DONE, SeatState.RUNNING


class Flow(abc.ABC):
    """The part of the machine that handles tasks and bytes. It does not handle deaths."""

    def __init__(
        self,
        seats: Sequence[Seat],
        prefetch: int,
        in_order: bool,
        before_sizes_are_known: BeforeSizesAreKnown,
        largest: int | None,
        may_deepen: bool,
        limits: Limits,
    ) -> None:
        workers = len(seats)
        self.seats = seats
        """Read-only for callers."""
        self.workers = workers
        self.limit = workers * prefetch
        self.in_order = in_order
        self.epoch = 0
        self.failure: GaveUp | None = None
        self.continued: int | None = None
        """A worker whose stream was continued by another process in this epoch."""
        self.room: int | None = None
        """Bytes that may be in flight; None: no limit."""
        self.largest = largest
        self.in_flight = 0
        """Bytes of batches that are being made, or have arrived and are not unpacked."""
        self.peak = 0
        """The largest value of `in_flight` so far."""
        self.held_back: deque[Task | tuple[Seat, Resumption | Notice]] = deque()
        """Tasks that wait for room in the budget, and what is queued behind them."""
        self._at_first = before_sizes_are_known
        self._making = 0  # tasks sent and not answered
        self._arrived_bytes = 0  # of results, until they are unpacked or dropped
        self._unread = 0  # the part of these in the batch that was delivered last
        self._prefetch = prefetch
        self._may_deepen = may_deepen
        self.limits = limits
        self._depth = prefetch  # tasks ahead for each worker
        self._owed = 0  # draws that are postponed, to be made together
        self._together = 1  # how many draws are made together
        self._tasks: dict[int, Task] = {}  # of this epoch, drawn and not delivered
        self._arrived: deque[Task] = deque()  # only with in_order=False
        self._asked = False  # the consumer waits for a batch
        self.next_number = 0
        """Of the task that is drawn next."""
        self._next_out = 0
        self._turn = 0
        self._load = [0] * workers  # tasks of each that are not delivered
        self._active = workers  # seats that take tasks in this epoch
        self._room_each = prefetch  # tasks each of them may have, with in_order=False
        self._open = (1 << workers) - 1  # a bit for each seat that can take a task now
        self._drained = False

    @abc.abstractmethod
    def _restart(self, seat: Seat) -> list[Action]:
        """Start a process in a seat that has none, and send it the items of the seat."""

    # -- queries --------------------------------------------------------------------------

    def awaited(self) -> int | None:
        """The worker that makes the batch the consumer waits for, if that is known."""
        task = self._tasks.get(self._next_out)
        return None if task is None else task.worker

    def answers_ahead(self, iterable: bool) -> int:
        """How many answers of one worker may wait for the consumer."""
        if not iterable:
            return max(self._prefetch, self.limits.depth if self._may_deepen else 0)
        return self._prefetch + self.workers if self.in_order else self.limit

    def undelivered(self, worker: int) -> int:
        """How many tasks of a worker were drawn and not delivered."""
        return self._load[worker]

    def delivered_position(self, seat: Seat, not_had: Sequence[Task]) -> tuple[SeatPosition, int]:
        """Where the worker of a seat was after its last batch that the consumer has had, and how
        many answers ago that was. `not_had` is delivered, and the consumer has not had it."""
        waiting = [
            task.answer
            for task in self._tasks.values()
            if task.state is _DONE and task.worker == seat.id and task.epoch == self.epoch
        ]
        waiting += [task.answer for task in not_had if task.worker == seat.id]
        answered, batches, exhausted = seat.answered, seat.batches_done, seat.exhausted
        if waiting:  # the end of a replica comes after those batches
            answered = min(waiting) - 1
            batches = max(0, batches - len(waiting) - exhausted)
            exhausted = False
        back = seat.answered - answered
        return SeatPosition(answered, seat.epochs_done, batches, exhausted), back

    def missing(self, not_had: Sequence[Task]) -> list[int]:
        """The numbers of the tasks that were drawn and that the consumer has not had."""
        return sorted([*self._tasks, *(task.number for task in not_had)])

    # -- epochs ---------------------------------------------------------------------------

    def _go_to(self, position: Position) -> int:
        """Begin in the middle of an epoch. Returns how many tasks to draw first."""
        self.next_number = self._next_out = position.number
        self._turn = position.turn
        draws = self.limit
        for seat, one in zip(self.seats, position.seats, strict=True):
            seat.answered = one.answered
            seat.epochs_done, seat.batches_done = one.epochs_done, one.batches_done
            if one.exhausted:
                seat.exhausted = True
                self._end_seat(seat)
                draws -= self._prefetch - 1  # as if it had ended in this run: see `_close_replica`
        return draws

    def _begin_epoch(self, event: EpochBegan) -> Sequence[Action]:
        """Another epoch on persistent workers. Tasks of the last one are still made, then
        dropped."""
        self.epoch += 1
        self.continued = None
        self._asked = False
        for task in self._tasks.values():
            if task.state is _DONE:
                self._arrived_bytes -= task.nbytes
        self._unpack()
        self._tasks.clear()
        self._arrived.clear()
        self.next_number = self._next_out = self._turn = 0
        self._load = [0] * self.workers
        self._active, self._room_each = self.workers, self._prefetch
        self._open = (1 << self.workers) - 1
        self._drained = False
        for seat in self.seats:
            seat.ended = False
            self.held_back.append((seat, Resumption(self.epoch, event.seeds)))
        return [Draw(self.limit)]

    def _announce(self, event: Announced) -> Sequence[Action]:
        notice = Notice(event.change)
        self.held_back.extend((seat, notice) for seat in self.seats)
        return NO_ACTIONS

    # -- from the sampler to a worker -----------------------------------------------------

    def _draw(self, event: Drawn) -> Sequence[Action]:
        """Assign a worker to this batch, and send it if there is room."""
        worker = self._whose_turn()
        if worker is None:
            return NO_ACTIONS
        number = self.next_number
        self.next_number = number + 1
        task = self._tasks[number] = Task(number, event.index, self.epoch, worker, event.keys)
        load = self._load[worker] + 1
        self._load[worker] = load
        if not self.in_order and load >= self._room_each:
            self._open &= ~(1 << worker)
        if self.held_back or not self._fits(task):
            self.held_back.append(task)
            return NO_ACTIONS
        return self._send(self.seats[worker], task)

    def _hurry(self, event: Hurried) -> Sequence[Action]:
        """Make more batches ahead, if they are small, so that one wake-up serves several.

        Draws are postponed until a quarter of the batches ahead are due, so that a worker gets
        several tasks at once. Three quarters of them are always ahead, so no side waits for a draw.
        """
        if not self._may_deepen or self.largest is None:
            return NO_ACTIONS
        more = self._deepen(self.largest)
        return (Draw(more),) if more > 0 else NO_ACTIONS

    def _deepen(self, largest: int) -> int:
        """Choose the depth for batches of this size. Returns how many tasks more (or fewer) that
        is."""
        depth = max(self._prefetch, min(self.limits.depth, self.limits.ahead_bytes // largest))
        more = (depth - self._depth) * self.workers
        self._depth = depth
        self.limit += more
        self._together = self.limit // 4 if depth > self._prefetch else 1
        return more

    def _drain(self, event: Drained) -> Sequence[Action]:
        self._drained = True
        return NO_ACTIONS

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
        """The seat takes no more tasks in this epoch."""
        if seat.ended:
            return
        seat.ended = True
        self._active -= 1
        self._open &= ~(1 << seat.id)
        each = self.limit // self._active if self._active else 0
        if each == self._room_each or self.in_order:
            return
        # Seldom: over an epoch there are at most twice the square root of `limit` values.
        self._room_each = each
        for one in self.seats:
            if not one.ended and self._load[one.id] < each:
                self._open |= 1 << one.id

    def _fits(self, task: Task) -> bool:
        """Whether there is room for the batch of this task."""
        largest = self.largest
        if largest is None:
            # The size of a batch is not known yet. Make only one, to find out, or one for each
            # worker where there is no limit that these could exceed.
            largest = 1
            if self._at_first == "one" and self.in_flight:
                return False
            if self._at_first == "one-each" and self.seats[task.worker].items:
                return False
        room = self.room
        if room is None:
            return True
        return not self.in_flight or self.in_flight + largest <= room

    def _send(self, seat: Seat, item: Task | Resumption | Notice) -> Sequence[Action]:
        seat.items.append(item)
        if isinstance(item, Task):
            item.state = _SENT
            self._making += 1
            self._recount()
        if seat.state is _RUNNING or seat.alive:
            return (Dispatch(seat.id, item),)
        if not isinstance(item, Task) or seat.state is SeatState.PAUSED:
            return NO_ACTIONS  # no process is started for another item alone, or during a pause
        return self._restart(seat) if self.failure is None else NO_ACTIONS

    def _send_held_back(self) -> list[Action]:
        actions: list[Action] = []
        waiting = self.held_back
        while waiting:
            first = waiting[0]
            if isinstance(first, Task):
                if not self._fits(first):
                    break
                actions += self._send(self.seats[first.worker], first)
            else:
                actions += self._send(*first)
            waiting.popleft()
        return actions

    def _change_room(self, event: RoomChanged) -> Sequence[Action]:
        self.room = event.room
        return NO_ACTIONS

    def _recount(self) -> None:
        """Update `in_flight`. To be called after each change of the values it is made of."""
        self.in_flight = in_flight = self._making * (self.largest or 1) + self._arrived_bytes
        if in_flight > self.peak:
            self.peak = in_flight

    # -- from a worker to the consumer ----------------------------------------------------

    def _batch_ready(self, event: BatchReady) -> None:
        seat = self.seats[event.worker]
        if event.generation != seat.generation:
            return  # from a process that was replaced
        task = self._answered_task(seat, event.task)
        nbytes = event.nbytes
        if nbytes is None:
            nbytes = 1  # not 0, so that `in_flight` is 0 only if nothing is in flight
        else:
            nbytes = max(1, nbytes)
            if self.largest is None or nbytes > self.largest:
                self.largest = nbytes
                if self._depth > self._prefetch:
                    self._owed += self._deepen(nbytes)  # negative: that many are not drawn again
        self._finish(task, event.result, nbytes)
        self._recount()

    def _finish(self, task: Task, result: Any, nbytes: int) -> None:
        task.state = _DONE
        if task.epoch != self.epoch:
            return  # left over from an epoch that the consumer left early
        task.result = result
        task.answer = self.seats[task.worker].answered
        task.nbytes = nbytes
        self._arrived_bytes += nbytes
        if not self.in_order:
            self._arrived.append(task)

    def _answered_task(self, seat: Seat, number: int) -> Task:
        task = self._answered(seat)
        if not isinstance(task, Task) or task.number != number:
            # Not an assertion: a batch in the wrong place must never be delivered, even with -O.
            raise RuntimeError(f"a worker answered task {number}; expected an answer to {task}")
        self._making -= 1
        return task

    def _answered(self, seat: Seat) -> Item:
        item = seat.items.popleft()
        seat.answered += 1
        seat.failed_catching_up = 0
        if seat.stalls or seat.suspect_exits:
            seat.clear_suspicion()
        if isinstance(item, Task):
            seat.batches_done += 1
            seat.settled = len(seat.told)
        elif isinstance(item, Notice):
            seat.told.append(PastNotice(item.change, seat.epochs_done, seat.batches_done))
        else:
            assert isinstance(item, Resumption), item
            seat.epoch = item.epoch
            seat.epochs_done += seat.batches_done > 0
            seat.settled_earlier = seat.settled
            seat.batches_done = 0
            seat.exhausted = False
        return item

    def _told(self, event: Told) -> Sequence[Action]:
        item = self._answered(self.seats[event.worker])
        if not isinstance(item, Notice):
            raise RuntimeError(f"a worker answered a notice; expected an answer to {item}")
        return NO_ACTIONS

    def _resumed(self, event: Resumed) -> Sequence[Action]:
        self._answered(self.seats[event.worker])
        return NO_ACTIONS

    def _replica_ended(self, event: ReplicaEnded) -> Sequence[Action]:
        seat = self.seats[event.worker]
        self._answered_task(seat, event.task)
        return self._close_replica(seat)

    def _close_replica(self, seat: Seat) -> Sequence[Action]:
        """Drop the tasks of a replica that has ended: its worker will not answer them."""
        seat.exhausted = True
        notices: list[Item] = []  # which it does answer
        while seat.items and isinstance(seat.items[0], (Task, Notice)):
            item = seat.items.popleft()
            if isinstance(item, Notice):
                notices.append(item)
            else:
                self._making -= 1
        seat.items.extendleft(reversed(notices))
        self._recount()
        if self.held_back:
            self.held_back = deque(one for one in self.held_back if not _is_of(one, seat))
        if seat.epoch != self.epoch:
            return NO_ACTIONS
        self._end_seat(seat)
        return (_DRAW_ONE,)

    def _with_delivery(self, actions: Sequence[Action]) -> Sequence[Action]:
        """Add the delivery that the consumer has asked for, if there is one."""
        what = self._next_delivery()
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

    def _next_delivery(self) -> Delivery | End | GaveUp | None:
        """What the consumer gets now; None if it has to wait."""
        if self._arrived:
            return self._deliver(self._arrived.popleft())
        while self._next_out < self.next_number:
            task = self._tasks.get(self._next_out)
            if task is not None:
                if task.state is _DONE:
                    self._next_out += 1
                    return self._deliver(task)
                if not self.seats[task.worker].ended:
                    return self.failure
                del self._tasks[task.number]  # dropped: its replica ended
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
        self._recount()


def _is_of(item: Task | tuple[Seat, Resumption | Notice], seat: Seat) -> bool:
    """Whether this is a task of this seat, in the epoch that its replica is in."""
    return isinstance(item, Task) and item.worker == seat.id and item.epoch == seat.epoch
