"""Trials: who is blamed for a worker's death, played through every history.

The model knows who is guilty: some samples of some batches end or stall the worker that loads them; others
are hit from outside, any number of times. Workers load a batch sample by sample and die at the first
guilty one that was not left out. (Where time matters: `test_storms.py`.)
"""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.engine import events as ev
from holdfast.engine import restarts as r
from tests.engine.playing import Player, died

SIZE = 4  # samples in a batch


def make(workers: int = 1, prefetch: int = 2, **options: Any) -> Player:
    options.setdefault("leaves_out", True)
    return Player(workers, prefetch, **options)


class Court(RuleBasedStateMachine):
    """Every guilty one is convicted, no other is, and every batch arrives."""

    @initialize(
        workers=st.integers(1, 3),
        prefetch=st.integers(1, 3),
        in_order=st.booleans(),
        length=st.integers(0, 12),
        guilty=st.sets(st.tuples(st.integers(0, 11), st.integers(0, SIZE - 1)), max_size=12),
        memory=st.sets(st.tuples(st.integers(0, 11), st.integers(0, SIZE - 1)), max_size=4),
    )
    def begin(
        self,
        workers: int,
        prefetch: int,
        in_order: bool,
        length: int,
        guilty: set[tuple[int, int]],
        memory: set[tuple[int, int]],
    ) -> None:
        self.now = 0.0
        self.length = length
        self.by_memory = memory  # end their worker by SIGKILL, and a counter moves: proves less
        self.guilty = {one for one in guilty | memory if one[0] < length}
        # Deaths that convict must not exhaust it; blows from outside are what it is for.
        self.in_order = in_order
        self.workers = workers
        self.player = make(workers, prefetch, in_order=in_order)
        self.inboxes: dict[int, deque[ev.Item]] = {}
        self.left_out: set[tuple[int, int]] = set()
        self.heard = dict.fromkeys(range(workers), 0)
        self.sampler = list(range(length))
        self.delivered: list[int] = []
        self.ended = False
        self.obey(self.player.begin())
        self.draw()

    def tell(self, event: ev.Event) -> None:
        self.obey(self.player.handle(event))

    def obey(self, actions: list[ev.Action]) -> None:
        for action in actions:
            if isinstance(action, ev.Start):
                self.inboxes[action.worker] = deque()
                assert action.answered == self.heard[action.worker], "a trial counts as an answer"
            elif isinstance(action, ev.Dispatch):
                self.inboxes[action.worker].append(action.item)
            elif isinstance(action, ev.BanSample):
                culprit = (action.task.index, action.sample)
                assert culprit in self.guilty, "an innocent sample is convicted"
                assert culprit not in self.left_out, "it is convicted twice"
                self.left_out.add(culprit)

    def draw(self) -> None:
        self.obey(self.player.fill(self.sampler))

    def die(self, worker: int, sample: tuple[int, int] | None, **facts: bool) -> None:
        self.inboxes[worker].clear()
        self.now += 1.0
        self.tell(died(worker, self.player.generation(worker), self.now, sample, **facts))

    def work(self, worker: int) -> None:
        """Do one item, or die of it."""
        if not self.alive(worker):
            return
        generation = self.player.generation(worker)
        self.tell(ev.WorkerReady(worker, generation))
        if not self.inboxes[worker]:
            return
        item = self.inboxes[worker][0]
        task = item.task if isinstance(item, ev.IsolationTest) else item
        assert isinstance(task, ev.Task)
        samples = [item.sample] if isinstance(item, ev.IsolationTest) else range(SIZE)
        for sample in samples:
            one = (task.index, sample)
            if one in self.guilty and one not in self.left_out:
                memory = one in self.by_memory
                self.die(worker, (task.number, sample), outside=memory, memory=memory)
                return
        self.inboxes[worker].popleft()
        if isinstance(item, ev.IsolationTest):
            self.tell(ev.Survived(worker, generation))
        else:
            self.heard[worker] += 1
            self.tell(ev.BatchReady(worker, generation, task.number, task.index))

    def alive(self, worker: int) -> bool:
        return self.player.machine.seats[worker].alive

    @rule(worker=st.integers(0, 2), items=st.integers(1, 4))
    def a_worker_works(self, worker: int, items: int) -> None:
        for _ in range(items):
            if worker < self.workers:
                self.work(worker)

    @rule(worker=st.integers(0, 2), sample=st.integers(0, SIZE - 1), known=st.booleans())
    def one_is_hit_from_outside(self, worker: int, sample: int, known: bool) -> None:
        """By SIGKILL, in the middle of some sample."""
        if worker >= self.workers or not self.alive(worker):
            return
        self.tell(ev.WorkerReady(worker, self.player.generation(worker)))
        head = self.inboxes[worker][0] if self.inboxes[worker] else None
        hit = None
        if known and isinstance(head, ev.Task):
            hit = (head.number, sample)
        elif known and isinstance(head, ev.IsolationTest):
            hit = (head.task.number, head.sample)
        self.die(worker, hit, outside=True)

    @precondition(lambda self: not self.ended)
    @rule()
    def the_consumer_takes(self) -> None:
        taken = self.player.take()
        if isinstance(taken, ev.Delivery):
            assert not isinstance(taken.result, ev.Poisoned), "a batch is given up"
            self.delivered.append(taken.result)
            self.draw()
        elif taken is ev.END:
            self.ended = True
            assert sorted(self.delivered) == list(range(self.length))
            assert self.left_out == self.guilty

    @invariant()
    def order_is_kept(self) -> None:
        if hasattr(self, "player") and self.in_order:
            assert self.delivered == list(range(len(self.delivered)))

    def teardown(self) -> None:
        if not hasattr(self, "player"):
            return
        for _ in range(2000):
            if self.ended:
                break
            for worker in range(self.workers):
                self.work(worker)
            self.the_consumer_takes()
        assert self.ended, "the run did not end"


