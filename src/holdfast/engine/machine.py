"""Every decision of the engine, and nothing else.

The machine has no process, no clock and no file. It has one method that changes it: `handle` takes
an event (what happened to the consumer or to a worker, in the past tense) and returns actions (what
to do, in the imperative). A driver turns actions into system calls, and their results into events.
Times, sizes and limits are fields of the events. So a test can play any history, however unlikely,
in microseconds, and a recorded history gives the same actions when it is played again.

The driver carries out all actions of a decision, in their order, before it passes on any event that
they have caused. So no action is out of date when it is carried out.

What the machine promises (each has a property in ``tests/engine/test_machine.py``):

- Every task is delivered exactly once, in order (or, with ``in_order=False``, as it arrives).
- A worker is given tasks in the order in which torch would give them, whichever workers die,
  because the random state of a worker depends on the tasks it does.
- No more than ``prefetch * workers`` tasks are out (or `limit`, see `flow`), and no more bytes than
  the budget allows. Only a batch that is larger than the budget exceeds it, alone.
- After a death the replacement gets exactly the items that the dead worker had not answered, in
  their order. An item whose answer was received is never sent again.
- Every process hears each notice once, in the order in which they were announced, and between the
  same tasks as every other process in its seat.
- As long as workers may be replaced, the run can go on. When they may not be, the failure is
  delivered in place of the first missing batch.

It has four parts. `flow` handles tasks, from the sampler to the consumer, and has the table of
their states. `seats` has the states of a worker's seat. `restarts` draws the conclusions from
exits. This module has `handle`, and what happens to workers.

**Workers that have grown too large.** Such a worker announces its exit after an answer
(`WorkerRetired`). That is no death: it does not count as a restart, and the successor continues
from the same random state. A worker of an iterable dataset asks first (`WorkerGrown`) and goes on
meanwhile. A separate process then tries to continue its stream (`Rehearse`). Only if that was
exact, and the process is smaller, the worker is told to exit (`Retire`). If it was not exact,
workers of this pool are no longer replaced for their size.

**Streams.** The stream of an iterable dataset may not repeat itself. `continuation` says how a
successor gets to the position of its predecessor, and how it checks that. A process that fails to
do so announces its exit (`ResumptionFailed`), which is no death either. Its successor, and those in
all other seats, are told not to try that way again. If no way keeps the number of batches, the run
ends (`StreamLost`). With ``recovery="raise"`` it ends at the first death.

The cost of an event does not depend on the number of workers, except for the first event of an
epoch and for replicas that end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from holdfast.engine import events as ev
from holdfast.engine import restarts as r
from holdfast.engine.continuation import Recovery
from holdfast.engine.events import Asked, BatchReady, Drawn, Unpacked
from holdfast.engine.flow import NO_ACTIONS, BeforeSizesAreKnown, Flow
from holdfast.engine.seats import Parting, Seat, SeatState

RAISES: Final = 'iterable_recovery="raise": no stream is continued by another process'
_LIMITS: Final = ev.Limits()
_Beginning = TypeVar("_Beginning", bound=ev.Beginning)


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
        restarts: ev.RestartPolicy,
        leaves_out: bool = False,
        recovery: Recovery = "auto",
        before_sizes_are_known: BeforeSizesAreKnown = "any",
        largest: int | None = None,
        limits: ev.Limits = _LIMITS,
        may_deepen: bool = False,
    ) -> None:
        """Make a machine for a pool.

        - `leaves_out`: there is a policy for bad samples, so a batch can be made without one.
        - `largest`: the size of the largest batch, if it is known from an earlier epoch.
        - `before_sizes_are_known`: how many batches are made at a time until the first has arrived,
          if `largest` is not known.
        - `may_deepen`: with map-style data in order, more than `prefetch` batches are made ahead if
          they are small and quick.
        """
        seats = tuple(Seat(worker) for worker in range(workers))
        may_deepen = may_deepen and in_order and not iterable and not persistent
        super().__init__(
            seats, prefetch, in_order, before_sizes_are_known, largest, may_deepen, limits
        )
        self.iterable = iterable
        self.persistent = persistent
        self.recovery = recovery  # of streams
        self.recycles = not iterable or recovery != "raise"
        """Whether workers are replaced for their size."""
        self.restarts = r.Restarts(
            seats,
            restarts,
            limits,
            iterable=iterable,
            leaves_out=leaves_out and not iterable,  # no element of a stream can be skipped
        )
        self._timed: dict[int, Seat] = {}  # seats with a deadline
        self._stopped = False
        self._unfit: frozenset[str] = frozenset()  # ways to continue a stream that have failed
        self._handlers: dict[type, Callable[[Any], Sequence[ev.Action]]] = {
            ev.Began: self._begin,
            ev.EpochBegan: self._begin_epoch,
            ev.Announced: self._announce,
            ev.Drained: self._drain,
            ev.Hurried: self._hurry,
            ev.RoomChanged: self._change_room,
            ev.Stopped: self._stop,
            ev.Ticked: self._tick,
            ev.WorkerReady: self._worker_ready,
            ev.ReplicaEnded: self._replica_ended,
            ev.Resumed: self._resumed,
            ev.Told: self._told,
            ev.Survived: self._survived,
            ev.WorkerExited: self._exited,
            ev.WorkerRefused: self._refused,
            ev.WorkerRetired: self._retired,
            ev.ResumptionFailed: self._resumption_failed,
            ev.WorkerStreamLost: self._stream_lost,
            ev.WorkerGrown: self._grown,
            ev.Rehearsed: self._rehearsed,
            ev.WorkerStalled: self._stalled,
            ev.WorkerWentOn: self._went_on,
            ev.WorkersLost: self._workers_lost,
        }

    # -- the entry point ------------------------------------------------------------------

    def handle(self, event: ev.Event) -> Sequence[ev.Action]:
        """Decide on one event. Returns the actions to carry out, in this order."""
        if self._stopped:
            return NO_ACTIONS
        kind = type(event)
        actions: Sequence[ev.Action] = NO_ACTIONS
        # First the events of every batch.
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
            if isinstance(event, ev.WorkerEvent) and self._is_outdated(event):
                return NO_ACTIONS
            actions = self._handlers[kind](event)
        if self.held_back:
            actions = [*actions, *self._send_held_back()]
        if self._asked:
            actions = self._with_delivery(actions)
        return actions

    def _is_outdated(self, event: ev.WorkerEvent) -> bool:
        """Whether this is of a process that was replaced."""
        return event.generation != self.seats[event.worker].generation

    # -- queries --------------------------------------------------------------------------

    def generation(self, worker: int) -> int:
        return self.seats[worker].generation

    def deadline(self) -> float | None:
        """The time at which the machine needs `Ticked`, at the latest."""
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

    def _begin(self, event: ev.Began) -> Sequence[ev.Action]:
        """The first epoch: start all workers."""
        draws = self.limit
        if event.position is not None:
            draws = self._go_to(event.position)
        starts: list[ev.Action] = []
        for seat in self.seats:
            if self._needed(seat):
                starts.append(self._beginning(ev.Start, seat))
            else:
                self._become(seat, SeatState.EMPTY)
        return [*starts, ev.Draw(draws)]

    def _stop(self, event: ev.Stopped) -> Sequence[ev.Action]:
        self._stopped = True
        self._making = self._arrived_bytes = self._unread = 0
        self._recount()
        self.held_back.clear()
        self._tasks.clear()  # batches that have arrived are released now, not by the collector
        self._arrived.clear()
        self._asked = False
        return NO_ACTIONS

    # -- workers that start, stall and leave ----------------------------------------------

    def _become(self, seat: Seat, state: SeatState, deadline: float | None = None) -> None:
        seat.state = state
        seat.deadline = deadline
        if deadline is not None:
            self._timed[seat.id] = seat
        elif self._timed:
            self._timed.pop(seat.id, None)

    def _worker_ready(self, event: ev.WorkerReady) -> Sequence[ev.Action]:
        seat = self.seats[event.worker]
        seat.ready = True
        if seat.state is SeatState.STARTING:
            self._become(seat, SeatState.RUNNING)
        seat.failed_starts = seat.killed_starts = 0
        seat.short_starts.clear()
        return NO_ACTIONS

    def _survived(self, event: ev.Survived) -> Sequence[ev.Action]:
        self.restarts.survived(self.seats[event.worker])
        return NO_ACTIONS

    def _refused(self, event: ev.WorkerRefused) -> Sequence[ev.Action]:
        self.failure = ev.GaveUp("refused", event.worker)
        return NO_ACTIONS

    def _workers_lost(self, event: ev.WorkersLost) -> Sequence[ev.Action]:
        self.failure = ev.GaveUp("lost", 0, why=event.why)
        return NO_ACTIONS

    def _retired(self, event: ev.WorkerRetired) -> Sequence[ev.Action]:
        self._await_exit(self.seats[event.worker], Parting.SIZE, event.at)
        return NO_ACTIONS

    def _resumption_failed(self, event: ev.ResumptionFailed) -> Sequence[ev.Action]:
        self._unfit |= event.unfit
        self._await_exit(self.seats[event.worker], Parting.WAY, event.at)
        return NO_ACTIONS

    def _stream_lost(self, event: ev.WorkerStreamLost) -> Sequence[ev.Action]:
        seat = self.seats[event.worker]
        if event.started:
            self._await_exit(seat, Parting.WAY, event.at)
        else:
            self._become(seat, SeatState.EMPTY)
        self._lose_stream(seat, event.why)
        return NO_ACTIONS

    def _await_exit(self, seat: Seat, why: Parting, at: float) -> None:
        """The process has announced its exit; give it time for that before it is killed."""
        if seat.alive:
            seat.parting = why
            self._become(seat, SeatState.LEAVING, at + self.limits.kill_after)

    def _lose_stream(self, seat: Seat, why: str, *deaths: ev.Exit) -> None:
        if self.failure is None:
            self.failure = ev.GaveUp("stream", seat.id, deaths, why)

    def _stalled(self, event: ev.WorkerStalled) -> Sequence[ev.Action]:
        seat = self.seats[event.worker]
        if not seat.at_work:
            return NO_ACTIONS
        self._become(seat, SeatState.DUMPING, event.at + self.limits.kill_after)
        return (ev.Dump(seat.id, seat.generation),)

    def _went_on(self, event: ev.WorkerWentOn) -> Sequence[ev.Action]:
        seat = self.seats[event.worker]
        if seat.state is SeatState.DUMPING:
            self._become(seat, SeatState.RUNNING if seat.ready else SeatState.STARTING)
        return NO_ACTIONS

    def _tick(self, event: ev.Ticked) -> Sequence[ev.Action]:
        actions: list[ev.Action] = []
        for seat in sorted(self._timed.values(), key=lambda one: one.id):
            if seat.deadline is None or event.at < seat.deadline:
                continue
            if seat.state is SeatState.PAUSED:
                if self.failure is None:
                    self._become(seat, SeatState.EMPTY)
                    actions += self._restart(seat) if self._needed(seat) else NO_ACTIONS
            elif seat.state is SeatState.KILLING or not self.limits.killable:
                self._become(seat, SeatState.KILLING)  # without a deadline: abandon it only once
                actions.append(ev.Abandon(seat.id, seat.generation))
            else:
                self._become(seat, SeatState.KILLING, event.at + self.limits.abandon_after)
                actions.append(ev.Kill(seat.id, seat.generation))
        return actions

    # -- workers that are too large -------------------------------------------------------

    def _grown(self, event: ev.WorkerGrown) -> Sequence[ev.Action]:
        seat = self.seats[event.worker]
        if seat.rehearsed or not seat.at_work:
            return NO_ACTIONS
        if not self.recycles:
            return (ev.Stay(seat.id, seat.generation, for_good=True),)
        seat.rehearsed = True
        return (self._beginning(ev.Rehearse, seat),)

    def _rehearsed(self, event: ev.Rehearsed) -> Sequence[ev.Action]:
        seat = self.seats[event.worker]
        if not seat.rehearsed:
            return NO_ACTIONS
        seat.rehearsed = False
        if event.unfit:  # another worker may have found the same meanwhile
            self._unfit |= event.unfit
            return (ev.Ask(seat.id, seat.generation),)  # its position has changed
        if event.exact and event.pays:
            return (ev.Retire(seat.id, seat.generation),)
        if event.exact is False:
            self.recycles = False
        return (ev.Stay(seat.id, seat.generation, event.exact is False, event),)

    # -- deaths ---------------------------------------------------------------------------

    def _exited(self, event: ev.WorkerExited) -> Sequence[ev.Action]:
        seat, exit = self.seats[event.worker], event.exit
        if not seat.alive:
            return NO_ACTIONS
        was_ready, head, was_loading = seat.ready, seat.head, r.is_loading(seat, exit)
        if seat.parting is not None or exit.renewed:
            recycled = seat.parting is Parting.SIZE
            actions = self._replace(seat)
            if exit.kind != "unkillable":
                return [ev.Forget(seat.id, recycled, exit.renewed), *actions]
            outcome = ev.Outcome.NOTHING
        else:
            actions, outcome = self._died(seat, exit)
            if outcome is ev.Outcome.TRIED_AGAIN and seat.tries > 1 and self.failure is None:
                return actions  # reported at the first try
        restart = _restart_of(seat, actions, exit)
        outcome = self._outcome(seat, outcome, restart, was_ready and head is not None)
        report = ev.Report(
            seat.id, exit, event.evidence, outcome, restart, was_ready, head, was_loading
        )
        return [report, *actions]

    def _outcome(
        self, seat: Seat, so_far: ev.Outcome, restart: ev.Restart, making: bool
    ) -> ev.Outcome:
        """What is reported about a death, if `so_far` says nothing special."""
        if self.failure is not None:
            return ev.Outcome.GAVE_UP
        if so_far is not ev.Outcome.NOTHING:
            return so_far
        if restart is ev.Restart.NO:
            return ev.Outcome.NOTHING_LEFT
        if restart is not ev.Restart.LATER and seat.isolation_test is not None:
            return ev.Outcome.TESTED_ALONE
        if self.iterable:
            return ev.Outcome.STREAM
        return ev.Outcome.BATCH_AGAIN if making else ev.Outcome.NOTHING

    def _died(self, seat: Seat, exit: ev.Exit) -> tuple[Sequence[ev.Action], ev.Outcome]:
        """Handle an exit that was not announced. Returns what to do, and what to report about it if
        that is something special."""
        if seat.state in (SeatState.DUMPING, SeatState.KILLING):
            seat.stalls += 1
        was_ready = seat.ready
        self._vacate(seat)
        outcome = ev.Outcome.NOTHING
        if self.failure is not None:
            return NO_ACTIONS, outcome
        if exit.shortage:
            self._postpone_start(seat, exit)
            return NO_ACTIONS, ev.Outcome.TRIED_AGAIN
        reason = self.restarts.reason_to_give_up(seat, exit, was_ready)
        if reason is not None:
            self.failure = ev.GaveUp(reason, seat.id, (exit,))
            return NO_ACTIONS, outcome
        conclusions, poisoned = self.restarts.conclude(seat, exit)
        actions: list[ev.Action] = list(conclusions)
        if poisoned is not None:
            if poisoned.task.epoch == self.epoch:
                outcome = ev.Outcome.SAMPLE_GIVEN_UP
            actions += self._give_up_batch(seat, poisoned)
        elif any(isinstance(one, ev.BanSample) for one in conclusions):
            outcome = ev.Outcome.LEFT_OUT
        if was_ready and not self._needed(seat):
            return actions, outcome  # the seat has nothing left to do
        if self.iterable and self.recovery == "raise":
            self._lose_stream(seat, RAISES, exit)
        elif exit.no_way and not seat.exhausted:
            self._lose_stream(seat, exit.no_way, exit)
        elif not self.restarts.may_restart(seat, exit, conclusions):
            counted = tuple(self.restarts.counted)
            self.failure = ev.GaveUp("restart-limit", seat.id, counted, task=seat.head)
        if self.failure is not None:
            return [one for one in actions if isinstance(one, ev.Draw)], outcome
        if not was_ready and seat.killed_starts > 1:
            self._become(
                seat, SeatState.PAUSED, exit.at + self.limits.pause(seat.killed_starts - 1)
            )
            return actions, outcome
        return [*actions, *self._restart(seat)], outcome

    def _vacate(self, seat: Seat) -> None:
        """The process in this seat is gone."""
        seat.ready = seat.rehearsed = False
        seat.parting = None
        self._become(seat, SeatState.EMPTY)

    def _replace(self, seat: Seat) -> Sequence[ev.Action]:
        """A process has exited as announced. Start its successor, if the seat is needed."""
        self._vacate(seat)
        return self._restart(seat) if self.failure is None and self._needed(seat) else NO_ACTIONS

    def _needed(self, seat: Seat) -> bool:
        """Whether a worker in this seat has something to do, or may get something to do."""
        return seat.has_work or self.persistent or not (seat.ended or self._drained)

    def _postpone_start(self, seat: Seat, failed: ev.Exit) -> None:
        """Repeat this start later, or give up after too many tries."""
        seat.short_starts.append(failed)
        if seat.tries >= self.limits.tries:
            self.failure = ev.GaveUp("shortage", seat.id, tuple(seat.short_starts))
        else:
            self._become(seat, SeatState.PAUSED, failed.at + self.limits.pause(seat.tries))

    def _give_up_batch(self, seat: Seat, poisoned: ev.Poisoned) -> Sequence[ev.Action]:
        """This batch cannot be made: deliver `poisoned` in its place."""
        self._answered(seat)
        self._making -= 1
        self._finish(poisoned.task, poisoned, 0)
        self._recount()
        if not self.iterable:
            return NO_ACTIONS
        seat.batches_done -= 1  # the task is answered, but the replica has not made it
        return self._close_replica(seat)  # no element of a stream can be skipped

    def _restart(self, seat: Seat) -> list[ev.Action]:
        seat.generation += 1
        seat.renewals = self.restarts.renewals
        if self.iterable and not seat.exhausted:
            self.continued = seat.id
        self._become(seat, SeatState.STARTING)
        start = self._beginning(ev.Start, seat, accused=bool(seat.suspect_exits))
        return [start, *(ev.Dispatch(seat.id, item) for item in seat.items)]

    def _beginning(self, kind: type[_Beginning], seat: Seat, **more: Any) -> _Beginning:
        """This action, with where the next process in this seat begins."""
        return kind(
            seat.id,
            seat.generation,
            seat.answered,
            seat.epochs_done,
            seat.batches_done,
            seat.exhausted,
            self._unfit,
            tuple(seat.told),
            seat.settled,
            seat.settled_earlier,
            **more,
        )


def _restart_of(seat: Seat, actions: Sequence[ev.Action], exit: ev.Exit) -> ev.Restart:
    """How the worker that exited is replaced."""
    if seat.state is SeatState.STARTING:
        renewed = any(isinstance(one, ev.RenewNursery) for one in actions)
        return ev.Restart.ANEW if renewed else ev.Restart.NOW
    later = seat.state is SeatState.PAUSED and not exit.shortage
    return ev.Restart.LATER if later else ev.Restart.NO
