"""Supervisor and machine over fake workers: what takes minutes with processes, in microseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine import vocabulary as v
from holdfast.engine.epoch import Epoch
from holdfast.engine.machine import Machine
from holdfast.engine.supervisor import Supervisor
from holdfast.memory.budget import Budget, Share
from tests.support.fake_driver import FakeDriver, supervised

LIMITS = v.Limits()


# -- the order of things --------------------------------------------------------------------


class Scripted(Machine):
    """Answers as the test says, and writes down what it hears."""

    def __init__(self, decisions: dict[v.Event, Sequence[v.Action]], log: list[Any]) -> None:
        super().__init__(workers=2, prefetch=1, restarts=v.RestartPolicy(None, 60.0))
        self.decisions, self.log = decisions, log

    def handle(self, event: v.Event) -> Sequence[v.Action]:
        self.log.append(event)
        return self.decisions.get(event, ())


class Noted(FakeDriver):
    """Writes down what it is asked for; a kill is interrupted, a rehearsal cannot begin."""

    def __init__(self, log: list[Any]) -> None:
        super().__init__()
        self.log = log

    def start(self, order: v.Start) -> None:
        self.log.append(order)

    def rehearse(self, order: v.Rehearse) -> None:
        self.log.append(order)
        self.supervisor.tell(FAILED)

    def urge(self, worker: int, kind: Any, content: object = None) -> None:
        self.log.append((worker, kind))

    def kill(self, worker: int, generation: int) -> None:
        raise KeyboardInterrupt


FAILED = v.Rehearsed(0, 0, None)
REHEARSE = v.Rehearse(0, 0, 0, 0, 0, False, frozenset())
GROWN = v.WorkerGrown(0, 0)
START = v.Start(1, 3, 0, 0, 0, False)


def scripted(decisions: dict[v.Event, Sequence[v.Action]]) -> tuple[Supervisor, list[Any]]:
    log: list[Any] = []
    driver = Noted(log)
    machine = Scripted(decisions, log)
    driver.supervisor = Supervisor(machine, Share(), Epoch(None), driver)
    return driver.supervisor, log


def test_the_machine_hears_of_what_actions_cause_when_all_of_them_have_been_carried_out() -> None:
    supervisor, log = scripted({GROWN: [REHEARSE, START], FAILED: [v.Ask(0, 0)]})
    supervisor.tell(GROWN)
    assert log == [GROWN, REHEARSE, START, FAILED, (0, "ask")]


def test_what_was_interrupted_is_not_gone_on_with() -> None:
    stalled = v.WorkerStalled(0, 0, 1.0)
    supervisor, log = scripted({GROWN: [REHEARSE, v.Kill(0, 0), START], stalled: [v.Ask(0, 0)]})
    with pytest.raises(KeyboardInterrupt):
        supervisor.tell(GROWN)
    supervisor.tell(stalled)
    assert log == [GROWN, REHEARSE, stalled, (0, "ask")]


def test_what_is_told_together_is_decided_when_all_is_known() -> None:
    """As when a nursery is lost with its workers: all have been read before one is replaced."""
    exits = [v.WorkerExited(worker, 0, v.Exit(1.0)) for worker in range(2)]
    supervisor, log = scripted({exits[0]: [START], exits[1]: [v.Ask(1, 0)]})
    with supervisor.together():
        for one in exits:
            supervisor.tell(one)
        assert log == []
    assert log == [exits[0], START, exits[1], (1, "ask")]


# -- through the machine --------------------------------------------------------------------


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
    consumer = supervised(driver, workers, prefetch, in_order=in_order, budget=Budget(room))
    consumer.begin(length)
    found = []
    while isinstance(taken := consumer.next(), v.Delivery):
        for _, worker in [blow for blow in blows if blow[0] == len(found)]:
            if worker in driver.living:
                driver.strike(worker)
        found.append(taken.result[1])
    assert taken is v.END
    assert found == list(range(length)) if in_order else sorted(found) == list(range(length))
    assert consumer.supervisor.machine.in_flight == 0


def test_one_that_hangs_is_dumped_killed_and_left_behind_each_at_its_time() -> None:
    driver = FakeDriver(hangs={2}, deaf=True, immortal=True)
    consumer = supervised(driver)
    consumer.begin(8)
    assert [index for _, index in consumer.rest()] == list(range(8))
    began = driver.boot + driver.each  # with its second batch
    stalled = began + driver.stall_timeout
    assert driver.done[2:] == [
        (pytest.approx(stalled), "dump", 0),
        (pytest.approx(stalled + LIMITS.kill_after), "kill", 0),
        (pytest.approx(stalled + LIMITS.kill_after + LIMITS.abandon_after), "abandon", 0),
        (pytest.approx(stalled + LIMITS.kill_after + LIMITS.abandon_after), "start", 0),
    ]
    (report,) = driver.reports
    assert report.exit.kind == "unkillable"
    assert (report.outcome, report.restart) == (v.Outcome.ON_TRIAL, v.Restart.NOW)


def test_one_that_hears_the_dump_is_replaced_at_once() -> None:
    driver = FakeDriver(hangs={2})
    consumer = supervised(driver)
    consumer.begin(8)
    assert len(consumer.rest()) == 8
    assert [what for _, what, _ in driver.done] == ["start", "start", "dump", "start"]


def test_starts_that_find_no_room_are_tried_after_pauses_and_told_once() -> None:
    driver = FakeDriver()
    consumer = supervised(driver)
    consumer.begin(12)
    consumer.next()
    driver.no_room = 4
    struck = driver.now
    driver.strike(0)
    assert len(consumer.rest()) == 11
    starts = [at - struck for at, what, worker in driver.done if (what, worker) == ("start", 0)]
    assert starts[1:] == pytest.approx([0.0, 0.1, 0.3, 0.7, 1.5])
    assert [one.outcome for one in driver.reports] == [
        v.Outcome.BATCH_AGAIN,
        v.Outcome.TRIED_AGAIN,
    ]


def test_when_there_is_never_room_the_limit_ends_it() -> None:
    driver = FakeDriver()
    consumer = supervised(driver, limits=v.Limits(tries=3, first_pause=1.0))
    consumer.begin(12)
    driver.no_room = 100
    driver.strike(0)
    while isinstance(taken := consumer.next(), v.Delivery):
        pass
    assert isinstance(taken, v.GaveUp)
    assert (taken.reason, len(taken.deaths)) == ("shortage", 3)
    assert driver.now == pytest.approx(taken.deaths[-1].at)


def test_a_batch_that_kills_alone_too_is_given_up_and_the_rest_comes() -> None:
    driver = FakeDriver(kills={3})
    consumer = supervised(driver)
    consumer.begin(8)
    found = consumer.rest()
    assert isinstance(found[3], v.Poisoned)
    assert [one[1] for one in found if not isinstance(one, v.Poisoned)] == [0, 1, 2, 4, 5, 6, 7]
    assert [one.outcome for one in driver.reports] == [
        v.Outcome.ON_TRIAL,
        v.Outcome.SAMPLE_GIVEN_UP,
    ]


def test_more_deaths_than_allowed_end_it() -> None:
    driver = FakeDriver()
    consumer = supervised(driver, restarts=v.RestartPolicy(1, 60.0))
    consumer.begin(20)
    for _ in range(2):
        assert isinstance(consumer.next(), v.Delivery)
        driver.strike(0)
    while isinstance(taken := consumer.next(), v.Delivery):
        pass
    assert isinstance(taken, v.GaveUp)
    assert taken.reason == "restart-limit"
    assert driver.reports[-1].outcome is v.Outcome.GAVE_UP


def test_one_that_is_too_large_is_replaced_and_nothing_is_told() -> None:
    driver = FakeDriver()
    consumer = supervised(driver)
    consumer.begin(10)
    consumer.next()
    driver.retire(1)
    assert len(consumer.rest()) == 9
    assert driver.reports == []
    assert [what for _, what, worker in driver.done if worker == 1] == ["start", "forget", "start"]


def test_an_epoch_that_is_broken_off_is_finished_before_the_next_and_dropped() -> None:
    driver = FakeDriver()
    consumer = supervised(driver, persistent=True)
    consumer.begin(10)
    consumer.next()
    driver.strike(1)
    consumer.begin(6, again=True)
    assert consumer.rest() == [(1, index) for index in range(6)]
    assert consumer.supervisor.machine.in_flight == 0


def test_two_pools_with_one_budget_have_no_more_in_flight_than_it_allows() -> None:
    budget = Budget(5)
    drivers = [FakeDriver(each=0.1), FakeDriver(each=0.17)]
    consumers = [supervised(one, 2, 4, budget=budget, largest=1) for one in drivers]
    for consumer in consumers:
        consumer.begin(30)
    found: list[list[int]] = [[], []]
    most = 0
    for _ in range(30):
        for consumer, mine in zip(consumers, found, strict=True):
            taken = consumer.next()
            assert isinstance(taken, v.Delivery)
            mine.append(taken.result[1])
            consumer.supervisor.tell(v.UNPACKED)
            most = max(most, budget.in_flight)
    assert found == [list(range(30))] * 2
    assert 3 <= most <= 5


def test_a_slow_worker_holds_up_those_behind_it_only_where_order_is_kept() -> None:
    for in_order in (True, False):
        driver = FakeDriver(slow={0: 10.0})
        consumer = supervised(driver, in_order=in_order)
        consumer.begin(20)
        for _ in range(5):
            consumer.next()
        assert (driver.now > 10.0) is in_order