TestCourt = Court.TestCase
TestCourt.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


def start(player: Player, batches: int = 1) -> None:
    player.begin()
    for index in range(batches):
        player.draw(index)
    player.handle(ev.WorkerReady(0, 0))


def die(
    player: Player, sample: tuple[int, int | None] | None, at: float = 1.0, **how: Any
) -> list[ev.Action]:
    generation = player.generation(0)
    player.handle(ev.WorkerReady(0, generation))
    return player.handle(died(0, generation, at, sample, **how))


OUTSIDE = {"outside": True}
MEMORY = {"outside": True, "memory": True}


def items(actions: list[ev.Action]) -> list[ev.Item]:
    return [action.item for action in actions if isinstance(action, ev.Dispatch)]


def test_after_a_crash_the_sample_is_tried_alone_before_the_batch() -> None:
    player = make()
    start(player, 2)
    trial, first, second = items(die(player, (0, 3)))
    assert isinstance(trial, ev.IsolationTest)
    assert (trial.task.number, trial.sample) == (0, 3)
    assert isinstance(first, ev.Task)
    assert isinstance(second, ev.Task)


def test_one_that_crashes_alone_too_is_left_out_and_the_batch_redone() -> None:
    player = make()
    start(player)
    die(player, (0, 3))
    convict, *rest = die(player, (0, 3))
    assert isinstance(convict, ev.BanSample)
    assert (convict.task.number, convict.sample, len(convict.deaths)) == (0, 3, 2)
    assert [type(one) for one in items(rest)] == [ev.Task]


def test_a_kill_for_memory_must_happen_twice_alone() -> None:
    player = make()
    start(player)
    assert [type(one) for one in items(die(player, (0, 3), **MEMORY))] == [
        ev.IsolationTest,
        ev.Task,
    ]
    assert [type(one) for one in items(die(player, (0, 3), **MEMORY))] == [
        ev.IsolationTest,
        ev.Task,
    ]
    assert isinstance(die(player, (0, 3), **MEMORY)[0], ev.BanSample)


UNPROVEN = pytest.mark.parametrize(
    "how", [{"outside": True}, {"unexplained": True}], ids=["SIGKILL", "unexplained"]
)


@UNPROVEN
def test_a_kill_that_nothing_explains_convicts_after_pauses_in_the_same_instant_only(
    how: dict[str, bool],
) -> None:
    player = make()
    start(player)
    assert [type(one) for one in items(die(player, (0, 3), **how))] == [ev.Task]
    pauses = []
    actions = die(player, (0, 3), **how)
    for after in (0.01, 0.01, 2.5, 0.01, 0.01):  # one of them late
        trial = items(actions)[0]
        assert isinstance(trial, ev.IsolationTest)
        pauses.append(trial.pause)
        actions = die(player, (0, 3), after=after, **how)
        assert not [one for one in actions if isinstance(one, ev.BanSample)]
    assert len(set(pauses)) == len(pauses)
    assert min(pauses) >= r.PAUSE_FACTOR * 0.01


