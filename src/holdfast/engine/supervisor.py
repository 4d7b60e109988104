"""Between the machine and a driver: every event is decided on, every decision carried out.

All actions of a decision are carried out, in their order, before the machine hears what they have
caused (a start that failed, a worker that was abandoned, the last messages of a worker that is
replaced). That waits in a queue. So no action is out of date when it is carried out, and no driver
has to check that. The queue holds calls instead of events, because what a dead worker has left
must be read when it is its turn.

What concerns the consumer is kept in the epoch: how many indices are due, and what was delivered.
Hints on bad samples are kept here, by task, until the task is answered. Without a policy there are
none.

Everything here runs under the pool's lock, in the consumer's thread or in the background thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from holdfast.autopsy import thread_notes
from holdfast.engine import events as ev
from holdfast.engine.deaths import accusation
from holdfast.engine.driver import Driver
from holdfast.engine.epoch import NO_BATCH, Epoch, Reported, StartRefused
from holdfast.engine.machine import Machine
from holdfast.engine.pinning import PinningThread
from holdfast.engine.upkeep import Upkeep
from holdfast.limits.budget import Share
from holdfast.samples.bad_sample import BadSample, digest_of_stack
from holdfast.samples.substitute import NOTHING, BatchHints, sample_of


class Supervisor:
    """One for each pool."""

    def __init__(
        self, machine: Machine, share: Share, epoch: Epoch, driver: Driver, upkeep: Upkeep
    ) -> None:
        self.machine = machine
        self.epoch = epoch
        self.upkeep = upkeep
        self.refusal: StartRefused | None = None
        """Why a worker could not load its main module or dataset. Set by the driver."""
        self.hints: dict[tuple[int, int], BatchHints] = {}
        """On bad samples, by epoch and number of the task; see `hint`."""
        self.pinning: PinningThread | None = None
        """Where batches that have arrived are pinned, if the loader does that."""
        self._share = share
        self._driver = driver
        self._acting = False  # actions are being carried out
        self._caused: deque[Callable[[], None]] = deque()  # what follows after that
        self._gathering = False  # items are sent when all are known
        self._unsent = False  # there are such items
        self._doing: dict[type, Callable[[Any], object]] = {
            ev.Dispatch: self._dispatch,
            ev.Deliver: self._deliver,
            ev.Draw: self._draw,
            ev.Report: self._report,
            ev.Forget: lambda action: upkeep.forgotten(action, self.after),
            ev.Start: self._start,
            ev.BanSample: self._ban,
            ev.LoadSeparately: self._separate,
            ev.RenewNursery: lambda _: driver.renew(),
            ev.Rehearse: driver.rehearse,
            ev.Ask: lambda action: driver.urge(action.worker, "ask"),
            ev.Retire: lambda action: driver.urge(action.worker, "retire"),
            ev.Stay: self._stay,
            ev.Dump: lambda action: driver.dump(action.worker, action.generation),
            ev.Kill: lambda action: driver.kill(action.worker, action.generation),
            ev.Abandon: lambda action: driver.abandon(action.worker, action.generation),
        }
        driver.connect(self)

    # -- decisions ------------------------------------------------------------------------

    def tell(self, event: ev.Event) -> None:
        """Have the machine decide, and do what it says."""
        if self._acting:
            self._caused.append(partial(self.tell, event))
            return
        machine = self.machine
        kind = type(event)
        if self.hints and (kind is ev.BatchReady or kind is ev.ReplicaEnded):
            self._drop_answered(event)  # type: ignore[arg-type]
        if kind is ev.BatchReady and self.pinning is not None:
            event = self._pinned(event, self.pinning)  # type: ignore[arg-type]
        if kind is ev.Drawn or kind is ev.EpochBegan or machine.held_back:
            self._with_room(event)  # it may take some
            return
        actions = machine.handle(event)
        self._share.in_flight = machine.in_flight
        if actions:
            self.carry_out(actions)

    def _pinned(self, event: ev.BatchReady, pinning: PinningThread) -> ev.BatchReady:
        """The same event, with the batch on its way to pinned memory."""
        result = event.result
        reported = isinstance(result, Reported)
        batch = result.result if reported else result
        if type(batch) in NO_BATCH:
            return event
        self._share.set_aside = max(self._share.set_aside, batch.nbytes)
        pinned: Any = pinning.accept(batch, event.task)
        if reported:
            pinned = dataclasses.replace(result, result=pinned)
        return dataclasses.replace(event, result=pinned)

    def run_upkeep(self) -> None:
        """Do what is due by the clock, and send what was held back if there is room by now."""
        self.upkeep.run(self.tell)
        if self.machine.held_back:
            self._with_room(None)

    def _with_room(self, event: ev.Event | None) -> None:
        """Tell the machine how much room there is, if that has changed, and then of `event`."""
        machine, share = self.machine, self._share
        actions: Sequence[ev.Action]
        while True:
            changed = False
            with share.budget.taking:
                room = share.room()
                actions = ()
                if room != machine.room:
                    actions = machine.handle(ev.RoomChanged(room))
                    changed = bool(actions)
                if not changed and event is not None:
                    actions = machine.handle(event)
                share.in_flight = machine.in_flight
            if actions:
                self.carry_out(actions)
            if not changed or event is None:
                return

    def stop(self) -> None:
        """Ignore everything that happens from now on."""
        self.machine.handle(ev.STOPPED)
        self._share.close()

    # -- carrying them out ----------------------------------------------------------------

    def carry_out(self, actions: Sequence[ev.Action]) -> None:
        """Do this, in the order in which it was decided, and then what it has caused."""
        doing = self._doing
        self._acting = True
        try:
            for action in actions:
                doing[type(action)](action)
            if self._unsent and not self._gathering:
                self._flush()
        except BaseException:
            self._caused.clear()
            raise
        finally:
            self._acting = False
        while self._caused:
            self._caused.popleft()()

    def after(self, call: Callable[[], None]) -> None:
        """Call this when all actions of the current decision are carried out; at once, if there is
        no such decision."""
        self._caused.append(call)
        if not self._acting:
            self.carry_out(())

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Decide on what is told inside at its end."""
        acting, self._acting = self._acting, True
        try:
            yield
        except BaseException:
            self._caused.clear()
            raise
        finally:
            self._acting = acting
        if not acting:
            self.carry_out(())

    @contextlib.contextmanager
    def gathering(self) -> Iterator[None]:
        """Send what is dispatched inside at its end, to each worker in one message."""
        self._gathering = True
        try:
            yield
        finally:
            self._gathering = False
            if self._unsent:
                self._flush()

    def _flush(self) -> None:
        self._unsent = False
        self._driver.flush()

    def _deliver(self, action: ev.Deliver) -> None:
        self.epoch.delivered = action.what

    def _draw(self, action: ev.Draw) -> None:
        self.epoch.due += action.count

    def _dispatch(self, action: ev.Dispatch) -> None:
        item = action.item
        if isinstance(item, ev.Task):
            hint, account = self.hint(item), self.epoch.account
            if account is not None:
                hint = account.refreshed(item.keys, hint)
                if hint is not None:
                    self._give_hint(item, hint)
        else:
            hint = self.hint(item.task) if isinstance(item, ev.IsolationTest) else None
        self._driver.send(action.worker, item, hint)
        self._unsent = True

    def _start(self, action: ev.Start) -> None:
        self.upkeep.started(action)
        self._driver.start(action)

    def _stay(self, action: ev.Stay) -> None:
        self.upkeep.stays(action)
        self._driver.urge(action.worker, "stay", action.for_good)

    def _report(self, report: ev.Report) -> None:
        sample, task = None, report.task
        if report.loading and task is not None:
            sample = sample_of(task.keys, self.hint(task), report.exit.position)
        self.upkeep.reported(report, sample, self.after)

    def ended_with(self, epoch: int, reports: Sequence[BadSample]) -> None:
        """A replica has ended in this epoch, and reported bad samples that belong to no batch."""
        if epoch == self.machine.epoch:  # else the consumer has left that epoch
            self.epoch.unclaimed.extend(reports)

    # -- hints on bad samples -------------------------------------------------------------

    def hint(self, task: ev.Task) -> BatchHints | None:
        """What the worker has to know about a batch besides its indices."""
        return self.hints.get((task.epoch, task.number)) if self.hints else None

    def hint_at(self, number: int, hint: BatchHints | None) -> None:
        """Give this hint with the batch of this number, which is about to be drawn."""
        if hint is not None:
            self.hints[self.machine.epoch, number] = hint

    def drop_hint(self, task: ev.Task) -> None:
        """The task was given up, and that has been told."""
        self.hints.pop((task.epoch, task.number), None)

    def _drop_answered(self, event: ev.BatchReady | ev.ReplicaEnded) -> None:
        seat = self.machine.seats[event.worker]
        if event.generation == seat.generation:
            self.hints.pop((seat.epoch, event.task), None)

    def _give_hint(self, task: ev.Task, hint: BatchHints) -> None:
        self.hints[task.epoch, task.number] = hint

    def _separate(self, action: ev.LoadSeparately) -> None:
        task = action.task
        self._give_hint(task, (self.hint(task) or NOTHING)._replace(apart=True))

    def _ban(self, action: ev.BanSample) -> None:
        """A sample ends its workers even when it is loaded alone: make the batch without it."""
        account = self.epoch.account
        assert account is not None
        task, last = action.task, action.deaths[-1]
        kind, error, words = accusation(last)
        stack = thread_notes.split(last.stack)[1]
        bad = BadSample(
            index=None,
            kind=kind,
            error=error,
            message=words,
            traceback=stack,
            digest=digest_of_stack(stack),
            worker_id=action.worker,
            attempts=len(action.deaths),
        )
        hint = account.ban(task.keys, self.hint(task), action.sample, task.number, bad)
        self._give_hint(task, hint)
