"""Between the machine and a driver: each event is decided on, each decision carried out.

All actions of a decision are carried out, in their order, before the machine hears of what they
have caused (a start that fails, a worker that is abandoned, the last words of one that is
replaced): that waits in a queue. So an action is never out of date when it is carried out, and no
driver has to look whether it is. The queue holds calls and not events, because what is read of a
dead worker must be read when it is its turn.

What is the consumer's is kept in the epoch: how many indices are due, and what is delivered. Hints
on bad samples are kept here, by task, until the task is answered; there are none without a policy.

Everything here runs under the pool's lock, in the consumer's thread or in the watch's.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from holdfast.autopsy import thread_notes
from holdfast.engine import vocabulary as v
from holdfast.engine.driver import Driver
from holdfast.engine.epoch import Epoch
from holdfast.engine.machine import Machine
from holdfast.engine.obituaries import accusation
from holdfast.memory.budget import Share
from holdfast.samples.record import BadSample, digest_of_stack
from holdfast.samples.substitute import NOTHING, Brief, sample_of

__all__ = ["Supervisor"]


class Supervisor:
    """One for each pool."""

    def __init__(self, machine: Machine, share: Share, epoch: Epoch, driver: Driver) -> None:
        self.machine = machine
        self.epoch = epoch
        self._share = share
        self._driver = driver
        self._acting = False  # actions are being carried out
        self._gathering = False  # items are sent when all are known
        self._unsent = False  # there are such
        self._caused: deque[Callable[[], None]] = deque()  # what follows when they have been
        self._hints: dict[tuple[int, int], Brief] = {}  # by epoch and number of the task
        self._doing: dict[type, Callable[[Any], None]] = {
            v.Dispatch: self._dispatch,
            v.Deliver: self._deliver,
            v.Draw: self._draw,
            v.Report: self._report,
            v.Forget: lambda action: driver.forget(action.worker, action.recycled),
            v.Start: driver.start,
            v.Convict: self._convict,
            v.Separate: self._separate,
            v.Renew: lambda _: driver.renew(),
            v.Rehearse: driver.rehearse,
            v.Ask: lambda action: driver.urge(action.worker, "ask"),
            v.Retire: lambda action: driver.urge(action.worker, "retire"),
            v.Stay: lambda action: driver.urge(action.worker, "stay", action),
            v.Dump: lambda action: driver.dump(action.worker, action.generation),
            v.Kill: lambda action: driver.kill(action.worker, action.generation),
            v.Abandon: lambda action: driver.abandon(action.worker, action.generation),
        }

    # -- decisions ------------------------------------------------------------------------

    def tell(self, event: v.Event) -> None:
        """Have the machine decide, and do what it says."""
        if self._acting:
            self._caused.append(partial(self.tell, event))
            return
        machine = self.machine
        kind = type(event)
        if kind is v.Drawn or kind is v.EpochBegan or machine.held_back:
            self._with_room(event)  # it may take some
            return
        actions = machine.handle(event)
        self._share.in_flight = machine.in_flight
        if actions:
            self.carry_out(actions)

    def look_for_room(self) -> None:
        """There may be more than there was: for what is held back."""
        if self.machine.held_back:
            self._with_room(None)

    def _with_room(self, event: v.Event | None) -> None:
        """Tell the machine how much room there is, if that has changed, and then of `event`."""
        machine, share = self.machine, self._share
        actions: Sequence[v.Action]
        while True:
            changed = False
            with share.budget.taking:
                room = share.room()
                actions = ()
                if room != machine.room:
                    actions = machine.handle(v.RoomChanged(room))
                    changed = bool(actions)
                if not changed and event is not None:
                    actions = machine.handle(event)
                share.in_flight = machine.in_flight
            if actions:
                self.carry_out(actions)
            if not changed or event is None:
                return

    def stop(self) -> None:
        """Nothing that happens from now on has a consequence."""
        self.machine.handle(v.STOPPED)
        self._share.close()

    # -- carrying them out ----------------------------------------------------------------

    def carry_out(self, actions: Sequence[v.Action]) -> None:
        """Do this, in the order in which it was decided, and then what has come of it."""
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
        """Have this done when all actions of this decision are carried out; at once, if none are
        being."""
        self._caused.append(call)
        if not self._acting:
            self.carry_out(())

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What is told inside is decided at its end."""
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
        """What workers are sent inside is sent at its end, to each worker in one message."""
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

    def _deliver(self, action: v.Deliver) -> None:
        self.epoch.delivered = action.what

    def _draw(self, action: v.Draw) -> None:
        self.epoch.due += action.count

    def _dispatch(self, action: v.Dispatch) -> None:
        item = action.item
        if isinstance(item, v.Task):
            hint, account = self.hint(item), self.epoch.account
            if account is not None:
                hint = account.refreshed(item.keys, hint)
                if hint is not None:
                    self._give_hint(item, hint)
        else:
            hint = self.hint(item.task) if isinstance(item, v.Trial) else None
        self._driver.send(action.worker, item, hint)
        self._unsent = True

    def _report(self, report: v.Report) -> None:
        sample, task = None, report.task
        if report.loading and task is not None:
            sample = sample_of(task.keys, self.hint(task), report.exit.position)
        self._driver.report(report, sample)

    # -- hints on bad samples -------------------------------------------------------------

    def hint(self, task: v.Task) -> Brief | None:
        """What the worker is told about a batch besides its indices."""
        return self._hints.get((task.epoch, task.number)) if self._hints else None

    def hint_at(self, number: int, hint: Brief | None) -> None:
        """For the batch of this number, which is about to be drawn."""
        if hint is not None:
            self._hints[self.machine.epoch, number] = hint

    def drop_hint(self, epoch: int, number: int) -> None:
        """The task was answered, or given up."""
        if self._hints:
            self._hints.pop((epoch, number), None)

    def _give_hint(self, task: v.Task, hint: Brief) -> None:
        self._hints[task.epoch, task.number] = hint

    def _separate(self, action: v.Separate) -> None:
        task = action.task
        self._give_hint(task, (self.hint(task) or NOTHING)._replace(apart=True))

    def _convict(self, action: v.Convict) -> None:
        """A sample ends its workers, alone too: the batch goes on without it."""
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
        hint = account.convict(task.keys, self.hint(task), action.sample, task.number, bad)
        self._give_hint(task, hint)
