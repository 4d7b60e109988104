"""Pool, supervisor and machine over fake workers: what takes minutes with processes, in microseconds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine import events as ev
from holdfast.engine.machine import Machine
from holdfast.engine.pool import TimedOut
from holdfast.engine.supervisor import Supervisor
from holdfast.errors import LoaderClosed
from holdfast.limits.budget import Budget
from tests.support.fake_driver import Consumer, FakeDriver

LIMITS = ev.Limits()


# -- the order of things --------------------------------------------------------------------


class Scripted(Machine):
    """Answers as the test says, and writes down what it hears."""

    def __init__(self, decisions: dict[ev.Event, Sequence[ev.Action]], log: list[Any]) -> None:
        super().__init__(workers=2, prefetch=1, restarts=ev.RestartPolicy(None, 60.0))
        self.decisions, self.log = decisions, log

    def handle(self, event: ev.Event) -> Sequence[ev.Action]:
        self.log.append(event)
        return self.decisions.get(event, ())


class Noted(FakeDriver):
    """Writes down what it is asked for; a kill is interrupted, a rehearsal cannot begin."""

    def __init__(self, log: list[Any]) -> None:
        super().__init__()
        self.log = log

    def start(self, order: ev.Start) -> None:
        self.log.append(order)

    def rehearse(self, order: ev.Rehearse) -> None:
        self.log.append(order)
        self.supervisor.tell(FAILED)

    def urge(self, worker: int, kind: Any, content: object = None) -> bool:
        self.log.append((worker, kind))
        return True

    def kill(self, worker: int, generation: int) -> None:
        raise KeyboardInterrupt


FAILED = ev.Rehearsed(0, 0, None)
REHEARSE = ev.Rehearse(0, 0, 0, 0, 0, False, frozenset())
GROWN = ev.WorkerGrown(0, 0)
START = ev.Start(1, 3, 0, 0, 0, False)


@pytest.fixture
def scripted() -> Iterator[Callable[..., tuple[Supervisor, list[Any]]]]:
    """Makes a supervisor whose machine makes these decisions, and the list of what happens."""
    with contextlib.ExitStack() as opened:

        def make(decisions: dict[ev.Event, Sequence[ev.Action]]) -> tuple[Supervisor, list[Any]]:
            log: list[Any] = []
            machine = Scripted(decisions, log)
            consumer = opened.enter_context(Consumer(Noted(log), machine=machine))
            log.clear()
            return consumer.pool.supervisor, log

        yield make


Script = Callable[[dict[ev.Event, Sequence[ev.Action]]], tuple[Supervisor, list[Any]]]


def test_the_machine_hears_of_what_actions_cause_when_all_of_them_have_been_carried_out(
    scripted: Script,
) -> None:
    supervisor, log = scripted({GROWN: [REHEARSE, START], FAILED: [ev.Ask(0, 0)]})
    supervisor.tell(GROWN)
    assert log == [GROWN, REHEARSE, START, FAILED, (0, "ask")]


def test_what_was_interrupted_is_not_gone_on_with(scripted: Script) -> None:
    stalled = ev.WorkerStalled(0, 0, 1.0)
    supervisor, log = scripted({GROWN: [REHEARSE, ev.Kill(0, 0), START], stalled: [ev.Ask(0, 0)]})
    with pytest.raises(KeyboardInterrupt):
        supervisor.tell(GROWN)
    supervisor.tell(stalled)
    assert log == [GROWN, REHEARSE, stalled, (0, "ask")]


def test_what_is_told_together_is_decided_when_all_is_known(scripted: Script) -> None:
    """As when a nursery is lost with its workers: all have been read before one is replaced."""
    exits = [ev.WorkerExited(worker, 0, ev.Exit(1.0)) for worker in range(2)]
    supervisor, log = scripted({exits[0]: [START], exits[1]: [ev.Ask(1, 0)]})
    with supervisor.together():
        for one in exits:
            supervisor.tell(one)
        assert log == []
    assert log == [exits[0], START, exits[1], (1, "ask")]


# -- through pool and machine ---------------------------------------------------------------


@given(
    workers=st.integers(1, 4),
    prefetch=st.integers(1, 3),
    length=st.integers(0, 20),
    in_order=st.booleans(),
    room=st.none() | st.integers(1, 6),
    blows=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3)), max_size=6),
)
def test_whatever_is_killed_every_batch_comes_once(
    workers: int,
    prefetch: int,
    length: int,
    in_order: bool,
    room: int | None,
    blows: list[tuple[int, int]],
) -> None:
    driver = FakeDriver()
    with Consumer(driver, workers, prefetch, in_order=in_order, budget=Budget(room)) as consumer:
        consumer.begin(length)
        found = []
        while isinstance(taken := consumer.next(), ev.Delivery):
            for _, worker in [blow for blow in blows if blow[0] == len(found)]:
                if worker in driver.living:
                    driver.strike(worker)
            found.append(taken.result.unpack()[1])
        assert taken is ev.END
        assert consumer.machine.in_flight == 0
    assert found == list(range(length)) if in_order else sorted(found) == list(range(length))


STALL = 5.0  # seconds; workers are looked at ten times in that time


def test_one_that_hangs_is_dumped_killed_and_left_behind_each_at_its_time() -> None:
    driver = FakeDriver(hangs={2}, deaf=True, immortal=True)
    with Consumer(driver, stall_timeout=STALL) as consumer:
        consumer.begin(8)
        assert [index for _, index in consumer.rest()] == list(range(8))
        assert consumer.told == ["replaced; the sample is tried alone"]
        assert consumer.incidents[0].kind == "unkillable"
    (at, *_), *_ = ends = driver.done[2:]
    assert 0 < at - driver.boot - driver.each - STALL <= 3 * STALL / 10
    kill, abandon = at + LIMITS.kill_after, at + LIMITS.kill_after + LIMITS.abandon_after
    soon = {"abs": 0.02}
    assert ends == [
        (at, "dump", 0),
        (pytest.approx(kill, **soon), "kill", 0),
        (pytest.approx(abandon, **soon), "abandon", 0),
        (pytest.approx(abandon, **soon), "start", 0),
    ]


def test_one_that_cannot_be_killed_is_left_behind_when_it_has_had_time_for_its_stack() -> None:
    driver = FakeDriver(hangs={2}, deaf=True, limits=ev.Limits(killable=False))
    with Consumer(driver, stall_timeout=STALL) as consumer:
        consumer.begin(8)
        assert [index for _, index in consumer.rest()] == list(range(8))
    (dumped, *_), (left, *_), _ = driver.done[2:]
    assert [what for _, what, _ in driver.done[2:]] == ["dump", "abandon", "start"]
    assert left - dumped == pytest.approx(LIMITS.kill_after, abs=0.02)


def test_one_that_hears_the_dump_is_replaced_at_once() -> None:
    driver = FakeDriver(hangs={2})
    with Consumer(driver, stall_timeout=STALL) as consumer:
        consumer.begin(8)
        assert len(consumer.rest()) == 8
    assert [what for _, what, _ in driver.done] == ["start", "start", "dump", "start"]


def test_without_a_stall_timeout_next_waits_until_its_own() -> None:
    driver = FakeDriver(hangs={0})
    with Consumer(driver, stall_timeout=None) as consumer:
        consumer.begin(8)
        with pytest.raises(TimedOut):
            consumer.pool.next(consumer._draw, 3600.0)
    assert driver.now == pytest.approx(3600.0 + driver.boot + driver.each, abs=1.0)
    assert driver.done == [(0.0, "start", 0), (0.0, "start", 1)]


def test_a_slow_worker_that_shows_progress_is_left_alone() -> None:
    driver = FakeDriver(each=STALL - 0.1)
    with Consumer(driver, stall_timeout=STALL) as consumer:
        consumer.begin(8)
        assert len(consumer.rest()) == 8
    assert [what for _, what, _ in driver.done] == ["start", "start"]


def test_starts_that_find_no_room_are_tried_after_pauses_and_told_once() -> None:
    driver = FakeDriver()
    with Consumer(driver) as consumer:
        consumer.begin(12)
        consumer.next()
        driver.no_room = 4
        struck = driver.now
        driver.strike(0)
        assert len(consumer.rest()) == 11
        assert consumer.told == [
            "replaced; its batch is made again",
            "tried again, after longer and longer pauses",
        ]
    starts = [at - struck for at, what, worker in driver.done if (what, worker) == ("start", 0)]
    assert starts[1:] == pytest.approx([0.0, 0.1, 0.3, 0.7, 1.5], abs=0.02)


def test_when_there_is_never_room_the_limit_ends_it() -> None:
    driver = FakeDriver(limits=ev.Limits(tries=3, first_pause=1.0))
    with Consumer(driver) as consumer:
        consumer.begin(12)
        driver.no_room = 100
        driver.strike(0)
        while isinstance(taken := consumer.next(), ev.Delivery):
            pass
    assert isinstance(taken, ev.GaveUp)
    assert (taken.reason, len(taken.deaths)) == ("shortage", 3)
    assert driver.now == pytest.approx(taken.deaths[-1].at)


def test_a_batch_that_kills_alone_too_is_given_up_and_the_rest_comes() -> None:
    driver = FakeDriver(kills={3})
    with Consumer(driver) as consumer:
        consumer.begin(8)
        found = consumer.rest()
        assert consumer.told == [
            "replaced; the sample is tried alone",
            "replaced; the sample is given up",
        ]
    assert isinstance(found[3], ev.Poisoned)
    assert [one[1] for one in found if not isinstance(one, ev.Poisoned)] == [0, 1, 2, 4, 5, 6, 7]


def test_more_deaths_than_allowed_end_it() -> None:
    driver = FakeDriver()
    with Consumer(driver, restarts=ev.RestartPolicy(1, 60.0)) as consumer:
        consumer.begin(20)
        for _ in range(2):
            assert isinstance(consumer.next(), ev.Delivery)
            driver.strike(0)
        while isinstance(taken := consumer.next(), ev.Delivery):
            pass
        assert consumer.told[-1] == "gave up"
        assert consumer.pool.stats.restarts == 1
    assert isinstance(taken, ev.GaveUp)
    assert taken.reason == "restart-limit"


@pytest.mark.parametrize(
    ("policy", "each", "deaths"),
    [
        pytest.param(ev.RestartPolicy(1, 60.0), 61.0, 4, id="one at a time, far apart"),
        pytest.param(ev.RestartPolicy(None, 60.0), 0.1, 30, id="without a limit"),
    ],
)
def test_deaths_that_the_limit_does_not_forbid_end_nothing(
    policy: ev.RestartPolicy, each: float, deaths: int
) -> None:
    driver = FakeDriver(each=each)
    with Consumer(driver, workers=1, restarts=policy, stall_timeout=None) as consumer:
        consumer.begin(deaths + 2)
        for _ in range(deaths):
            assert isinstance(consumer.next(), ev.Delivery)
            driver.strike(0)
        assert len(consumer.rest()) == 2
        assert consumer.pool.stats.restarts == deaths


def test_one_that_is_too_large_is_replaced_and_nothing_is_told() -> None:
    driver = FakeDriver()
    with Consumer(driver) as consumer:
        consumer.begin(10)
        consumer.next()
        driver.retire(1)
        assert len(consumer.rest()) == 9
        assert consumer.told == []
        assert consumer.pool.stats.recycled == 1
    assert [what for _, what, worker in driver.done if worker == 1] == ["start", "start"]


def test_an_epoch_that_is_broken_off_is_finished_before_the_next_and_dropped() -> None:
    driver = FakeDriver()
    with Consumer(driver, persistent=True) as consumer:
        consumer.begin(10)
        consumer.next()
        driver.strike(1)
        consumer.begin(6, again=True)
        assert consumer.rest() == [(1, index) for index in range(6)]
        assert consumer.machine.in_flight == 0


def test_two_pools_with_one_budget_have_no_more_in_flight_than_it_allows() -> None:
    budget = Budget(5)
    drivers = [FakeDriver(each=0.1), FakeDriver(each=0.17)]
    with contextlib.ExitStack() as opened:
        consumers = [
            opened.enter_context(Consumer(one, 2, 4, budget=budget, largest=1)) for one in drivers
        ]
        for consumer in consumers:
            consumer.begin(30)
        found: list[list[int]] = [[], []]
        most = 0
        for _ in range(30):
            for consumer, mine in zip(consumers, found, strict=True):
                taken = consumer.next()
                assert isinstance(taken, ev.Delivery)
                mine.append(taken.result.unpack()[1])
                most = max(most, budget.in_flight)
    assert found == [list(range(30))] * 2
    assert 3 <= most <= 5


def test_a_slow_worker_holds_up_those_behind_it_only_where_order_is_kept() -> None:
    for in_order in (True, False):
        driver = FakeDriver(slow={0: 10.0})
        with Consumer(driver, in_order=in_order, stall_timeout=None) as consumer:
            consumer.begin(20)
            for _ in range(5):
                consumer.next()
        assert (driver.now > 10.0) is in_order


def test_a_death_between_two_batches_is_handled_without_the_consumer() -> None:
    """As the background thread does, during a long training step."""
    driver = FakeDriver()
    with Consumer(driver) as consumer:
        consumer.begin(20)
        consumer.next()
        driver.no_room = 1
        driver.strike(0)
        began = driver.now
        while (wait := consumer.pool.service()) is not None and 0 not in driver.living:
            driver.now += wait
        assert driver.now - began == pytest.approx(LIMITS.first_pause)
        assert len(consumer.rest()) == 19


def test_a_pool_that_is_dismissed_is_not_served_any_more() -> None:
    with Consumer(FakeDriver()) as consumer:
        consumer.begin(20)
        consumer.next()
        consumer.pool.background.dismiss()
        assert consumer.pool.service() is None
        with pytest.raises(LoaderClosed):
            consumer.next()
