"""The machine, played through histories no real run could wait for.

A model plays workers, consumer and fate: it answers items as a worker would, kills workers at any
moment (before and after their answers were heard), lets them stall and refuse to die, breaks epochs
off and begins new ones. The promises in the machine's text are the invariants.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.engine import machine as m
from holdfast.engine import vocabulary as v
from holdfast.memory.budget import Budget, Share

UNLIMITED = v.RestartPolicy(None, 60.0)


def make(workers: int = 2, prefetch: int = 2, **options: Any) -> m.Machine:
    options.setdefault("restarts", UNLIMITED)
    return m.Machine(workers=workers, prefetch=prefetch, **options)


def fill(machine: m.Machine, indices: list[int]) -> list[v.Action]:
    """Draw what is due from `indices`; an empty list is a sampler with nothing more."""
    actions: list[v.Action] = []
    while machine.draws_due > 0:
        if indices:
            actions += machine.draw(indices.pop(0))
        else:
            machine.drained()
    return actions


class History(RuleBasedStateMachine):
    """Map-style data: every task exactly once, in order, whatever dies."""

    @initialize(
        workers=st.integers(1, 4),
        prefetch=st.integers(1, 3),
        in_order=st.booleans(),
        persistent=st.booleans(),
        length=st.integers(0, 30),
        budget=st.none() | st.integers(1, 60),
        auto=st.booleans(),
        sizes=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    )
    def begin(
        self,
        workers: int,
        prefetch: int,
        in_order: bool,
        persistent: bool,
        length: int,
        budget: int | None,
        auto: bool,
        sizes: list[int],
    ) -> None:
        self.now = 0.0
        self.length = length
        self.sizes = sizes
        self.handed_out: dict[int, v.Task] = {}
        self.budget = Budget(budget, auto=auto)
        known = max(1, *sizes) if auto and budget is not None else None
        self.share = Share(self.budget, known)
        self.other = Share(self.budget)  # another loader's
        self.unread = 0
        self.machine = make(
            workers, prefetch, in_order=in_order, persistent=persistent, share=self.share
        )
        self.inboxes: dict[int, deque[v.Item]] = {}  # what the living worker has been given
        self.outboxes: dict[int, deque[v.Event]] = {}  # answered, not yet heard
        self.generations: dict[int, int] = {}
        self.heard: dict[int, list[tuple[int, int]]] = {w: [] for w in range(workers)}
        self.frozen: set[int] = set()
        self.todo: deque[v.Action] = deque()
        self.sampler = list(range(length))
        self.delivered: list[int] = []
        self.ended = False
        self.obey(self.machine.begin())
        self.draw()

    # -- the driver's part ----------------------------------------------------------------

    def obey(self, actions: list[v.Action]) -> None:
        """In the order of the decisions, as the driver does: what an action leads to comes after
        those that were decided with it."""
        first = not self.todo
        for action in actions:
            assert not isinstance(action, v.Dispatch) or self.machine.alive(action.worker)
        self.todo.extend(actions)
        while first and self.todo:
            self.carry_out(self.todo[0])
            self.todo.popleft()

    def carry_out(self, action: v.Action) -> None:
        if isinstance(action, v.Start):
            if action.generation != self.machine.generation(action.worker):
                return  # replaced before it began
            assert action.generation > self.generations.get(action.worker, -1)
            self.generations[action.worker] = action.generation
            self.inboxes[action.worker] = deque()
            self.outboxes[action.worker] = deque()
            self.frozen.discard(action.worker)
            assert action.answered == len(self.heard[action.worker])
        elif isinstance(action, v.Dispatch):
            self.inboxes[action.worker].append(action.item)
            # What a replacement is asked for again was handed out when it was thought smaller.
            if isinstance(action.item, v.Task) and id(action.item) not in self.handed_out:
                self.handed_out[id(action.item)] = action.item
                self.nothing_too_much_is_handed_out()
        elif isinstance(action, v.Abandon):
            self.die(action.worker)

    def draw(self) -> None:
        while self.machine.draws_due > 0:
            if self.sampler:
                self.obey(self.machine.draw(self.sampler.pop(0)))
            else:
                self.machine.drained()

    def die(self, worker: int, sample: tuple[int, int] | None = None) -> None:
        self.hear(worker, len(self.outboxes[worker]))
        death = v.Death(self.now, sample, perhaps_from_outside=sample is None)
        self.obey(self.machine.handle(v.WorkerDied(worker, self.generations[worker], death)))

    def hear(self, worker: int, count: int) -> None:
        for _ in range(count):
            event = self.outboxes[worker].popleft()
            if isinstance(event, v.BatchReady):
                self.heard[worker].append(event.result)
            else:
                self.heard[worker].append((-1, -1))
            self.obey(self.machine.handle(event))

    def size(self, index: int) -> int:
        return max(1, self.sizes[index % len(self.sizes)])

    def ready(self, worker: int) -> bool:
        return self.machine._seats[worker].ready

    def outstanding(self) -> int:
        """Tasks of this epoch that no worker has answered."""
        items = [item for seat in self.machine._seats for item in seat.items]
        return sum(isinstance(item, v.Task) and item.epoch == self.machine.epoch for item in items)

    # -- what can happen ------------------------------------------------------------------

    @rule(worker=st.integers(0, 3), items=st.integers(1, 4))
    def a_worker_answers(self, worker: int, items: int) -> None:
        if worker >= self.machine.workers or worker in self.frozen:
            return
        generation = self.generations[worker]
        if self.machine.alive(worker) and not self.ready(worker):
            self.obey(self.machine.handle(v.WorkerReady(worker, generation)))
        for _ in range(min(items, len(self.inboxes[worker]))):
            item = self.inboxes[worker].popleft()
            if isinstance(item, v.Task):
                event: v.Event = v.BatchReady(
                    worker,
                    generation,
                    item.number,
                    (item.epoch, item.index),
                    self.sizes[item.index % len(self.sizes)] or None,  # 0: an error
                )
            else:
                event = v.Resumed(worker, generation)
            self.outboxes[worker].append(event)

    @rule(worker=st.integers(0, 3), count=st.integers(1, 5))
    def answers_arrive(self, worker: int, count: int) -> None:
        if worker < self.machine.workers:
            self.hear(worker, min(count, len(self.outboxes[worker])))

    @rule(worker=st.integers(0, 3), at_once=st.booleans())
    def workers_die(self, worker: int, at_once: bool) -> None:
        for one in range(self.machine.workers) if at_once else [worker]:
            if one < self.machine.workers and self.machine.alive(one):
                if not self.ready(one):
                    self.obey(self.machine.handle(v.WorkerReady(one, self.generations[one])))
                self.die(one)

    @rule(worker=st.integers(0, 3))
    def somebody_kills_it_while_it_starts(self, worker: int) -> None:
        """It is started again, at once or in a moment, however often that happens."""
        if worker >= self.machine.workers or not self.machine.alive(worker) or self.ready(worker):
            return
        self.inboxes[worker].clear()
        death = v.Death(self.now, perhaps_from_outside=True)
        self.obey(self.machine.handle(v.WorkerDied(worker, self.generations[worker], death)))
        assert self.machine.failure is None
        assert self.machine.alive(worker) != self.machine.put_off(worker)

    @rule(worker=st.integers(0, 3))
    def a_start_finds_no_room(self, worker: int) -> None:
        """Others go on; this one is started again when its time has come, and not before."""
        if worker >= self.machine.workers or not self.machine.alive(worker):
            return
        if self.ready(worker) or self.machine.tries(worker) >= m.TRIES - 1:
            return
        self.inboxes[worker].clear()
        before = list(self.machine.restarted)
        death = v.Death(self.now, shortage=True)
        actions = self.machine.handle(v.WorkerDied(worker, self.generations[worker], death))
        assert not [one for one in actions if isinstance(one, v.Start)]
        self.obey(actions)
        assert list(self.machine.restarted) == before
        wanted = self.machine.deadline()
        assert wanted is not None
        assert wanted <= self.now + m.LONGEST_PAUSE

    @rule(worker=st.integers(0, 3), dies=st.booleans())
    def a_worker_stalls(self, worker: int, dies: bool) -> None:
        if worker >= self.machine.workers or not self.machine.busy(worker):
            return
        if not self.ready(worker):
            self.obey(self.machine.handle(v.WorkerReady(worker, self.generations[worker])))
        generation = self.generations[worker]
        actions = self.machine.handle(v.WorkerStalled(worker, generation, self.now))
        assert actions == [v.Dump(worker, generation)]
        self.frozen.add(worker)
        if dies:
            self.die(worker)

    @rule(worker=st.integers(0, 3), astray=st.booleans())
    def a_worker_goes_by_itself(self, worker: int, astray: bool) -> None:
        """Because of its size, or because it has not found where its stream was."""
        if worker >= self.machine.workers or not self.machine.alive(worker):
            return
        if self.machine.condemned(worker):
            return
        self.a_worker_answers(worker, 1)
        self.hear(worker, len(self.outboxes[worker]))
        generation = self.generations[worker]
        before = list(self.machine.restarted)
        event: v.Event = v.WorkerRetired(worker, generation, self.now)
        if astray:
            event = v.WentAstray(worker, generation, self.now, frozenset({"state"}))
        self.obey(self.machine.handle(event))
        self.frozen.add(worker)
        self.die(worker)
        assert list(self.machine.restarted) == before

    @rule(nbytes=st.integers(0, 60))
    def another_loader_has_so_much_in_flight(self, nbytes: int) -> None:
        self.other.in_flight = nbytes
        self.obey(self.machine.relieved())

    @rule(alone=st.booleans(), cap=st.none() | st.integers(0, 30))
    def pressure_changes(self, alone: bool, cap: int | None) -> None:
        self.share.alone, self.share.cap = alone, cap
        self.obey(self.machine.relieved())  # as the driver does after every look

    @rule()
    def the_consumer_unpacks(self) -> None:
        self.unread = 0
        self.obey(self.machine.unpacked())

    @rule(seconds=st.floats(0.1, 2.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.obey(self.machine.handle(v.Ticked(self.now)))

    @rule()
    def a_ghost_speaks(self) -> None:
        """Events of generations that are over change nothing."""
        for worker, generation in self.generations.items():
            if generation > 0:
                before = self.outstanding()
                death = v.WorkerDied(worker, generation - 1, v.Death(self.now))
                assert self.machine.handle(death) == []
                ready = v.BatchReady(worker, generation - 1, 0, "ghost")
                assert self.machine.handle(ready) == []
                assert self.outstanding() == before

    @precondition(lambda self: not self.ended)
    @rule()
    def the_consumer_takes(self) -> None:
        self.the_consumer_unpacks()  # whoever asks for another is done with the one before
        taken = self.machine.take()
        if isinstance(taken, v.Delivery):
            epoch, index = taken.result
            assert epoch == self.machine.epoch
            assert index == taken.task.index
            self.unread = self.size(index)
            self.delivered.append(index)
            self.draw()
        elif taken is v.END:
            self.ended = True
            assert sorted(self.delivered) == list(range(self.length))

    @precondition(lambda self: self.machine.persistent)
    @rule()
    def a_new_epoch_begins(self) -> None:
        self.sampler = list(range(self.length))
        self.delivered = []
        self.ended = False
        self.unread = 0
        self.obey(self.machine.resume(None))
        self.draw()

    # -- what must hold -------------------------------------------------------------------

    def nothing_too_much_is_handed_out(self) -> None:
        """If all sizes are known: never more in flight than allowed, but for one alone."""
        limit = self.budget.limit
        if limit is None or self.share.largest != max(1, *self.sizes):
            return
        mine = sum(isinstance(item, v.Task) for seat in self.machine._seats for item in seat.items)
        mine += sum(task.done for task in self.machine._tasks.values())
        if mine > 1:
            # What was handed out before somebody else took more is not taken back.
            assert self.share.in_flight <= limit or self.other.in_flight

    @invariant()
    def the_books_are_right(self) -> None:
        if not hasattr(self, "machine"):
            return
        tasks = [item for seat in self.machine._seats for item in seat.items]
        making = [one for one in tasks if isinstance(one, v.Task)]
        waiting = [task for task in self.machine._tasks.values() if task.done]
        counted = sum(task.counted for task in making)
        counted += sum(self.size(task.index) for task in waiting) + self.unread
        assert self.share.in_flight == counted
        assert all(task.counted >= 1 for task in making)

    @invariant()
    def order_is_kept(self) -> None:
        if hasattr(self, "machine") and self.machine.in_order:
            assert self.delivered == list(range(len(self.delivered)))

    @invariant()
    def nothing_comes_twice(self) -> None:
        if hasattr(self, "machine"):
            assert len(set(self.delivered)) == len(self.delivered)

    @invariant()
    def no_more_is_out_than_allowed(self) -> None:
        if hasattr(self, "machine"):
            assert self.outstanding() <= self.machine.limit

    @invariant()
    def each_worker_does_its_own_tasks_in_order(self) -> None:
        """The proof that random states fit: the sequence a seat answers never changes."""
        if not hasattr(self, "machine") or not self.machine.in_order:
            return
        for worker, answers in self.heard.items():
            for epoch in {epoch for epoch, _ in answers if epoch >= 0}:
                mine = [index for one, index in answers if one == epoch]
                assert mine == [worker + self.machine.workers * k for k in range(len(mine))]

    def teardown(self) -> None:
        """However it went, it can be finished."""
        if not hasattr(self, "machine"):
            return
        for _ in range(10_000):
            if self.ended:
                break
            self.time_passes(m.LONGEST_PAUSE)
            for worker in range(self.machine.workers):
                if worker in self.frozen and self.machine.alive(worker):
                    self.die(worker)
                self.a_worker_answers(worker, 100)
                self.hear(worker, len(self.outboxes[worker]))
            self.the_consumer_takes()
        assert self.ended, "the run did not end"


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def test_tasks_go_to_workers_in_turn() -> None:
    machine = make(3, 2)
    machine.begin()
    actions = fill(machine, list(range(9)))
    assert [(a.worker, a.item.index) for a in actions] == [
        (0, 0), (1, 1), (2, 2), (0, 3), (1, 4), (2, 5)
    ]  # fmt: skip


def test_a_replacement_is_asked_for_what_was_not_answered_and_nothing_else() -> None:
    machine = make(1, 3)
    machine.begin()
    fill(machine, list(range(3)))
    machine.handle(v.WorkerReady(0, 0))
    machine.handle(v.BatchReady(0, 0, 0, "zero"))
    start, *dispatched = machine.handle(v.WorkerDied(0, 0, v.Death(1.0)))
    assert start == v.Start(0, 1, answered=1, passed=0, replica=1, exhausted=False)
    assert [action.item.number for action in dispatched] == [1, 2]


def test_an_idle_worker_that_dies_is_replaced_because_more_may_come() -> None:
    machine = make(1, 1)
    machine.begin()
    fill(machine, [0])
    machine.handle(v.WorkerReady(0, 0))
    machine.handle(v.BatchReady(0, 0, 0, "zero"))
    actions = machine.handle(v.WorkerDied(0, 0, v.Death(1.0)))
    assert [type(action) for action in actions] == [v.Start]


def test_a_worker_with_nothing_left_to_do_is_not_replaced() -> None:
    machine = make(1, 1)
    machine.begin()
    fill(machine, [0])
    machine.handle(v.WorkerReady(0, 0))
    machine.handle(v.BatchReady(0, 0, 0, "zero"))
    assert isinstance(machine.take(), v.Delivery)
    fill(machine, [])
    assert machine.handle(v.WorkerDied(0, 0, v.Death(1.0))) == []
    assert machine.take() is v.END


def test_more_deaths_than_allowed_end_it_after_the_finished_batches_are_delivered() -> None:
    machine = make(1, 3, restarts=v.RestartPolicy(1, 10.0))
    machine.begin()
    fill(machine, [0, 1, 2])
    machine.handle(v.WorkerReady(0, 0))
    machine.handle(v.WorkerDied(0, 0, v.Death(1.0)))
    machine.handle(v.WorkerReady(0, 1))
    machine.handle(v.BatchReady(0, 1, 0, "zero"))
    assert machine.handle(v.WorkerDied(0, 1, v.Death(2.0))) == []
    first = machine.take()
    assert isinstance(first, v.Delivery)
    assert first.result == "zero"
    failure = machine.take()
    assert isinstance(failure, v.GaveUp)
    assert failure.reason == "restart-limit"
    assert len(failure.deaths) == 2


def test_deaths_that_are_far_apart_do_not_add_up() -> None:
    machine = make(1, 1, restarts=v.RestartPolicy(1, 10.0))
    machine.begin()
    fill(machine, [0])
    for generation in range(20):
        machine.handle(v.WorkerReady(0, generation))
        death = v.Death(generation * 11.0)
        assert machine.handle(v.WorkerDied(0, generation, death))
    assert machine.failure is None


def test_a_worker_that_never_gets_ready_is_given_up() -> None:
    machine = make(1, 1)
    machine.begin()
    fill(machine, [0])
    for generation in range(m.FAILED_STARTS - 1):
        assert machine.handle(v.WorkerDied(0, generation, v.Death(0.0)))
    assert machine.handle(v.WorkerDied(0, m.FAILED_STARTS - 1, v.Death(0.0))) == []
    failure = machine.take()
    assert isinstance(failure, v.GaveUp)
    assert failure.reason == "cannot-start"


def killed(at: float) -> v.Death:
    return v.Death(at, perhaps_from_outside=True)


def test_without_a_limit_a_worker_killed_while_it_starts_is_started_again_after_pauses() -> None:
    machine = make(1, 1, restarts=v.RestartPolicy(None, 60.0))
    machine.begin()
    fill(machine, [0])
    now, pauses = 100.0, []
    assert [type(one) for one in machine.handle(v.WorkerDied(0, 0, killed(now)))] == [
        v.Start,
        v.Dispatch,
    ]
    for generation in range(1, 1000):
        assert machine.handle(v.WorkerDied(0, generation, killed(now))) == []
        assert machine.put_off(0)
        wanted = machine.deadline()
        assert wanted is not None
        assert machine.handle(v.Ticked(wanted - 0.01)) == []
        actions = machine.handle(v.Ticked(wanted))
        assert [type(action) for action in actions] == [v.Start, v.Dispatch]
        pauses.append(wanted - now)
        now = wanted
    assert pauses[:8] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5])
    assert pauses[-1] == pytest.approx(m.LONGEST_PAUSE)
    machine.handle(v.WorkerReady(0, 1000))
    machine.handle(v.BatchReady(0, 1000, 0, "zero"))
    delivery = machine.take()
    assert isinstance(delivery, v.Delivery)
    assert delivery.result == "zero"


def test_being_killed_while_starting_counts_towards_the_limit_and_is_nothing_else() -> None:
    limit = 30
    machine = make(1, 1, restarts=v.RestartPolicy(limit, 1000.0))
    machine.begin()
    fill(machine, [0])
    now = 0.0
    for generation in range(limit + 1):
        assert machine.failure is None
        machine.handle(v.WorkerDied(0, generation, killed(now)))
        now = machine.deadline() or now
        machine.handle(v.Ticked(now))
    failure = machine.take()
    assert isinstance(failure, v.GaveUp)
    assert failure.reason == "restart-limit"
    assert len(failure.deaths) == limit + 1


@pytest.mark.parametrize("outside", [False, True])
def test_who_ends_by_itself_whenever_it_catches_up_is_given_up_and_who_is_killed_is_not(
    outside: bool,
) -> None:
    """It has started, so there is no pause; what it answers clears the count."""
    machine = make(1, 1, iterable=True)
    machine.begin()
    fill(machine, [None] * 2)
    machine.handle(v.WorkerReady(0, 0))
    machine.handle(v.BatchReady(0, 0, 0, "zero"))
    assert isinstance(machine.take(), v.Delivery)
    fill(machine, [None] * 2)
    machine.handle(v.WorkerDied(0, 0, killed(0.0)))
    deaths = 0
    while machine.failure is None and deaths < 100:
        generation = machine.generation(0)
        machine.handle(v.WorkerReady(0, generation))
        death = v.Death(1.0 + deaths, perhaps_from_outside=outside, catching_up=True)
        machine.handle(v.WorkerDied(0, generation, death))
        assert not machine.put_off(0)
        deaths += 1
    if outside:
        assert machine.failure is None
    else:
        assert deaths == m.FAILED_STARTS
        assert machine.failure is not None
        assert machine.failure.reason == "cannot-catch-up"


def test_after_two_stalls_on_a_lock_held_at_the_fork_there_is_another_fork_and_no_sample_is_blamed() -> (
    None
):
    machine = make(2, 1)
    machine.begin()
    fill(machine, [0, 1])
    renewed = []
    for number in range(2 * m.RENEWALS):
        generation = machine.generation(0)
        machine.handle(v.WorkerReady(0, generation))
        death = v.Death(float(number), (0, 0), inherited=True)
        actions = machine.handle(v.WorkerDied(0, generation, death))
        renewed.append([type(one) for one in actions if not isinstance(one, v.Dispatch)])
        assert not machine.on_trial(0)
    assert renewed == [[v.Start], [v.Renew, v.Start]] * m.RENEWALS
    # It is always held: what happens to those who wait for it is what happens to any that stall.
    for _ in range(2):
        generation = machine.generation(0)
        machine.handle(v.WorkerReady(0, generation))
        machine.handle(v.WorkerDied(0, generation, v.Death(99.0, (0, 0), inherited=True)))
    delivery = machine.take()
    assert isinstance(delivery, v.Delivery)
    assert isinstance(delivery.result, v.Poisoned)


def test_kills_from_outside_do_not_hide_that_a_worker_cannot_start() -> None:
    machine = make(1, 1, restarts=v.RestartPolicy(None, 60.0))
    machine.begin()
    fill(machine, [0])
    now = 0.0
    for generation in range(2 * m.FAILED_STARTS):
        assert machine.failure is None
        outside = generation % 2 == 0
        death = v.Death(now, perhaps_from_outside=outside)
        machine.handle(v.WorkerDied(0, generation, death))
        now = machine.deadline() or now
        machine.handle(v.Ticked(now))
    assert machine.failure is not None
    assert machine.failure.reason == "cannot-start"


def no_room(at: float) -> v.Death:
    return v.Death(at, shortage=True)


def test_a_start_that_finds_no_room_is_tried_after_longer_and_longer_pauses() -> None:
    machine = make(1, 1, restarts=v.RestartPolicy(0, 60.0))
    machine.begin()
    fill(machine, [0])
    now, pauses = 100.0, []
    for generation in range(m.TRIES - 1):
        assert machine.handle(v.WorkerDied(0, generation, no_room(now))) == []
        wanted = machine.deadline()
        assert wanted is not None
        assert machine.handle(v.Ticked(wanted - 0.01)) == []
        actions = machine.handle(v.Ticked(wanted))
        assert [type(action) for action in actions] == [v.Start, v.Dispatch]
        pauses.append(wanted - now)
        now = wanted
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5, 5, 5])
    assert machine.handle(v.WorkerDied(0, m.TRIES - 1, no_room(now))) == []
    failure = machine.take()
    assert isinstance(failure, v.GaveUp)
    assert failure.reason == "shortage"
    assert [death.at for death in failure.deaths][-1] == now
    assert len(failure.deaths) == m.TRIES
    assert machine.deadline() is None


def test_others_go_on_while_a_start_waits_and_what_is_due_waits_with_it() -> None:
    machine = make(2, 1)
    machine.begin()
    fill(machine, indices := [0, 1, 2, 3])
    assert machine.handle(v.WorkerDied(0, 0, no_room(0.0))) == []
    machine.handle(v.WorkerReady(1, 0))
    machine.handle(v.BatchReady(1, 0, 1, "one"))
    assert machine.take() is None
    start = machine.handle(v.Ticked(0.1))[0]
    assert start == v.Start(0, 1, 0, 0, 0, False)
    machine.handle(v.WorkerReady(0, 1))
    machine.handle(v.BatchReady(0, 1, 0, "zero"))
    for expected in ("zero", "one"):
        delivery = machine.take()
        assert isinstance(delivery, v.Delivery)
        assert delivery.result == expected
        fill(machine, indices)
    machine.handle(v.WorkerDied(0, 1, v.Death(1.0)))
    assert machine.handle(v.WorkerDied(0, 2, no_room(1.0))) == []
    assert machine.deadline() == pytest.approx(1.1)  # once it was ready, the pauses begin anew


def test_nobody_is_started_later_for_whom_there_is_nothing_left() -> None:
    machine = make(2, 1)
    machine.begin()
    fill(machine, [])
    assert machine.handle(v.WorkerDied(0, 0, no_room(0.0))) == []
    assert machine.handle(v.Ticked(10.0)) == []
    assert machine.deadline() is None
    assert machine.take() is v.END


def test_a_sample_that_kills_alone_too_is_named_and_the_rest_goes_on() -> None:
    machine = make(1, 2)
    machine.begin()
    fill(machine, [10, 11])
    for generation in range(2):
        machine.handle(v.WorkerReady(0, generation))
        actions = machine.handle(v.WorkerDied(0, generation, v.Death(0.0, (0, 3))))
    assert [a.item.number for a in actions if isinstance(a, v.Dispatch)] == [1]
    delivery = machine.take()
    assert isinstance(delivery, v.Delivery)
    assert isinstance(delivery.result, v.Poisoned)
    assert delivery.result.position == 3
    assert len(delivery.result.deaths) == 2


def test_different_samples_are_not_blamed_for_each_other() -> None:
    machine = make(1, 1)
    machine.begin()
    fill(machine, [0])
    for number in range(10):
        generation = machine.generation(0)
        machine.handle(v.WorkerReady(0, generation))
        assert machine.handle(v.WorkerDied(0, generation, v.Death(0.0, (0, number % 2))))
        if machine.on_trial(0):
            machine.handle(v.WorkerReady(0, machine.generation(0)))
            machine.handle(v.Survived(0, machine.generation(0)))
    assert machine.take() is None


def test_a_stalled_worker_is_dumped_then_killed_then_left_behind() -> None:
    machine = make(1, 1)
    machine.begin()
    fill(machine, [0])
    machine.handle(v.WorkerReady(0, 0))
    assert machine.handle(v.WorkerStalled(0, 0, 100.0)) == [v.Dump(0, 0)]
    assert machine.deadline() == 100.0 + m.KILL_AFTER
    assert machine.handle(v.Ticked(100.1)) == []
    assert machine.handle(v.Ticked(100.0 + m.KILL_AFTER)) == [v.Kill(0, 0)]
    killed = 100.0 + m.KILL_AFTER
    assert machine.handle(v.Ticked(killed + 0.5)) == []
    assert machine.handle(v.Ticked(killed + m.ABANDON_AFTER)) == [v.Abandon(0, 0)]


def test_patience_doubles_after_a_stall_and_returns_with_an_answer() -> None:
    machine = make(1, 1)
    machine.begin()
    fill(machine, [0])
    machine.handle(v.WorkerReady(0, 0))
    assert machine.patience(0, 5.0) == 5.0
    machine.handle(v.WorkerStalled(0, 0, 1.0))
    machine.handle(v.WorkerDied(0, 0, v.Death(1.0)))
    assert machine.patience(0, 5.0) == 10.0
    machine.handle(v.BatchReady(0, 1, 0, "zero"))
    assert machine.patience(0, 5.0) == 5.0


def test_replicas_that_end_drop_out_of_the_turn() -> None:
    machine = make(2, 2, iterable=True)
    machine.begin()
    endless = [None] * 100
    fill(machine, endless)
    for worker in range(2):
        machine.handle(v.WorkerReady(worker, 0))
    machine.handle(v.ReplicaEnded(0, 0, 0))
    fill(machine, endless)
    for number in (1, 3, 4):
        machine.handle(v.BatchReady(1, 0, number, number))
    seen = []
    while isinstance(delivery := machine.take(), v.Delivery):
        seen.append(delivery.result)
        actions = fill(machine, endless)
        assert all(action.worker == 1 for action in actions)
    assert seen == [1, 3, 4]


def test_a_replica_cannot_go_past_a_sample_that_kills() -> None:
    machine = make(1, 2, iterable=True)
    machine.begin()
    fill(machine, [None] * 2)
    for generation in range(2):
        machine.handle(v.WorkerReady(0, generation))
        actions = machine.handle(v.WorkerDied(0, generation, v.Death(0.0, (0, 0))))
    assert actions == []
    delivery = machine.take()
    assert isinstance(delivery, v.Delivery)
    assert isinstance(delivery.result, v.Poisoned)
    fill(machine, [None] * 2)
    assert machine.take() is v.END


def numbers(actions: list[v.Action]) -> list[int]:
    """Of the tasks that are handed out."""
    items = [action.item for action in actions if isinstance(action, v.Dispatch)]
    return [item.number for item in items if isinstance(item, v.Task)]


@pytest.mark.parametrize(("auto", "at_once"), [(False, 1), (True, 2)])
def test_an_answer_that_brings_no_batch_says_nothing_of_how_large_they_are(
    auto: bool, at_once: int
) -> None:
    """Nobody knows yet: one to see, or one for each worker where nobody has set the limit."""
    share = Share(Budget(100, auto=auto))
    machine = make(2, 4, share=share)
    machine.begin()
    indices = list(range(20))
    out = [action.item.number for action in fill(machine, indices)]
    assert out == list(range(at_once))
    for worker in range(2):
        machine.handle(v.WorkerReady(worker, 0))
    for number in range(4):
        worker = number % 2
        out += numbers(machine.handle(v.BatchReady(worker, 0, number, "an error")))
        assert isinstance(machine.take(), v.Delivery)
        out += numbers([*machine.unpacked(), *fill(machine, indices)])
        assert share.largest is None
        assert len(out) <= number + 1 + at_once
    machine.handle(v.BatchReady(0, 0, 4, "a batch", 60))
    assert share.largest == 60
