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
- no more tasks are out than ``prefetch * workers`` (or `limit`, see `flow`), and no more bytes than
  the budget allows, but for one batch that is larger than it, alone;
- after a death the replacement is asked for exactly the items the dead worker had not answered, in
  their order; an answer that was received is never asked for again;
- as long as workers may be replaced, there is always a way forward; when they may not be, the
  failure is delivered where the first missing batch would have been.

It comes in four parts: `flow` has the way of a batch from the sampler to the consumer, `seats` the
states of workers, `restarts` what a death says of a sample and of the next start; here is the door,
and what happens to workers.

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

What an event costs does not depend on the number of workers, but for the first of an epoch, and for
replicas that end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from holdfast.engine import restarts as r
from holdfast.engine.continuation import Recovery
from holdfast.engine.flow import NONE, BeforeSizesAreKnown, Flow
from holdfast.engine.seats import Parting, Seat, SeatState
from holdfast.engine.vocabulary import (
    Abandon,
    Action,
    Ask,
    Asked,
    BatchReady,
    Began,
    Convict,
    Dispatch,
    Drained,
    Draw,
    Drawn,
    Dump,
    EpochBegan,
    Event,
    Exit,
    Forget,
    GaveUp,
    Hurried,
    Kill,
    Limits,
    Outcome,
    Poisoned,
    Rehearse,
    Rehearsed,
    Renew,
    ReplicaEnded,
    Report,
    Restart,
    RestartPolicy,
    Resumed,
    Retire,
    RoomChanged,
    Start,
    Stay,
    Stopped,
    StreamLost,
    Survived,
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

RAISES: Final = 'iterable_recovery="raise": no stream is continued by another process'
_LIMITS: Final = Limits()


class Machine(Flow):
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
        seats = tuple(Seat(worker) for worker in range(workers))
        may_deepen = may_deepen and in_order and not iterable and not persistent
        super().__init__(seats, prefetch, in_order, before_sizes_are_known, largest, may_deepen)
        self.iterable = iterable
        self.persistent = persistent
        self.recovery = recovery  # of streams
        self.recycles = not iterable or recovery != "raise"
        """Whether workers are replaced for their size."""
        self.limits = limits
        self.restarts = r.Restarts(
            seats,
            restarts,
            limits,
            iterable=iterable,
            leaves_out=leaves_out and not iterable,  # there is no way past one but through it
        )
        self._timed: dict[int, Seat] = {}  # seats with a deadline
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
            return NONE
        kind = type(event)
        actions: Sequence[Action] = NONE
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
                return NONE  # from a worker we have gone on without
            actions = self._handlers[kind](event)
        if self._waiting:
            actions = [*actions, *self._hand_out()]
        if self._asked:
            actions = self._give(actions)
        return actions

    # -- what may be asked ----------------------------------------------------------------

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

    def _stop(self, event: Stopped) -> Sequence[Action]:
        self._stopped = True
        self._making = self._arrived_bytes = self._unread = 0
        self._waiting.clear()
        self._asked = False
        return NONE

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
        return NONE

    def _survived(self, event: Survived) -> Sequence[Action]:
        self.restarts.acquit(self.seats[event.worker])
        return NONE

    def _refused(self, event: WorkerRefused) -> Sequence[Action]:
        self.failure = GaveUp("refused", event.worker)
        return NONE

    def _retired(self, event: WorkerRetired) -> Sequence[Action]:
        self._let_go(self.seats[event.worker], Parting.SIZE, event.at)
        return NONE

    def _astray(self, event: WentAstray) -> Sequence[Action]:
        self._unfit |= event.unfit
        self._let_go(self.seats[event.worker], Parting.WAY, event.at)
        return NONE

    def _stream_lost(self, event: StreamLost) -> Sequence[Action]:
        seat = self.seats[event.worker]
        if event.started:
            self._let_go(seat, Parting.WAY, event.at)
        else:
            self._become(seat, SeatState.EMPTY)
        self._lose(seat, event.why)
        return NONE

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
            return NONE
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
                    actions += self._restart(seat) if self._needed(seat) else NONE
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
            return NONE
        if not self.recycles:
            return (Stay(seat.id, seat.generation, for_good=True),)
        seat.rehearsed = True
        place = seat.answered, seat.passed, seat.replica, seat.exhausted
        return (Rehearse(seat.id, seat.generation, *place, self._unfit),)

    def _rehearsed(self, event: Rehearsed) -> Sequence[Action]:
        seat = self.seats[event.worker]
        if not seat.rehearsed:
            return NONE
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
            return NONE
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
            return NONE, outcome
        if exit.shortage:
            self._put_off(seat, exit)
            return NONE, Outcome.TRIED_AGAIN
        reason = self.restarts.cannot_go_on(seat, exit, was_ready)
        if reason is not None:
            self.failure = GaveUp(reason, seat.id, (exit,))
            return NONE, outcome
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
        return self._restart(seat) if self.failure is None and self._needed(seat) else NONE

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
            return NONE
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
