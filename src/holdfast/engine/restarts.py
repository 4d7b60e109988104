"""What an exit says: of a sample, of the nursery, and of whether there is another start.

A sample of map-style data that was being loaded when its worker died is put on trial before it is
blamed: the next process in that seat first loads it alone. If that one dies of it too, the sample
is convicted: the driver is told to leave it out (`Convict`) and the batch is redone, or, without a
policy for bad samples, the batch is given up (`Poisoned`). If it lives, the sample is acquitted and
the batch redone with it. What can be convicted of what:

- A worker that ended by itself (a crash, an exit, a stall, a signal it sent to itself) needs one
  death in the batch, and one alone.
- One that was killed (SIGKILL) while memory was short: one, and two alone.
- One that was killed, and nothing says by which process: two, and then alone three times in a row
  *in the same instant*. Workers may be killed from outside, at any rate, and then whatever is being
  loaded dies with them; how often it does so proves nothing. So the worker waits before it loads
  the sample, for a time drawn at random that is at least `CLOSE` times as long as the sample then
  takes to kill. A kill that has nothing to do with the sample strikes while the worker waits: that
  it comes so soon after it, by chance, happens once in `CLOSE` times at most, whatever the rate and
  the rhythm of the killing. A worker that is killed while it waits has shown that it takes no
  sample for that, and the suspicion is dropped.

Everything else counts as a restart and as nothing else. Without a way to tell, no sample is
convicted: `max_restarts` is what ends such a run. Elements of a stream cannot be loaded alone:
there it takes two deaths in a row that were its own doing, or three that were that or for memory.
One that kills its worker without a trace is not convicted: `max_restarts` ends the run, and the
error names it, if all deaths were at the same one.
With a policy, deaths that convict a sample do not count as restarts: how many may be bad is for
another limit to say.

A start that fails because something is short (processes, memory, descriptors) is no death: it may
be given back in a moment. It is tried again after a pause, each twice as long as the one before up
to a limit, while the other workers go on. When that has been so for about half a minute, the
failure tells of all the tries.

A worker that ends by itself before it is ready, three times in a row, cannot start; nor can one go
on that ends three times in a row while it catches up with its predecessor. One that is killed from
outside (SIGKILL) says nothing about whether it could: it is started again, if it was not ready yet
from the second time on after such pauses too. That counts towards the limit of restarts, and is
nothing else.

A worker that waits for a lock which was held when it was forked cannot be helped by another from
the same nursery, and no sample is to blame. After two of them the nursery is made anew (`Renew`),
from the trainer as it is then. It is not done for ever: the lock may be one that is always held.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from holdfast.engine.seats import Seat
from holdfast.engine.vocabulary import (
    Action,
    Convict,
    Exit,
    Limits,
    Poisoned,
    Renew,
    RestartPolicy,
    Separate,
    Task,
    Trial,
)

__all__ = ["Restarts", "loading"]

ACQUITTALS: Final = 3  # trials of samples of one batch that prove nothing, before it is given up
CLOSE: Final = 40  # a death is telling if the pause before was so many times as long,
TELLING: Final = 3  # and so many of them in a row convict
LONGEST_TRIAL: Final = 6  # deaths in one trial that prove nothing, before it is dropped
FIRST_WAIT: Final = 1.5  # seconds to wait before a sample that may be innocent is loaded alone;
WIDE: Final = 3 * CLOSE  # from the second time on so many times as long as it took to kill,
LONGEST_WAIT: Final = 10.0  # but no longer
REMEMBERED: Final = 100  # deaths kept for the story when there is no limit
REMEMBERED_STRIKES: Final = 10  # deaths in a row at one sample that are kept
INHERITED: Final = 2  # stalls on a lock that was held at the fork, before there is another fork,
RENEWALS: Final = 3  # and how often that is done

Conclusion = tuple[list[Action], Poisoned | None]
"""What is to be done, and what stands for the batch that is given up, if one is."""


class Restarts:
    """The deaths of one pool, and what is concluded from them."""

    def __init__(
        self,
        seats: Sequence[Seat],
        policy: RestartPolicy,
        limits: Limits,
        *,
        iterable: bool,
        leaves_out: bool,
    ) -> None:
        """`leaves_out` if there is a policy for bad samples, so that a batch can do without one."""
        self.policy = policy
        self.limits = limits
        self.leaves_out = leaves_out
        self.counted: deque[Exit] = deque()
        """Those that count towards the limit."""
        self.renewals = 0  # of the nursery
        self._seats = seats
        self._iterable = iterable
        self._inherited = 0  # stalls on a lock that was held at the fork, since the last of these
        self._dice = random.Random(0)  # for pauses that no rhythm of kills can follow

    # -- starts ---------------------------------------------------------------------------

    def cannot_go_on(self, seat: Seat, exit: Exit, was_ready: bool) -> str | None:
        """One more death before it could do anything: why that is enough to give it up, if so."""
        if exit.from_outside:
            seat.killed_starts += not was_ready
        elif not was_ready:
            seat.failed_starts += 1
            if seat.failed_starts >= self.limits.failed_starts:
                return "cannot-start"
        elif exit.catching_up:
            seat.failed_catching_up += 1
            if seat.failed_catching_up >= self.limits.failed_starts:
                return "cannot-catch-up"
        return None

    def may_restart(self, seat: Seat, exit: Exit, conclusions: Sequence[Action]) -> bool:
        """Count this death, if it counts; whether that is within the limit."""
        if self._is_spared(seat, exit, conclusions):
            return True
        self.counted.append(exit)
        self._forget_old()
        return self.policy.intensity is None or len(self.counted) <= self.policy.intensity

    def _forget_old(self) -> None:
        """Of those that count, the ones that no longer do."""
        counted, policy = self.counted, self.policy
        if policy.intensity is None:
            while len(counted) > REMEMBERED:
                counted.popleft()
            return
        while counted and counted[0].at < counted[-1].at - policy.period:
            counted.popleft()

    def _is_spared(self, seat: Seat, exit: Exit, conclusions: Sequence[Action]) -> bool:
        """Whether this death does not count as a restart: it has convicted a sample that is left
        out, or may yet do so (and is counted when that sample is acquitted)."""
        if not self.leaves_out:
            return False
        if any(isinstance(one, Convict) for one in conclusions):
            return True
        trial = seat.trial
        on_trial = trial is not None and (exit in trial.before or exit in trial.alone)
        return on_trial and not exit.unproven

    # -- blame ----------------------------------------------------------------------------

    def conclude(self, seat: Seat, exit: Exit) -> Conclusion:
        """What this death says of a sample, or of the nursery."""
        if exit.inherited and (seat.renewals < self.renewals or exit.with_nursery):
            return [], None  # it came from a nursery that has been replaced since, or has died too
        if exit.inherited and self.renewals < RENEWALS:
            return self._count_inherited(), None
        sample, trial = _blamed(seat, exit), seat.trial
        if trial is None:
            return self._strike(seat, sample, exit)
        if sample == (trial.task.number, trial.sample):
            return self._judge(seat, trial, exit)
        if exit.unproven and all(one.unproven for one in trial.before):
            self._dismiss(seat, trial)  # it takes no sample to be killed here
        return [], None

    def _count_inherited(self) -> list[Action]:
        self._inherited += 1
        if self._inherited < INHERITED:
            return []
        self._inherited = 0
        self.renewals += 1
        for one in self._seats:
            one.stalls = 0
        return [Renew()]

    def _strike(self, seat: Seat, sample: tuple[int, int | None] | None, exit: Exit) -> Conclusion:
        """Suspect the sample in flight; try it when there is reason enough to."""
        head = seat.head
        if sample is None or head is None:
            return [], None
        if sample != seat.victim:
            seat.victim = sample
            seat.strikes.clear()
        seat.strikes.append(exit)
        del seat.strikes[:-REMEMBERED_STRIKES]
        position = sample[1]
        unproven = all(one.unproven for one in seat.strikes)
        suspect = len(seat.strikes) >= (2 if unproven else 1)
        if not self._iterable and head.acquittals + unproven * head.dismissals < ACQUITTALS:
            if not suspect:
                return [], None
            if self.leaves_out and position is None and not head.apart:
                head.apart = True
                seat.absolve()
                return [Separate(head)], None
            if position is not None or not self.leaves_out:
                trial = Trial(head, position, tuple(seat.strikes))
                self._let_wait(trial)
                seat.items.appendleft(trial)
                return [], None
        own = sum(not one.from_outside for one in seat.strikes)
        if own >= 2 or own + sum(one.for_memory for one in seat.strikes) >= 3:
            return [], _poisoned(head, position, tuple(seat.strikes))
        return [], None

    # -- trials ---------------------------------------------------------------------------

    def _judge(self, seat: Seat, trial: Trial, exit: Exit) -> Conclusion:
        """A sample has ended its worker alone: guilty, unless that may have come from outside."""
        trial.alone.append(exit)
        trial.pauses.append(trial.pause)
        telling = exit.seconds is not None and exit.seconds * CLOSE <= trial.base
        trial.telling = trial.telling + 1 if telling else 0
        by_memory = sum(one.for_memory for one in trial.alone)
        if exit.from_outside and by_memory < 2 and trial.telling < TELLING:
            if len(trial.alone) >= LONGEST_TRIAL:
                self._dismiss(seat, trial)
            else:
                self._let_wait(trial)
            return [], None
        seat.items.popleft()
        seat.absolve()
        deaths = (*trial.before, *trial.alone)
        if not self.leaves_out:
            found = _poisoned(trial.task, trial.sample, deaths)
            return [], replace(found, alone=len(trial.alone), pauses=tuple(trial.pauses))
        self.counted = deque(one for one in self.counted if one not in deaths)
        assert trial.sample is not None, "taken apart before"
        return [Convict(seat.id, trial.task, trial.sample, deaths)], None

    def _let_wait(self, trial: Trial) -> None:
        """How long the worker waits before it loads the sample on trial; see the module's text."""
        if not all(one.unproven for one in trial.before):
            return  # it is not suspected for having been killed
        longest = max((one.seconds or 0.0 for one in trial.alone), default=0.0)
        trial.base = min(LONGEST_WAIT, max(FIRST_WAIT, WIDE * longest))
        trial.pause = trial.base * (1 + self._dice.random())

    def acquit(self, seat: Seat) -> None:
        """The sample on trial did not end its worker."""
        trial = seat.trial
        assert trial is not None, seat.items
        trial.task.acquittals += 1
        self._end_trial(seat, trial)

    def _dismiss(self, seat: Seat, trial: Trial) -> None:
        """Nothing can be found out about this sample."""
        trial.task.dismissals += 1
        self._end_trial(seat, trial)

    def _end_trial(self, seat: Seat, trial: Trial) -> None:
        seat.items.popleft()
        stalls = seat.stalls
        seat.absolve()
        seat.stalls = stalls  # a sample that has taken long alone will take as long in its batch
        if self.leaves_out:
            spared = [one for one in (*trial.before, *trial.alone) if not one.unproven]
            # In the order of time: whatever has expired is looked for at the front.
            self.counted = deque(sorted((*self.counted, *spared), key=lambda one: one.at))
            self._forget_old()


def loading(seat: Seat, exit: Exit) -> bool:
    """Whether a sample of the task it had to answer next was being loaded."""
    head = seat.head
    return head is not None and exit.task == head.number and exit.step == "fetch"


def _blamed(seat: Seat, exit: Exit) -> tuple[int, int | None] | None:
    """Number of the task and position of the sample that was being loaded, if it may be to blame:
    a worker that went with its nursery has not died of it."""
    if not loading(seat, exit) or (exit.kind == "killed" and exit.signal is None):
        return None
    assert exit.task is not None
    return exit.task, exit.position


def _poisoned(task: Task, sample: int | None, deaths: tuple[Exit, ...]) -> Poisoned:
    return Poisoned(task, sample, deaths, task.acquittals)
