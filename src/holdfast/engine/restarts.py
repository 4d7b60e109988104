"""What follows from an exit: for a sample, for the nursery, and for another start.

**Samples of map-style data.** A sample that was being loaded when its worker died is *suspected*,
and is not blamed without an *isolation test*: the next process in that seat first loads the sample
alone. If that process dies of it too, the sample is to blame. With a policy for bad samples it is
left out (`BanSample`) and the batch is made again. Without one, the batch is given up (`Poisoned`).
If the process survives, the batch is made again with the sample in it. How many deaths it takes
depends on what is known about them:

- The worker ended by its own doing (a crash, an exit, a stall, a signal it sent to itself): one
  death in the batch raises the suspicion, and one alone proves it.
- It was killed (SIGKILL) while memory was short: one in the batch, and two alone.
- It was killed, and nothing shows by which process: two in the batch, and then three alone, in a
  row, *each shortly after a pause of random length*. Workers may be killed from outside, at any
  rate, and then whatever is being loaded at that moment is suspected. How often that happens proves
  nothing. So the worker pauses before it loads the sample, for a random time that is at least
  `PAUSE_FACTOR` times as long as the sample then takes to kill it. A kill that is unrelated to the
  sample most probably falls into the pause. It falls into the short time after the pause with a
  probability of 1 / `PAUSE_FACTOR` at most, whatever the rate and the rhythm of the kills. A worker
  that is killed during the pause shows that no sample is needed for that, and the suspicion is
  dropped.

All other deaths only count as restarts. Without evidence no sample is blamed, and `max_restarts`
ends the run. With a policy for bad samples, deaths that prove a sample bad do not count as
restarts: another limit says how many samples may be bad.

**Elements of a stream** cannot be loaded alone. There it takes two deaths in a row that were the
worker's own doing, or three of which some were kills for lack of memory. An element that kills its
worker without a trace is not blamed: `max_restarts` ends the run, and the error names the element
if all deaths were at the same one.

**Starts.** A start that fails because a resource is exhausted (processes, memory, descriptors) is
no death: the resource may be available again in a moment. It is repeated after a pause, while the
other workers go on. Each pause is twice as long as the one before, up to a limit. After about half
a minute the run fails, with an error that lists all tries.

A worker that ends by its own doing three times in a row before it is ready cannot start. The same
holds for one that ends three times in a row before it has reached the state of its predecessor. A
kill from outside proves neither: the worker is started again, and the kill counts as a restart. If
the worker was not ready, there are pauses as above from the second kill on.

**Locks.** If a worker waits for a lock that was held when it was forked, another process from the
same nursery (the process that forks the workers) would wait for it too, and no sample is to blame.
After two such stalls the nursery is replaced (`RenewNursery`) by a new fork of the trainer. That is
done a few times only, because the trainer may hold that lock all the time.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from holdfast.engine import events as ev
from holdfast.engine.seats import Seat

MAX_TESTS_PER_BATCH: Final = 3  # isolation tests without a result, before a batch is given up
PAUSE_FACTOR: Final = 40  # a kill is *prompt* if the pause was this many times as long as it took
PROMPT_KILLS_NEEDED: Final = 3  # in a row, to blame the sample
MAX_KILLS_PER_TEST: Final = 6  # without a result, before the test is dropped
FIRST_PAUSE_SECONDS: Final = 1.5  # before an isolation test, if the sample may not be to blame
NEXT_PAUSE_FACTOR: Final = 3 * PAUSE_FACTOR  # later pauses are this many times the time to the kill
KEPT_EXITS: Final = 100  # exits kept for the error message, if there is no limit of restarts
KEPT_SUSPECT_EXITS: Final = 10  # exits in a row at one sample that are kept
STALLS_BEFORE_RENEWAL: Final = 2  # on a lock that was held at the fork
MAX_RENEWALS: Final = 3  # of the nursery

Conclusion = tuple[list[ev.Action], ev.Poisoned | None]
"""What to do, and the result of the batch that is given up, if one is."""


class Restarts:
    """Counts the exits of one pool and draws the conclusions."""

    def __init__(
        self,
        seats: Sequence[Seat],
        policy: ev.RestartPolicy,
        limits: ev.Limits,
        *,
        iterable: bool,
        leaves_out: bool,
    ) -> None:
        """`leaves_out`: there is a policy for bad samples, so a batch can be made without one."""
        self.policy = policy
        self.limits = limits
        self.leaves_out = leaves_out
        self.counted: deque[ev.Exit] = deque()
        """Exits that count towards the limit, oldest first."""
        self.renewals = 0  # of the nursery
        self._seats = seats
        self._iterable = iterable
        self._inherited_stalls = 0  # on a lock that was held at the fork, since the last renewal
        self._random = random.Random(0)  # for pauses that are independent of the rhythm of kills

    # -- starts ---------------------------------------------------------------------------

    def reason_to_give_up(self, seat: Seat, exit: ev.Exit, was_ready: bool) -> str | None:
        """Count a death before the worker was ready or had caught up. Returns a reason if these are
        too many, or too many workers have been abandoned."""
        if self.limits.stuck is not None and exit.stuck > self.limits.stuck:
            return "stuck"
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

    def may_restart(self, seat: Seat, exit: ev.Exit, conclusions: Sequence[ev.Action]) -> bool:
        """Count this death, if it counts as a restart. Returns whether the limit is kept."""
        if self._is_not_counted(seat, exit, conclusions):
            return True
        self.counted.append(exit)
        self._drop_expired()
        return self.policy.intensity is None or len(self.counted) <= self.policy.intensity

    def _drop_expired(self) -> None:
        """Drop the exits that no longer count."""
        counted, policy = self.counted, self.policy
        if policy.intensity is None:
            while len(counted) > KEPT_EXITS:
                counted.popleft()
            return
        while counted and counted[0].at < counted[-1].at - policy.period:
            counted.popleft()

    def _is_not_counted(self, seat: Seat, exit: ev.Exit, conclusions: Sequence[ev.Action]) -> bool:
        """Whether this death does not count as a restart: it has proved a sample bad that is left
        out, or may still do so. (If it does not, `_end_test` counts it.)"""
        if not self.leaves_out:
            return False
        if any(isinstance(one, ev.BanSample) for one in conclusions):
            return True
        test = seat.isolation_test
        tested = test is not None and (exit in test.before or exit in test.alone)
        return tested and not exit.unproven

    # -- blame ----------------------------------------------------------------------------

    def conclude(self, seat: Seat, exit: ev.Exit) -> Conclusion:
        """What follows from this death for a sample, or for the nursery."""
        if exit.inherited and (seat.renewals < self.renewals or exit.with_nursery):
            return [], None  # its nursery has been replaced since, or died too
        if exit.inherited and self.renewals < MAX_RENEWALS:
            return self._count_inherited_stall(), None
        sample, test = _suspected(seat, exit), seat.isolation_test
        if test is None:
            return self._suspect(seat, sample, exit)
        if sample == (test.task.number, test.sample):
            return self._died_in_test(seat, test, exit)
        if exit.unproven and all(one.unproven for one in test.before):
            self._drop_test(seat, test)  # it was killed although it loaded no sample
        return [], None

    def _count_inherited_stall(self) -> list[ev.Action]:
        self._inherited_stalls += 1
        if self._inherited_stalls < STALLS_BEFORE_RENEWAL:
            return []
        self._inherited_stalls = 0
        self.renewals += 1
        for one in self._seats:
            one.stalls = 0
        return [ev.RenewNursery()]

    def _suspect(
        self, seat: Seat, sample: tuple[int, int | None] | None, exit: ev.Exit
    ) -> Conclusion:
        """Suspect the sample that was being loaded, and test it if there is reason enough."""
        head = seat.head
        if sample is None or head is None:
            return [], None
        if sample != seat.suspect:
            seat.suspect = sample
            seat.suspect_exits.clear()
        seat.suspect_exits.append(exit)
        del seat.suspect_exits[:-KEPT_SUSPECT_EXITS]
        position = sample[1]
        unproven = all(one.unproven for one in seat.suspect_exits)
        enough = len(seat.suspect_exits) >= (2 if unproven else 1)
        tests = head.tests_passed + (head.tests_dropped if unproven else 0)
        if not self._iterable and tests < MAX_TESTS_PER_BATCH:
            if not enough:
                return [], None
            if self.leaves_out and position is None and not head.apart:
                head.apart = True
                seat.clear_suspicion()
                return [ev.LoadSeparately(head)], None
            if position is not None or not self.leaves_out:
                test = ev.IsolationTest(head, position, tuple(seat.suspect_exits))
                self._choose_pause(test)
                seat.items.appendleft(test)
                return [], None
        own = sum(not one.from_outside for one in seat.suspect_exits)
        if own >= 2 or own + sum(one.for_memory for one in seat.suspect_exits) >= 3:
            return [], _poisoned(head, position, tuple(seat.suspect_exits))
        return [], None

    # -- isolation tests ------------------------------------------------------------------

    def _died_in_test(self, seat: Seat, test: ev.IsolationTest, exit: ev.Exit) -> Conclusion:
        """The sample is to blame, unless its worker may have been killed from outside."""
        test.alone.append(exit)
        test.pauses.append(test.pause)
        prompt = exit.seconds is not None and exit.seconds * PAUSE_FACTOR <= test.base
        test.prompt_kills = test.prompt_kills + 1 if prompt else 0
        for_memory = sum(one.for_memory for one in test.alone)
        if exit.from_outside and for_memory < 2 and test.prompt_kills < PROMPT_KILLS_NEEDED:
            if len(test.alone) >= MAX_KILLS_PER_TEST:
                self._drop_test(seat, test)
            else:
                self._choose_pause(test)
            return [], None
        seat.items.popleft()
        seat.clear_suspicion()
        deaths = (*test.before, *test.alone)
        if not self.leaves_out:
            found = _poisoned(test.task, test.sample, deaths)
            return [], replace(found, alone=len(test.alone), pauses=tuple(test.pauses))
        self.counted = deque(one for one in self.counted if one not in deaths)
        assert test.sample is not None, "a batch is loaded sample by sample before it is tested"
        return [ev.BanSample(seat.id, test.task, test.sample, deaths)], None

    def _choose_pause(self, test: ev.IsolationTest) -> None:
        """How long the worker pauses before it loads the sample; see the module's text."""
        if not all(one.unproven for one in test.before):
            return  # there is other evidence than a kill
        longest = max((one.seconds or 0.0 for one in test.alone), default=0.0)
        pause = max(FIRST_PAUSE_SECONDS, NEXT_PAUSE_FACTOR * longest)
        test.base = min(self.limits.longest_test_pause, pause)
        test.pause = test.base * (1 + self._random.random())

    def survived(self, seat: Seat) -> None:
        """The sample did not end the worker that loaded it alone."""
        test = seat.isolation_test
        assert test is not None, seat.items
        test.task.tests_passed += 1
        self._end_test(seat, test)

    def _drop_test(self, seat: Seat, test: ev.IsolationTest) -> None:
        """Nothing can be found out about this sample."""
        test.task.tests_dropped += 1
        self._end_test(seat, test)

    def _end_test(self, seat: Seat, test: ev.IsolationTest) -> None:
        seat.items.popleft()
        stalls = seat.stalls
        seat.clear_suspicion()
        seat.stalls = stalls  # a sample that was slow alone will be as slow in its batch
        if self.leaves_out:
            uncounted = [one for one in (*test.before, *test.alone) if not one.unproven]
            # In the order of time, because `_drop_expired` looks at the front only.
            self.counted = deque(sorted((*self.counted, *uncounted), key=lambda one: one.at))
            self._drop_expired()


def is_loading(seat: Seat, exit: ev.Exit) -> bool:
    """Whether a sample of the task that the worker had to answer next was being loaded."""
    head = seat.head
    return head is not None and exit.task == head.number and exit.step == "fetch"


def _suspected(seat: Seat, exit: ev.Exit) -> tuple[int, int | None] | None:
    """The task's number and the position of the sample that was being loaded, if it may be to
    blame. The death of a nursery is no sample's fault."""
    if not is_loading(seat, exit):
        return None
    if exit.kind == "killed" and exit.signal is None and not exit.unexplained:
        return None
    assert exit.task is not None
    return exit.task, exit.position


def _poisoned(task: ev.Task, sample: int | None, deaths: tuple[ev.Exit, ...]) -> ev.Poisoned:
    return ev.Poisoned(task, sample, deaths, task.tests_passed)
