"""What happens next: every decision of the engine, and nothing else.

The machine has no process, no clock and no file. It has one door: `handle` is told what happened
to the consumer or to a worker (events, in the past tense), and answers with what is to be done
(actions, in the imperative). A driver turns actions into system calls and system calls into events;
times, sizes and limits come in with the events. So every history, however unlikely, can be played
in a test within microseconds, and a history that was recorded gives the same actions when it is
played again.

The driver carries out all actions of a decision, in their order, before it tells of anything that
they have caused. So no action is out of date when it is carried out.

What the machine promises (each has a property in ``tests/engine/test_machine.py``):

- every task is delivered exactly once, in order (or, with ``in_order=False``, as it arrives);
- a worker is given tasks in the order torch would give them, whatever dies in between, because the
  random state of a worker depends on which tasks it does;
- no more tasks are out than ``prefetch * workers`` (or `limit`, see below), and no more bytes than
  the budget allows, but for one batch that is larger than it, alone;
- after a death the replacement is asked for exactly the items the dead worker had not answered, in
  their order; an answer that was received is never asked for again;
- as long as workers may be replaced, there is always a way forward; when they may not be, the
  failure is delivered where the first missing batch would have been.

`seats` has the states of workers, `restarts` what a death says of a sample and of the next start.

A worker answers *items* one after the other: tasks, and resumptions (the start of another epoch on
persistent workers); trials stand between them and leave no trace in what a worker does later.

Which worker makes a batch is decided when its indices are drawn, and they are drawn when torch
would draw them: both show in random states. What the budget decides is when a task is *handed* to
its worker. Until then it waits, in one queue for all, so that the batch the consumer needs next is
always among those in flight. In flight is what is being made, each counted as large as the largest
batch so far, and what has arrived and is not unpacked.

A worker that has grown too large says so after an answer and goes (`WorkerRetired`). That is no
death: nothing is counted, and its successor takes up from the same random state.

The stream of an iterable dataset may not come again as it was: `continuation` says how a successor
gets to where its predecessor was, and sees whether it has. One that has not says so and goes
(`WentAstray`), which is no death either; the next one is told not to try that way, and so are those
of all other seats. Where no way keeps the number of batches the run ends (`StreamLost`), and so it
does at the first death if the user wants that (``recovery="raise"``). A worker of such a dataset
that has grown too large asks (`WorkerGrown`) and goes on meanwhile: first a process of its own
tries to take up its stream (`Rehearse`), and only if that was exact, and made a smaller process, it
is told to go (`Retire`). If it was not, no worker of this pool is replaced for its size any more.

Tasks left over when the consumer starts a new epoch early are still executed,
because torch's workers execute them too and their random state shows it; their results are dropped.

Batches that are small and quick are made further ahead than ``prefetch`` (`Hurried`), where it
cannot be seen: map-style data, in order, workers that are not kept for another epoch, and a sampler
whose draws leave no trace. With large batches nothing is gained by it, and memory would be lost.

What an event costs does not depend on the number of workers, but for the first of an epoch, and for
replicas that end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

from holdfast.engine import restarts as r
from holdfast.engine.continuation import Recovery
from holdfast.engine.seats import Parting, Seat, SeatState
from holdfast.engine.vocabulary import (
    END,
    Abandon,
    Action,
    Ask,
    Asked,
    BatchReady,
    Began,
    Convict,
    Deliver,
    Delivery,
    Dispatch,
    Drained,
    Draw,
    Drawn,
    Dump,
    End,
    EpochBegan,
    Event,
    Exit,
    Forget,
    GaveUp,
    Hurried,
    Item,
    Kill,
    Limits,
    Outcome,
    Poisoned,
    Position,
    Rehearse,
    Rehearsed,
    Renew,
    ReplicaEnded,
    Report,
    Restart,
    RestartPolicy,
    Resumed,
    Resumption,
    Retire,
    RoomChanged,
    Start,
    Stay,
    Stopped,
    StreamLost,
    Survived,
    Task,
    TaskState,
    Ticked,
    Unpacked,
    WentAstray,
    WorkerExited,
    WorkerGrown,
    WorkerReady,
    WorkerRefused,
    WorkerRetired,
    WorkerStalled,
)

__all__ = ["RAISES", "BeforeSizesAreKnown", "Machine"]

DEEPEST: Final = 16  # batches ahead for each worker, at most, when they are small and quick,
AHEAD: Final = 1 << 20  # and bytes of them
RAISES: Final = 'iterable_recovery="raise": no stream is continued by another process'
BeforeSizesAreKnown = Literal["one", "one-each", "any"]
_NONE: Final[tuple[Action, ...]] = ()
_DRAW_ONE: Final = Draw(1)
_LIMITS: Final = Limits()
_SENT, _DONE, _RUNNING = TaskState.SENT, TaskState.DONE, SeatState.RUNNING


class Machine:
    """Events in, actions out. See the module's text for what it promises."""

    def __init__(
        self,
        *,
        workers: int,
        prefetch: int,
        in_order: bool = True,
        iterable: bool = False,
        persistent: bool = False,
        restarts: RestartPolicy,
        leaves_out: bool = False,
        recovery: Recovery = "auto",
        before_sizes_are_known: BeforeSizesAreKnown = "any",
        largest: int | None = None,
        limits: Limits = _LIMITS,
        may_deepen: bool = False,
    ) -> None:
        """`leaves_out` if there is a policy for bad samples, so that a batch can do without one;
        `largest` the size of the largest batch, if that is known from before. Else, until the first
        has arrived, as many are made at a time as `before_sizes_are_known` says. With `may_deepen`,
        for map-style data in order, more than `prefetch` are made ahead if they are small and
        quick."""
        self.workers = workers
        self.limit = workers * prefetch
        self.in_order = in_order
        self.iterable = iterable
        self.persistent = persistent
        self.recovery = recovery  # of streams
        self.recycles = not iterable or recovery != "raise"
        """Whether workers are replaced for their size."""
        self.continued: int | None = None
        """A worker whose stream another process has gone on with, in this epoch."""
        self.epoch = 0
        self.failure: GaveUp | None = None
        self.seats: Sequence[Seat] = tuple(Seat(worker) for worker in range(workers))
        """To be read."""
        self.restarts = r.Restarts(
            self.seats,
            restarts,
            limits,
            iterable=iterable,
            leaves_out=leaves_out and not iterable,  # there is no way past one but through it
        )
        self.limits = limits
        self.room: int | None = None
        self.largest = largest
        self.peak = 0
        """Bytes that were in flight at the most."""
        self._at_first = before_sizes_are_known
        self._making = 0  # tasks handed out and not answered
        self._arrived_bytes = 0  # of answers, until they are unpacked or dropped
        self._unread = 0  # of these: of the batch that the consumer was given last
        self._prefetch = prefetch
        self._may_deepen = may_deepen and in_order and not iterable and not persistent
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
        self._timed: dict[int, Seat] = {}  # seats with a deadline
        self._drained = False
        self._stopped = False
        self._unfit: frozenset[str] = frozenset()  # ways to take up a stream
        self._handlers: dict[type, Callable[[Any], Sequence[Action]]] = {
            Began: self._begin,
            EpochBegan: self._begin_epoch,
            Drained: self._drain,
            Hurried: self._hurry,
            RoomChanged: self._change_room,
            Stopped: self._stop,
            Ticked: self._tick,
            WorkerReady: self._worker_ready,
            ReplicaEnded: self._replica_ended,
            Resumed: self._resumed,
            Survived: self._survived,
            WorkerExited: self._exited,
            WorkerRefused: self._refused,
            WorkerRetired: self._retired,
            WentAstray: self._astray,
            StreamLost: self._stream_lost,
            WorkerGrown: self._grown,
            Rehearsed: self._rehearsed,
            WorkerStalled: self._stalled,
        }

    # -- the door -------------------------------------------------------------------------

    def handle(self, event: Event) -> Sequence[Action]:
        """What is to be done about this, in this order."""
        if self._stopped:
            return _NONE
        kind = type(event)
        actions: Sequence[Action] = _NONE
        # First those of every batch.
        if kind is BatchReady:
            self._batch_ready(event)  # type: ignore[arg-type]
        elif kind is Asked:
            self._asked = True
            if self._unread:
                self._unpack()
        elif kind is Drawn:
            actions = self._draw(event)  # type: ignore[arg-type]
        elif kind is Unpacked:
            self._unpack()
        else:
            worker = getattr(event, "worker", None)
            if worker is not None and event.generation != self.seats[worker].generation:  # type: ignore[union-attr]
                return _NONE  # from a worker we have gone on without
            actions = self._handlers[kind](event)
        if self._waiting:
            actions = [*actions, *self._hand_out()]
        if self._asked:
            what = self._take()
            if what is not None:
                self._asked = False
                given: tuple[Action, ...] = (Deliver(what),)
                if type(what) is Delivery:
                    self._owed += 1
                    if self._owed >= self._together:
                        draw = _DRAW_ONE if self._owed == 1 else Draw(self._owed)
                        given = (given[0], draw)
                        self._owed = 0
                return [*actions, *given] if actions else given
        return actions

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

    def generation(self, worker: int) -> int:
        return self.seats[worker].generation

    def deadline(self) -> float | None:
        """When the machine wants to hear `Ticked` at the latest."""
        if not self._timed:
            return None
        failed = self.failure is not None
        times = [
            seat.deadline
            for seat in self._timed.values()
            if seat.deadline is not None and not (failed and seat.state is SeatState.PAUSED)
        ]
        return min(times, default=None)

    # -- epochs ---------------------------------------------------------------------------

    def _begin(self, event: Began) -> Sequence[Action]:
        """The first epoch: start all workers."""
        draws = self.limit
        if event.position is not None:
            draws = self._go_to(event.position)
        starts: list[Action] = []
        for seat in self.seats:
            if self._needed(seat):
                place = seat.answered, seat.passed, seat.replica, seat.exhausted
                starts.append(Start(seat.id, 0, *place))
            else:
                self._become(seat, SeatState.EMPTY)
        return [*starts, Draw(draws)]

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

    def _stop(self, event: Stopped) -> Sequence[Action]:
        self._stopped = True
        self._making = self._arrived_bytes = self._unread = 0
        self._waiting.clear()
        self._asked = False
        return _NONE

    # -- from the sampler to a worker -----------------------------------------------------

    def _draw(self, event: Drawn) -> Sequence[Action]:
        """Which worker makes this batch?"""
        worker = self._whose_turn()
        if worker is None:
            return _NONE
        number = self._next_number
        self._next_number = number + 1
        task = self._tasks[number] = Task(number, event.index, self.epoch, worker, event.keys)
        load = self._load[worker] + 1
        self._load[worker] = load
        if not self.in_order and load >= self._room_each:
            self._open &= ~(1 << worker)
        if self._waiting or not self._fits(task):
            self._waiting.append(task)
            return _NONE
        return self._hand(self.seats[worker], task)

    def _hurry(self, event: Hurried) -> Sequence[Action]:
        """Make more ahead, if batches are small: then neither side has to wake the other for each.

        Draws are put off until a quarter of what is ahead is owed, so that a worker gets several
        tasks at once. What is ahead never falls below three quarters, so nothing waits for them.
        """
        if not self._may_deepen or self.largest is None:
            return _NONE
        more = self._deepen(self.largest)
        return (Draw(more),) if more > 0 else _NONE

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
        return _NONE

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
            return _NONE  # no process is started for that alone, or before its time
        return self._restart(seat) if self.failure is None else _NONE

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
        return _NONE

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
        return _NONE

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
            return _NONE
        self._end_seat(seat)
        return (_DRAW_ONE,)

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

    # -- workers that come and go ---------------------------------------------------------

    def _become(self, seat: Seat, state: SeatState, deadline: float | None = None) -> None:
        seat.state = state
        seat.deadline = deadline
        if deadline is not None:
            self._timed[seat.id] = seat
        elif self._timed:
            self._timed.pop(seat.id, None)

    def _worker_ready(self, event: WorkerReady) -> Sequence[Action]:
        seat = self.seats[event.worker]
        seat.ready = True
        if seat.state is SeatState.STARTING:
            self._become(seat, SeatState.RUNNING)
        seat.failed_starts = seat.killed_starts = 0
        seat.unborn.clear()
        return _NONE

    def _survived(self, event: Survived) -> Sequence[Action]:
        self.restarts.acquit(self.seats[event.worker])
        return _NONE

    def _refused(self, event: WorkerRefused) -> Sequence[Action]:
        self.failure = GaveUp("refused", event.worker)
        return _NONE

    def _retired(self, event: WorkerRetired) -> Sequence[Action]:
        self._let_go(self.seats[event.worker], Parting.SIZE, event.at)
        return _NONE

    def _astray(self, event: WentAstray) -> Sequence[Action]:
        self._unfit |= event.unfit
        self._let_go(self.seats[event.worker], Parting.WAY, event.at)
        return _NONE

    def _stream_lost(self, event: StreamLost) -> Sequence[Action]:
        seat = self.seats[event.worker]
        if event.started:
            self._let_go(seat, Parting.WAY, event.at)
        else:
            self._become(seat, SeatState.EMPTY)
        self._lose(seat, event.why)
        return _NONE

    def _let_go(self, seat: Seat, why: Parting, at: float) -> None:
        """It has a moment to exit by itself."""
        if seat.alive:
            seat.parting = why
            self._become(seat, SeatState.LEAVING, at + self.limits.kill_after)

    def _lose(self, seat: Seat, why: str, *deaths: Exit) -> None:
        if self.failure is None:
            self.failure = GaveUp("stream", seat.id, deaths, why)

    def _stalled(self, event: WorkerStalled) -> Sequence[Action]:
        seat = self.seats[event.worker]
        if not seat.at_work:
            return _NONE
        self._become(seat, SeatState.DUMPING, event.at + self.limits.kill_after)
        return (Dump(seat.id, seat.generation),)

    def _tick(self, event: Ticked) -> Sequence[Action]:
        actions: list[Action] = []
        for seat in sorted(self._timed.values(), key=lambda one: one.id):
            if seat.deadline is None or event.at < seat.deadline:
                continue
            if seat.state is SeatState.PAUSED:
                if self.failure is None:
                    self._become(seat, SeatState.EMPTY)
                    actions += self._restart(seat) if self._needed(seat) else _NONE
            elif seat.state is SeatState.KILLING:
                self._become(seat, SeatState.KILLING)  # once is enough
                actions.append(Abandon(seat.id, seat.generation))
            else:
                self._become(seat, SeatState.KILLING, event.at + self.limits.abandon_after)
                actions.append(Kill(seat.id, seat.generation))
        return actions

    # -- workers that are too large -------------------------------------------------------

    def _grown(self, event: WorkerGrown) -> Sequence[Action]:
        seat = self.seats[event.worker]
        if seat.rehearsed or not seat.at_work:
            return _NONE
        if not self.recycles:
            return (Stay(seat.id, seat.generation, for_good=True),)
        seat.rehearsed = True
        place = seat.answered, seat.passed, seat.replica, seat.exhausted
        return (Rehearse(seat.id, seat.generation, *place, self._unfit),)

    def _rehearsed(self, event: Rehearsed) -> Sequence[Action]:
        seat = self.seats[event.worker]
        if not seat.rehearsed:
            return _NONE
        seat.rehearsed = False
        if event.unfit:  # perhaps another worker has found the same meanwhile
            self._unfit |= event.unfit
            return (Ask(seat.id, seat.generation),)  # it is further now
        if event.exact and event.pays:
            return (Retire(seat.id, seat.generation),)
        if event.exact is False:
            self.recycles = False
        return (Stay(seat.id, seat.generation, event.exact is False, event),)

    # -- deaths ---------------------------------------------------------------------------

    def _exited(self, event: WorkerExited) -> Sequence[Action]:
        seat, exit = self.seats[event.worker], event.exit
        if not seat.alive:
            return _NONE
        was_ready, head, was_loading = seat.ready, seat.head, r.loading(seat, exit)
        if seat.parting is not None or exit.renewed:
            recycled = seat.parting is Parting.SIZE
            actions = self._succeed(seat)
            if exit.kind != "unkillable":
                return [Forget(seat.id, recycled), *actions]
            outcome = Outcome.NOTHING
        else:
            actions, outcome = self._died(seat, exit)
            if outcome is Outcome.TRIED_AGAIN and seat.tries > 1 and self.failure is None:
                return actions  # that has been told
        restart = _restart_of(seat, actions, exit)
        outcome = self._outcome(seat, outcome, restart, was_ready and head is not None)
        report = Report(
            seat.id, exit, event.remains, outcome, restart, was_ready, head, was_loading
        )
        return [report, *actions]

    def _outcome(self, seat: Seat, so_far: Outcome, restart: Restart, making: bool) -> Outcome:
        """What is told of a death, if nothing has told it yet."""
        if self.failure is not None:
            return Outcome.GAVE_UP
        if so_far is not Outcome.NOTHING:
            return so_far
        if restart is Restart.NO:
            return Outcome.NOTHING_LEFT
        if restart is not Restart.LATER and seat.trial is not None:
            return Outcome.ON_TRIAL
        if self.iterable:
            return Outcome.STREAM
        return Outcome.BATCH_AGAIN if making else Outcome.NOTHING

    def _died(self, seat: Seat, exit: Exit) -> tuple[Sequence[Action], Outcome]:
        """A death that was not announced: what is done, and, if that is something special, what is
        to be told of it."""
        if seat.state in (SeatState.DUMPING, SeatState.KILLING):
            seat.stalls += 1
        was_ready = seat.ready
        self._vacate(seat)
        outcome = Outcome.NOTHING
        if self.failure is not None:
            return _NONE, outcome
        if exit.shortage:
            self._put_off(seat, exit)
            return _NONE, Outcome.TRIED_AGAIN
        reason = self.restarts.cannot_go_on(seat, exit, was_ready)
        if reason is not None:
            self.failure = GaveUp(reason, seat.id, (exit,))
            return _NONE, outcome
        conclusions, poisoned = self.restarts.conclude(seat, exit)
        actions: list[Action] = list(conclusions)
        if poisoned is not None:
            if poisoned.task.epoch == self.epoch:
                outcome = Outcome.SAMPLE_GIVEN_UP
            actions += self._give_up(seat, poisoned)
        elif any(isinstance(one, Convict) for one in conclusions):
            outcome = Outcome.LEFT_OUT
        if was_ready and not self._needed(seat):
            return actions, outcome  # it has nothing left to do
        if self.iterable and self.recovery == "raise":
            self._lose(seat, RAISES, exit)
        elif exit.no_way and not seat.exhausted:
            self._lose(seat, exit.no_way, exit)
        elif not self.restarts.may_restart(seat, exit, conclusions):
            self.failure = GaveUp("restart-limit", seat.id, tuple(self.restarts.counted))
        if self.failure is not None:
            return [one for one in actions if isinstance(one, Draw)], outcome
        if not was_ready and seat.killed_starts > 1:
            self._become(
                seat, SeatState.PAUSED, exit.at + self.limits.pause(seat.killed_starts - 1)
            )
            return actions, outcome
        return [*actions, *self._restart(seat)], outcome

    def _vacate(self, seat: Seat) -> None:
        """There is no process any more."""
        seat.ready = seat.rehearsed = False
        seat.parting = None
        self._become(seat, SeatState.EMPTY)

    def _succeed(self, seat: Seat) -> Sequence[Action]:
        """One that was to go is gone; what it left undone is its successor's."""
        self._vacate(seat)
        return self._restart(seat) if self.failure is None and self._needed(seat) else _NONE

    def _needed(self, seat: Seat) -> bool:
        """Whether there is, or may be, something for a worker in this seat to do."""
        return bool(seat.items) or self.persistent or not (seat.ended or self._drained)

    def _put_off(self, seat: Seat, failed: Exit) -> None:
        """Try this start again later, or never."""
        seat.unborn.append(failed)
        if seat.tries >= self.limits.tries:
            self.failure = GaveUp("shortage", seat.id, tuple(seat.unborn))
        else:
            self._become(seat, SeatState.PAUSED, failed.at + self.limits.pause(seat.tries))

    def _give_up(self, seat: Seat, poisoned: Poisoned) -> Sequence[Action]:
        """There is no way to make this batch: say so in its place."""
        self._answered(seat)
        self._making -= 1
        self._finish(poisoned.task, poisoned, 0)
        if not self.iterable:
            return _NONE
        seat.replica -= 1  # it was answered, and not made
        return self._close_replica(seat)  # there is no way past the sample but through it

    def _restart(self, seat: Seat) -> list[Action]:
        seat.generation += 1
        seat.renewals = self.restarts.renewals
        if self.iterable and not seat.exhausted:
            self.continued = seat.id
        self._become(seat, SeatState.STARTING)
        place = seat.answered, seat.passed, seat.replica, seat.exhausted
        start = Start(seat.id, seat.generation, *place, self._unfit, bool(seat.strikes))
        return [start, *(Dispatch(seat.id, item) for item in seat.items)]


def _restart_of(seat: Seat, actions: Sequence[Action], exit: Exit) -> Restart:
    """How the worker that was in this seat is replaced."""
    if seat.state is SeatState.STARTING:
        renewed = any(isinstance(one, Renew) for one in actions)
        return Restart.ANEW if renewed else Restart.NOW
    later = seat.state is SeatState.PAUSED and not exit.shortage
    return Restart.LATER if later else Restart.NO


def _agree(item: Item, number: int) -> None:
    """Also without assertions: batches that are mixed up must never be delivered."""
    if not isinstance(item, Task) or item.number != number:
        raise RuntimeError(f"a worker answered task {number}, and {item} was to be answered first")


def _is_of(item: Task | tuple[Seat, Resumption], seat: Seat) -> bool:
    """Whether it is a task of the epoch this seat's replica is in."""
    return isinstance(item, Task) and item.worker == seat.id and item.epoch == seat.epoch