@pytest.mark.parametrize(("longest", "found"), [(10.0, False), (60.0, True)])
def test_kills_that_are_noticed_late_convict_if_the_pauses_may_be_long_enough(
    longest: float, found: bool
) -> None:
    player = make(limits=ev.Limits(longest_test_pause=longest))
    start(player)
    die(player, (0, 3), unexplained=True)
    die(player, (0, 3), unexplained=True)
    actions: list[ev.Action] = []
    for _ in range(4):  # the first of them shows how long the pauses have to be
        actions = die(player, (0, 3), after=1.0, unexplained=True)
    assert any(isinstance(one, ev.BanSample) for one in actions) is found


@UNPROVEN
def test_who_is_killed_while_it_waits_is_not_suspected_any_more(
    how: dict[str, bool],
) -> None:
    player = make()
    start(player)
    die(player, (0, 3), **how)
    assert isinstance(items(die(player, (0, 3), **how))[0], ev.IsolationTest)
    assert [type(one) for one in items(die(player, None, **how))] == [ev.Task]
    assert [type(one) for one in items(die(player, (0, 3), **how))] == [ev.Task]


def test_a_trial_for_a_crash_survives_kills_from_outside() -> None:
    player = make()
    start(player)
    die(player, (0, 3))
    trial = items(die(player, None, **OUTSIDE))[0]
    assert isinstance(trial, ev.IsolationTest)
    assert trial.pause == 0
    assert isinstance(items(die(player, (0, 3), after=0.0, **OUTSIDE))[0], ev.IsolationTest)
    assert isinstance(die(player, (0, 3))[0], ev.BanSample)


@pytest.mark.parametrize("leaves_out", [False, True])
def test_one_that_was_too_slow_has_as_long_in_its_batch_as_it_had_alone(leaves_out: bool) -> None:
    player = make(leaves_out=leaves_out)
    start(player)
    player.handle(ev.WorkerStalled(0, 0, 1.0))
    assert isinstance(items(die(player, (0, 3)))[0], ev.IsolationTest)
    assert player.patience(0) == 2
    player.handle(ev.WorkerReady(0, player.generation(0)))
    player.handle(ev.Survived(0, player.generation(0)))
    assert player.patience(0) == 2
    player.handle(ev.BatchReady(0, player.generation(0), 0, "zero"))
    assert player.patience(0) == 1


@pytest.mark.parametrize(("facts", "needed"), [({}, 2), (MEMORY, 3)])
def test_without_a_policy_it_is_tried_alone_too_and_then_its_batch_is_given_up(
    facts: dict[str, bool], needed: int
) -> None:
    player = make(leaves_out=False)
    start(player, 2)
    for _ in range(needed - 1):
        assert isinstance(items(die(player, (0, 3), **facts))[0], ev.IsolationTest)
        assert player.take() is None
    assert [one.number for one in items(die(player, (0, 3), **facts))] == [1]
    delivery = player.take()
    assert isinstance(delivery, ev.Delivery)
    assert isinstance(delivery.result, ev.Poisoned)
    assert (delivery.result.position, len(delivery.result.deaths)) == (3, needed)
    assert delivery.result.alone == needed - 1


def test_without_a_policy_a_batch_that_is_loaded_at_once_is_tried_as_a_whole() -> None:
    player = make(leaves_out=False)
    start(player)
    trial = items(die(player, (0, None)))[0]
    assert isinstance(trial, ev.IsolationTest)
    assert trial.sample is None
    die(player, (0, None))
    delivery = player.take()
    assert isinstance(delivery, ev.Delivery)
    assert isinstance(delivery.result, ev.Poisoned)


def test_an_acquitted_one_may_be_tried_again_but_not_for_ever() -> None:
    player = make()
    start(player)
    for _ in range(r.MAX_TESTS_PER_BATCH):
        assert isinstance(items(die(player, (0, 1)))[0], ev.IsolationTest)
        player.handle(ev.WorkerReady(0, player.generation(0)))
        player.handle(ev.Survived(0, player.generation(0)))
    die(player, (0, 1))
    die(player, (0, 1))
    delivery = player.take()
    assert isinstance(delivery, ev.Delivery)
    assert isinstance(delivery.result, ev.Poisoned)
    assert delivery.result.tests_passed == r.MAX_TESTS_PER_BATCH


@pytest.mark.parametrize(("facts", "deaths"), [({}, 2), (MEMORY, 3)])
def test_deaths_that_convict_do_not_use_up_the_restarts(
    facts: dict[str, bool], deaths: int
) -> None:
    player = make(restarts=ev.RestartPolicy(1, 1000.0))
    start(player)
    for sample in range(50):
        for _ in range(deaths):
            die(player, (0, sample), **facts)
    assert player.failure is None


def test_kills_that_nothing_explains_count_at_once_and_no_more_once_they_convict() -> None:
    player = make(restarts=ev.RestartPolicy(5, 1000.0))
    start(player)
    for sample in range(20):
        for number in range(5):
            assert len(player.machine.restarts.counted) == number
            die(player, (0, sample), at=sample * 10.0 + number, after=0.001, **OUTSIDE)
    assert player.failure is None


def test_deaths_that_have_expired_do_not_count_after_an_acquittal() -> None:
    """They are counted when it is over; by then others may have come before them in the books."""
    player = make(workers=2, restarts=ev.RestartPolicy(2, 10.0))
    player.begin()
    player.draw(0)
    player.draw(1)
    for worker in range(2):
        player.handle(ev.WorkerReady(worker, 0))
    player.handle(died(0, 0, 0.0, (0, 1)))  # on trial, and not counted
    player.handle(died(1, 0, 9.0))
    player.handle(ev.WorkerReady(0, 1))
    player.handle(ev.Survived(0, 1))
    assert len(player.machine.restarts.counted) == 2
    player.handle(ev.WorkerReady(1, 1))
    player.handle(died(1, 1, 12.0))  # the first was 12 s ago
    assert player.failure is None
    assert len(player.machine.restarts.counted) == 2


@pytest.mark.parametrize(
    ("policy", "kept"),
    [(ev.RestartPolicy(None, 60.0), r.KEPT_EXITS), (ev.RestartPolicy(99, 60.0), 7)],
)
def test_deaths_of_the_acquitted_are_not_kept_for_ever(policy: ev.RestartPolicy, kept: int) -> None:
    player = make(restarts=policy)
    start(player)
    for number in range(r.KEPT_EXITS + 10):
        die(player, (number, 1), at=10.0 * number)
        generation = player.generation(0)
        player.handle(ev.WorkerReady(0, generation))
        player.handle(ev.Survived(0, generation))
        player.handle(ev.BatchReady(0, generation, number, "batch", 1))
        player.take()
        while player.due > 0:
            player.draw(number)
    assert player.failure is None
    assert len(player.machine.restarts.counted) == kept


def test_deaths_of_the_acquitted_do() -> None:
    player = make(restarts=ev.RestartPolicy(1, 1000.0))
    start(player)
    die(player, (0, 1))
    player.handle(ev.WorkerReady(0, player.generation(0)))
    player.handle(ev.Survived(0, player.generation(0)))
    die(player, None)
    assert player.failure is not None
    assert player.failure.reason == "restart-limit"


def test_a_batch_loaded_as_a_whole_is_taken_apart_before_anybody_is_blamed() -> None:
    player = make()
    start(player)
    separate, *rest = die(player, (0, None))
    assert isinstance(separate, ev.LoadSeparately)
    assert [type(one) for one in items(rest)] == [ev.Task]
    assert isinstance(items(die(player, (0, 2)))[0], ev.IsolationTest)


@pytest.mark.parametrize(("facts", "needed"), [({}, 2), (MEMORY, 3), (OUTSIDE, None)])
def test_in_a_stream_kills_that_nothing_explains_count_as_restarts_and_as_nothing_else(
    facts: dict[str, bool], needed: int | None
) -> None:
    player = make(iterable=True)
    start(player)
    for _ in range(1, needed or 50):
        assert [type(one) for one in items(die(player, (0, 0), **facts))] == [ev.Task]
        assert player.take() is None
    die(player, (0, 0), **facts)
    delivery = player.take()
    assert isinstance(delivery, ev.Delivery) == (needed is not None)


def test_nobody_is_tried_in_a_stream() -> None:
    player = make(iterable=True)
    start(player)
    assert [type(one) for one in items(die(player, (0, 0)))] == [ev.Task]
    die(player, (0, 0))
    delivery = player.take()
    assert isinstance(delivery, ev.Delivery)
    assert isinstance(delivery.result, ev.Poisoned)
