"""The machine, played through histories no real run could wait for.

A model plays workers, consumer and fate: it answers items as a worker would, kills workers at any
moment (before and after their answers were heard), lets them stall and refuse to die, breaks epochs
off and begins new ones. The promises in the machine's text are the invariants.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.engine import events as ev
from holdfast.engine import machine as m
from holdfast.engine import restarts as r
from holdfast.engine.seats import SeatState
from tests.engine.playing import UNLIMITED, Player, died

LIMITS = ev.Limits()


class History(RuleBasedStateMachine):
    """Map-style data: every task exactly once, in order, whatever dies."""

    @initialize(
        workers=st.integers(1, 4),
        prefetch=st.integers(1, 3),
        in_order=st.booleans(),
        persistent=st.booleans(),
        length=st.integers(0, 60),
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
        self.handed_out: dict[int, ev.Task] = {}
        self.budget = budget
        self.cap: int | None = None
        self.alone = False
        self.others = 0  # bytes that another loader has in flight
        self.largest = max(1, *sizes) if auto and budget is not None else None
        self.unread = 0
        limited: m.BeforeSizesAreKnown = "any" if budget is None else "one"
        self.machine = m.Machine(
            workers=workers,
            prefetch=prefetch,
            in_order=in_order,
            persistent=persistent,
            restarts=UNLIMITED,
            before_sizes_are_known="one-each" if auto else limited,
            largest=self.largest,
            may_deepen=True,
        )
        self.inboxes: dict[int, deque[ev.Item]] = {}  # what the living worker has been given
        self.outboxes: dict[int, deque[ev.Event]] = {}  # answered, not yet heard
        self.generations: dict[int, int] = {}
        self.living: set[int] = set()
        self.abandoned: set[int] = set()  # until another is started in its place
        self.heard: dict[int, list[tuple[int, int]]] = {w: [] for w in range(workers)}
        self.frozen: set[int] = set()
        self.announced = 0
        self.known: dict[tuple[int, int], int] = {}  # of each task: what was announced before it
        self.told: dict[int, list[int]] = {}  # of each living worker: what it has heard
        self.acting = False
        self.caused: deque[ev.Event] = deque()
        self.due = 0
        self.taken: ev.Delivery | ev.End | ev.GaveUp | None = None
        self.sampler = list(range(length))
        self.delivered: list[int] = []
        self.ended = False
        self.room_changes()
        self.tell(ev.Began())
        self.draw()

    # -- the driver's part ----------------------------------------------------------------

    def tell(self, event: ev.Event) -> None:
        """What actions lead to comes after all that were decided with them, as in the driver."""
        self.caused.append(event)
        while self.caused and not self.acting:
            self.acting = True
            try:
                actions = self.machine.handle(self.caused.popleft())
                for seat in self.machine.seats:
                    if seat.state is SeatState.PAUSED:
                        self.hand_out(seat.items)  # to the process that will be started
                for action in actions:
                    self.carry_out(action)
            finally:
                self.acting = False

    def carry_out(self, action: ev.Action) -> None:
        if isinstance(action, ev.Draw):
            self.due += action.count
        elif isinstance(action, ev.Deliver):
            assert self.taken is None
            self.taken = action.what
        elif isinstance(action, ev.Report):
            assert action.worker not in self.living
            self.restarted = action.restart
        elif isinstance(action, ev.Start):
            assert action.worker not in self.living, "two at a time"
            assert action.generation > self.generations.get(action.worker, -1)
            self.generations[action.worker] = action.generation
            self.living.add(action.worker)
            self.abandoned.discard(action.worker)
            self.inboxes[action.worker] = deque()
            self.outboxes[action.worker] = deque()
            self.frozen.discard(action.worker)
            assert action.answered == len(self.heard[action.worker])
            self.told[action.worker] = [notice.change for notice in action.told]
        elif isinstance(action, ev.Dispatch):
            if action.worker in self.abandoned:
                return  # its last answers are told before its exit; its replacement will be asked
            assert action.worker in self.living, "out of date"
            self.inboxes[action.worker].append(action.item)
            self.hand_out([action.item])
        elif isinstance(action, ev.Abandon | ev.Kill | ev.Dump):
            assert action.worker in self.living, "out of date"
            assert action.generation == self.generations[action.worker]
            if isinstance(action, ev.Abandon):
                self.abandoned.add(action.worker)
                self.die(action.worker)

    def hand_out(self, items: Iterable[ev.Item]) -> None:
        """What a replacement is asked for again was handed out when it was thought smaller."""
        for item in items:
            if isinstance(item, ev.Task) and id(item) not in self.handed_out:
                self.handed_out[id(item)] = item
                self.nothing_too_much_is_handed_out()

    def draw(self) -> None:
        while self.due > 0:
            self.due -= 1
            if self.sampler:
                self.known[self.machine.epoch, self.sampler[0]] = self.announced
            self.tell(ev.Drawn(self.sampler.pop(0)) if self.sampler else ev.DRAINED)

    def die(self, worker: int, **how: bool) -> None:
        self.hear(worker, len(self.outboxes[worker]))
        self.living.discard(worker)
        self.inboxes[worker].clear()
        how = how or {"outside": True}
        self.tell(died(worker, self.generations[worker], self.now, **how))

    def hear(self, worker: int, count: int) -> None:
        for _ in range(count):
            event = self.outboxes[worker].popleft()
            if isinstance(event, ev.BatchReady):
                self.heard[worker].append(event.result)
                if event.nbytes is not None:
                    self.largest = max(self.largest or 0, event.nbytes)
            else:
                self.heard[worker].append((-1, -1))
            self.tell(event)

    def room_changes(self) -> None:
        room = self.budget
        if room is not None and self.cap is not None:
            room = min(room, self.cap)
        if room is not None:
            room = 0 if self.alone else room - self.others
        self.tell(ev.RoomChanged(room))

    def size(self, index: int) -> int:
        return max(1, self.sizes[index % len(self.sizes)])

    def ready(self, worker: int) -> bool:
        return self.machine.seats[worker].ready

    def outstanding(self) -> int:
        """Tasks of this epoch that no worker has answered."""
        items = [item for seat in self.machine.seats for item in seat.items]
        return sum(isinstance(item, ev.Task) and item.epoch == self.machine.epoch for item in items)

    # -- what can happen ------------------------------------------------------------------

    @rule()
    def batches_come_quickly(self) -> None:
        self.tell(ev.HURRIED)
        self.draw()

    @rule(worker=st.integers(0, 3), items=st.integers(1, 4))
    def a_worker_answers(self, worker: int, items: int) -> None:
        if worker >= self.machine.workers or worker in self.frozen:
            return
        generation = self.generations[worker]
        if worker in self.living and not self.ready(worker):
            self.tell(ev.WorkerReady(worker, generation))
        for _ in range(min(items, len(self.inboxes[worker]))):
            item = self.inboxes[worker].popleft()
            if isinstance(item, ev.Task):
                # Each notice once, in order, and before exactly those tasks that came after it.
                assert self.told[worker] == list(range(self.known[item.epoch, item.index]))
                event: ev.Event = ev.BatchReady(
                    worker,
                    generation,
                    item.number,
                    (item.epoch, item.index),
                    self.sizes[item.index % len(self.sizes)] or None,  # 0: an error
                )
            elif isinstance(item, ev.Notice):
                self.told[worker].append(item.change)
                event = ev.Told(worker, generation)
            else:
                event = ev.Resumed(worker, generation)
            self.outboxes[worker].append(event)

    @rule()
    def something_is_announced(self) -> None:
        self.tell(ev.Announced(self.announced))
        self.announced += 1

    @rule(worker=st.integers(0, 3), count=st.integers(1, 5))
    def answers_arrive(self, worker: int, count: int) -> None:
        if worker < self.machine.workers:
            self.hear(worker, min(count, len(self.outboxes[worker])))

    @rule(worker=st.integers(0, 3), at_once=st.booleans())
    def workers_die(self, worker: int, at_once: bool) -> None:
        for one in range(self.machine.workers) if at_once else [worker]:
            if one in self.living:
                if not self.ready(one):
                    self.tell(ev.WorkerReady(one, self.generations[one]))
                self.die(one)

    @rule(worker=st.integers(0, 3))
    def it_is_killed_while_it_starts(self, worker: int) -> None:
        """It is started again, at once or in a moment, however often that happens."""
        if worker not in self.living or self.ready(worker):
            return
        self.die(worker)
        assert self.machine.failure is None
        state = self.machine.seats[worker].state
        assert (worker in self.living) != (state is SeatState.PAUSED)
        assert self.restarted is (ev.Restart.NOW if worker in self.living else ev.Restart.LATER)

    @rule(worker=st.integers(0, 3))
    def a_start_finds_no_room(self, worker: int) -> None:
        """Others go on; this one is started again when its time has come, and not before."""
        if worker not in self.living or self.ready(worker):
            return
        if self.machine.seats[worker].tries >= LIMITS.tries - 1:
            return
        before = list(self.machine.restarts.counted)
        self.die(worker, shortage=True)
        assert worker not in self.living
        assert list(self.machine.restarts.counted) == before
        wanted = self.machine.deadline()
        assert wanted is not None
        assert wanted <= self.now + LIMITS.longest_pause

    @rule(worker=st.integers(0, 3), then=st.sampled_from(["is frozen", "dies", "goes on"]))
    def a_worker_stalls(self, worker: int, then: str) -> None:
        if worker >= self.machine.workers or not self.machine.seats[worker].busy:
            return
        if not self.ready(worker):
            self.tell(ev.WorkerReady(worker, self.generations[worker]))
        self.tell(ev.WorkerStalled(worker, self.generations[worker], self.now))
        assert self.machine.seats[worker].state is SeatState.DUMPING
        if then == "goes on":
            self.tell(ev.WorkerWentOn(worker, self.generations[worker]))
            assert self.machine.seats[worker].state is SeatState.RUNNING
            return
        self.frozen.add(worker)
        if then == "dies":
            self.die(worker)

    @rule(worker=st.integers(0, 3), astray=st.booleans())
    def a_worker_goes_by_itself(self, worker: int, astray: bool) -> None:
        """Because of its size, or because it has not found where its stream was."""
        if worker not in self.living or not self.machine.seats[worker].at_work:
            return
        self.a_worker_answers(worker, 1)
        self.hear(worker, len(self.outboxes[worker]))
        generation = self.generations[worker]
        before = list(self.machine.restarts.counted)
        event: ev.Event = ev.WorkerRetired(worker, generation, self.now)
        if astray:
            event = ev.ResumptionFailed(worker, generation, self.now, frozenset({"state"}))
        self.tell(event)
        self.frozen.add(worker)
        self.die(worker)
        assert list(self.machine.restarts.counted) == before

    @rule(nbytes=st.integers(0, 60))
    def another_loader_has_so_much_in_flight(self, nbytes: int) -> None:
        self.others = nbytes
        self.room_changes()

    @rule(alone=st.booleans(), cap=st.none() | st.integers(0, 30))
    def pressure_changes(self, alone: bool, cap: int | None) -> None:
        self.alone, self.cap = alone, cap
        self.room_changes()

    @rule()
    def the_consumer_unpacks(self) -> None:
        self.unread = 0 if self.taken is None else self.unread
        if self.taken is None:
            self.tell(ev.UNPACKED)

    @rule(seconds=st.floats(0.1, 2.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.tell(ev.Ticked(self.now))

    @rule()
    def a_ghost_speaks(self) -> None:
        """Events of generations that are over change nothing."""
        for worker, generation in self.generations.items():
            if generation > 0:
                before = self.outstanding()
                assert not self.machine.handle(died(worker, generation - 1, self.now))
                ready = ev.BatchReady(worker, generation - 1, 0, "ghost")
                assert not self.machine.handle(ready)
                assert self.outstanding() == before

    @precondition(lambda self: not self.ended)
    @rule()
    def the_consumer_asks(self) -> None:
        """And takes what it gets, now or when it comes by again."""
        if self.taken is None:
            self.unread = 0
            self.tell(ev.ASKED)
        taken, self.taken = self.taken, None
        if isinstance(taken, ev.Delivery):
            epoch, index = taken.result
            assert epoch == self.machine.epoch
            assert index == taken.task.index
            self.unread = self.size(index)
            self.delivered.append(index)
            self.draw()
        elif taken is ev.END:
            self.ended = True
            assert sorted(self.delivered) == list(range(self.length))

    @precondition(lambda self: self.machine.persistent)
    @rule()
    def a_new_epoch_begins(self) -> None:
        self.sampler = list(range(self.length))
        self.delivered = []
        self.ended = False
        self.unread = self.due = 0
        self.taken = None
        self.tell(ev.EpochBegan())
        self.draw()

    # -- what must hold -------------------------------------------------------------------

    def nothing_too_much_is_handed_out(self) -> None:
        """If all sizes are known: never more in flight than allowed, but for one alone."""
        if self.budget is None or self.largest != max(1, *self.sizes):
            return
        mine = sum(isinstance(item, ev.Task) for seat in self.machine.seats for item in seat.items)
        mine += sum(task.state is ev.TaskState.DONE for task in self.machine._tasks.values())
        if mine > 1:
            # What was handed out before another loader took more is not taken back.
            assert self.machine.in_flight <= self.budget or self.others

    @invariant()
    def the_books_are_right(self) -> None:
        if not hasattr(self, "machine"):
            return
        items = [item for seat in self.machine.seats for item in seat.items]
        making = sum(isinstance(one, ev.Task) for one in items)
        done = [one for one in self.machine._tasks.values() if one.state is ev.TaskState.DONE]
        unread = self.unread
        if isinstance(self.taken, ev.Delivery):
            unread = self.size(self.taken.task.index)  # the consumer has not come by yet
        arrived = sum(self.size(task.index) for task in done) + unread
        assert self.machine.largest == self.largest
        assert self.machine.in_flight == making * (self.largest or 1) + arrived
        assert self.machine.peak >= self.machine.in_flight

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
    def seats_and_processes_agree(self) -> None:
        if hasattr(self, "machine"):
            assert {seat.id for seat in self.machine.seats if seat.alive} == self.living

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
            self.time_passes(LIMITS.longest_pause)
            for worker in range(self.machine.workers):
                if worker in self.frozen and worker in self.living:
                    self.die(worker)
                self.a_worker_answers(worker, 100)
                self.hear(worker, len(self.outboxes[worker]))
            self.the_consumer_asks()
        assert self.ended, "the run did not end"


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def test_tasks_go_to_workers_in_turn() -> None:
    player = Player(3, 2)
    player.begin()
    actions = player.fill(list(range(9)))
    assert [(a.worker, a.item.index) for a in actions] == [
        (0, 0), (1, 1), (2, 2), (0, 3), (1, 4), (2, 5)
    ]  # fmt: skip


def test_a_replacement_is_asked_for_what_was_not_answered_and_nothing_else() -> None:
    player = Player(1, 3)
    player.begin()
    player.fill(list(range(3)))
    player.handle(ev.WorkerReady(0, 0))
    player.handle(ev.BatchReady(0, 0, 0, "zero"))
    start, *dispatched = player.handle(died(0, 0, 1.0))
    assert start == ev.Start(0, 1, answered=1, epochs_done=0, batches_done=1, exhausted=False)
    assert [action.item.number for action in dispatched] == [1, 2]


def test_an_idle_worker_that_dies_is_replaced_because_more_may_come() -> None:
    player = Player(1, 1)
    player.begin()
    player.fill([0])
    player.handle(ev.WorkerReady(0, 0))
    player.handle(ev.BatchReady(0, 0, 0, "zero"))
    actions = player.handle(died(0, 0, 1.0))
    assert [type(action) for action in actions] == [ev.Start]


def test_a_worker_with_nothing_left_to_do_is_not_replaced() -> None:
    player = Player(1, 1)
    player.begin()
    player.fill([0])
    player.handle(ev.WorkerReady(0, 0))
    player.handle(ev.BatchReady(0, 0, 0, "zero"))
    assert isinstance(player.take(), ev.Delivery)
    player.fill([])
    assert player.handle(died(0, 0, 1.0)) == []
    assert player.take() is ev.END


def test_more_deaths_than_allowed_end_it_after_the_finished_batches_are_delivered() -> None:
    player = Player(1, 3, restarts=ev.RestartPolicy(1, 10.0))
    player.begin()
    player.fill([0, 1, 2])
    player.handle(ev.WorkerReady(0, 0))
    player.handle(died(0, 0, 1.0))
    player.handle(ev.WorkerReady(0, 1))
    player.handle(ev.BatchReady(0, 1, 0, "zero"))
    assert player.handle(died(0, 1, 2.0)) == []
    first = player.take()
    assert isinstance(first, ev.Delivery)
    assert first.result == "zero"
    failure = player.take()
    assert isinstance(failure, ev.GaveUp)
    assert failure.reason == "restart-limit"
    assert len(failure.deaths) == 2


def test_deaths_that_are_far_apart_do_not_add_up() -> None:
    player = Player(1, 1, restarts=ev.RestartPolicy(1, 10.0))
    player.begin()
    player.fill([0])
    for generation in range(20):
        player.handle(ev.WorkerReady(0, generation))
        assert player.handle(died(0, generation, generation * 11.0))
    assert player.failure is None


def test_a_worker_that_never_gets_ready_is_given_up() -> None:
    player = Player(1, 1)
    player.begin()
    player.fill([0])
    for generation in range(LIMITS.failed_starts - 1):
        assert player.handle(died(0, generation))
    assert player.handle(died(0, LIMITS.failed_starts - 1, 0.0)) == []
    failure = player.take()
    assert isinstance(failure, ev.GaveUp)
    assert failure.reason == "cannot-start"


def test_without_a_limit_a_worker_killed_while_it_starts_is_started_again_after_pauses() -> None:
    player = Player(1, 1, restarts=ev.RestartPolicy(None, 60.0))
    player.begin()
    player.fill([0])
    now, pauses = 100.0, []
    assert [type(one) for one in player.handle(died(0, 0, now, outside=True))] == [
        ev.Start,
        ev.Dispatch,
    ]
    for generation in range(1, 1000):
        assert player.handle(died(0, generation, now, outside=True)) == []
        assert player.state(0) is SeatState.PAUSED
        wanted = player.deadline()
        assert wanted is not None
        assert player.handle(ev.Ticked(wanted - 0.01)) == []
        actions = player.handle(ev.Ticked(wanted))
        assert [type(action) for action in actions] == [ev.Start, ev.Dispatch]
        pauses.append(wanted - now)
        now = wanted
    assert pauses[:8] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5])
    assert pauses[-1] == pytest.approx(LIMITS.longest_pause)
    player.handle(ev.WorkerReady(0, 1000))
    player.handle(ev.BatchReady(0, 1000, 0, "zero"))
    delivery = player.take()
    assert isinstance(delivery, ev.Delivery)
    assert delivery.result == "zero"


def test_being_killed_while_starting_counts_towards_the_limit_and_is_nothing_else() -> None:
    limit = 30
    player = Player(1, 1, restarts=ev.RestartPolicy(limit, 1000.0))
    player.begin()
    player.fill([0])
    now = 0.0
    for generation in range(limit + 1):
        assert player.failure is None
        player.handle(died(0, generation, now, outside=True))
        now = player.deadline() or now
        player.handle(ev.Ticked(now))
    failure = player.take()
    assert isinstance(failure, ev.GaveUp)
    assert failure.reason == "restart-limit"
    assert len(failure.deaths) == limit + 1


@pytest.mark.parametrize("outside", [False, True])
def test_who_ends_by_itself_whenever_it_catches_up_is_given_up_and_who_is_killed_is_not(
    outside: bool,
) -> None:
    """It has started, so there is no pause; what it answers clears the count."""
    player = Player(1, 1, iterable=True)
    player.begin()
    player.fill([None] * 2)
    player.handle(ev.WorkerReady(0, 0))
    player.handle(ev.BatchReady(0, 0, 0, "zero"))
    assert isinstance(player.take(), ev.Delivery)
    player.fill([None] * 2)
    player.handle(died(0, 0, 0.0, outside=True))
    deaths = 0
    while player.failure is None and deaths < 100:
        generation = player.generation(0)
        player.handle(ev.WorkerReady(0, generation))
        player.handle(died(0, generation, 1.0 + deaths, outside=outside, catching_up=True))
        assert player.state(0) is not SeatState.PAUSED
        deaths += 1
    if outside:
        assert player.failure is None
    else:
        assert deaths == LIMITS.failed_starts
        assert player.failure is not None
        assert player.failure.reason == "cannot-catch-up"


def test_after_two_stalls_on_a_lock_held_at_the_fork_there_is_another_fork_and_no_sample_is_blamed() -> (
    None
):
    player = Player(2, 1)
    player.begin()
    player.fill([0, 1])
    renewed = []
    for number in range(2 * r.MAX_RENEWALS):
        generation = player.generation(0)
        player.handle(ev.WorkerReady(0, generation))
        actions = player.handle(died(0, generation, float(number), (0, 0), inherited=True))
        renewed.append([type(one) for one in actions if not isinstance(one, ev.Dispatch)])
        assert not player.on_trial(0)
    assert renewed == [[ev.Start], [ev.RenewNursery, ev.Start]] * r.MAX_RENEWALS
    # It is always held: what happens to those who wait for it is what happens to any that stall.
    for _ in range(2):
        generation = player.generation(0)
        player.handle(ev.WorkerReady(0, generation))
        player.handle(died(0, generation, 99.0, (0, 0), inherited=True))
    delivery = player.take()
    assert isinstance(delivery, ev.Delivery)
    assert isinstance(delivery.result, ev.Poisoned)


def test_kills_from_outside_do_not_hide_that_a_worker_cannot_start() -> None:
    player = Player(1, 1, restarts=ev.RestartPolicy(None, 60.0))
    player.begin()
    player.fill([0])
    now = 0.0
    for generation in range(2 * LIMITS.failed_starts):
        assert player.failure is None
        player.handle(died(0, generation, now, outside=generation % 2 == 0))
        now = player.deadline() or now
        player.handle(ev.Ticked(now))
    assert player.failure is not None
    assert player.failure.reason == "cannot-start"


def test_a_start_that_finds_no_room_is_tried_after_longer_and_longer_pauses() -> None:
    player = Player(1, 1, restarts=ev.RestartPolicy(0, 60.0))
    player.begin()
    player.fill([0])
    now, pauses = 100.0, []
    for generation in range(LIMITS.tries - 1):
        assert player.handle(died(0, generation, now, shortage=True)) == []
        wanted = player.deadline()
        assert wanted is not None
        assert player.handle(ev.Ticked(wanted - 0.01)) == []
        actions = player.handle(ev.Ticked(wanted))
        assert [type(action) for action in actions] == [ev.Start, ev.Dispatch]
        pauses.append(wanted - now)
        now = wanted
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5, 5, 5])
    assert player.handle(died(0, LIMITS.tries - 1, now, shortage=True)) == []
    failure = player.take()
    assert isinstance(failure, ev.GaveUp)
    assert failure.reason == "shortage"
    assert [death.at for death in failure.deaths][-1] == now
    assert len(failure.deaths) == LIMITS.tries
    assert player.deadline() is None


def test_a_start_that_fails_again_is_not_told_again_and_what_comes_with_it_is_handed_out() -> None:
    """Another loader has given memory back meanwhile."""
    player = Player(2, 1, largest=10)
    player.handle(ev.RoomChanged(10))
    player.begin()
    assert numbers(player.fill([0, 1])) == [0]
    assert player.handle(died(0, 0, 0.0, shortage=True)) == []
    (told,) = player.reports
    assert (told.outcome, told.restart) == (ev.Outcome.TRIED_AGAIN, ev.Restart.NO)
    player.handle(ev.Ticked(0.2))
    player.machine.room = 20
    assert numbers(player.handle(died(0, 1, 0.2, shortage=True))) == [1]
    assert player.reports == [told]


def test_others_go_on_while_a_start_waits_and_what_is_due_waits_with_it() -> None:
    player = Player(2, 1)
    player.begin()
    player.fill(indices := [0, 1, 2, 3])
    assert player.handle(died(0, 0, 0.0, shortage=True)) == []
    player.handle(ev.WorkerReady(1, 0))
    player.handle(ev.BatchReady(1, 0, 1, "one"))
    assert player.take() is None
    start = player.handle(ev.Ticked(0.1))[0]
    assert start == ev.Start(0, 1, 0, 0, 0, False)
    player.handle(ev.WorkerReady(0, 1))
    player.handle(ev.BatchReady(0, 1, 0, "zero"))
    for expected in ("zero", "one"):
        delivery = player.take()
        assert isinstance(delivery, ev.Delivery)
        assert delivery.result == expected
        player.fill(indices)
    player.handle(died(0, 1, 1.0))
    assert player.handle(died(0, 2, 1.0, shortage=True)) == []
    assert player.deadline() == pytest.approx(1.1)  # once it was ready, the pauses begin anew


def test_nobody_is_started_later_for_whom_there_is_nothing_left() -> None:
    player = Player(2, 1)
    player.begin()
    player.fill([])
    assert player.handle(died(0, 0, 0.0, shortage=True)) == []
    assert player.handle(ev.Ticked(10.0)) == []
    assert player.deadline() is None
    assert player.take() is ev.END


def test_a_sample_that_kills_alone_too_is_named_and_the_rest_goes_on() -> None:
    player = Player(1, 2)
    player.begin()
    player.fill([10, 11])
    for generation in range(2):
        player.handle(ev.WorkerReady(0, generation))
        actions = player.handle(died(0, generation, 0.0, (0, 3)))
    assert [a.item.number for a in actions if isinstance(a, ev.Dispatch)] == [1]
    delivery = player.take()
    assert isinstance(delivery, ev.Delivery)
    assert isinstance(delivery.result, ev.Poisoned)
    assert delivery.result.position == 3
    assert len(delivery.result.deaths) == 2


def test_different_samples_are_not_blamed_for_each_other() -> None:
    player = Player(1, 1)
    player.begin()
    player.fill([0])
    for number in range(10):
        generation = player.generation(0)
        player.handle(ev.WorkerReady(0, generation))
        assert player.handle(died(0, generation, 0.0, (0, number % 2)))
        if player.on_trial(0):
            player.handle(ev.WorkerReady(0, player.generation(0)))
            player.handle(ev.Survived(0, player.generation(0)))
    assert player.take() is None


def test_a_stalled_worker_is_dumped_then_killed_then_left_behind() -> None:
    player = Player(1, 1)
    player.begin()
    player.fill([0])
    player.handle(ev.WorkerReady(0, 0))
    assert player.handle(ev.WorkerStalled(0, 0, 100.0)) == [ev.Dump(0, 0)]
    assert player.deadline() == 100.0 + LIMITS.kill_after
    assert player.handle(ev.Ticked(100.1)) == []
    assert player.handle(ev.Ticked(100.0 + LIMITS.kill_after)) == [ev.Kill(0, 0)]
    killed = 100.0 + LIMITS.kill_after
    assert player.handle(ev.Ticked(killed + 0.5)) == []
    assert player.handle(ev.Ticked(killed + LIMITS.abandon_after)) == [ev.Abandon(0, 0)]


@pytest.mark.parametrize("ready", [False, True])
def test_a_worker_that_goes_on_while_it_is_looked_at_is_left_alone(ready: bool) -> None:
    player = Player(1, 1)
    player.begin()
    player.fill([0])
    if ready:
        player.handle(ev.WorkerReady(0, 0))
    player.handle(ev.WorkerStalled(0, 0, 100.0))
    assert player.handle(ev.WorkerWentOn(0, 0)) == []
    assert player.deadline() is None
    if not ready:
        player.handle(ev.WorkerReady(0, 0))
    player.handle(ev.BatchReady(0, 0, 0, "zero"))
    assert player.patience(0) == 1
    assert player.handle(ev.WorkerStalled(0, 0, 200.0)) == [ev.Dump(0, 0)]
    player.handle(ev.Ticked(200.0 + LIMITS.kill_after))
    assert player.handle(ev.WorkerWentOn(0, 0)) == []  # it was killed meanwhile
    assert player.machine.seats[0].state is SeatState.KILLING


def test_what_the_last_answer_of_an_abandoned_worker_makes_room_for_goes_to_its_replacement() -> (
    None
):
    """The driver tells the last answers before the exit: the machine cannot know of it yet."""
    player = Player(1, 2, before_sizes_are_known="one-each")
    player.begin()
    player.fill([0, 1])
    player.handle(ev.WorkerReady(0, 0))
    player.handle(ev.WorkerStalled(0, 0, 0.0))
    player.handle(ev.Ticked(killed := LIMITS.kill_after))
    assert player.handle(ev.Ticked(killed + LIMITS.abandon_after)) == [ev.Abandon(0, 0)]
    assert numbers(player.handle(ev.BatchReady(0, 0, 0, "zero", 1))) == [1]
    assert numbers(player.handle(died(0, 0, killed))) == [1]
    player.handle(ev.WorkerReady(0, 1))
    player.handle(ev.BatchReady(0, 1, 1, "one", 1))
    for expected in ("zero", "one"):
        delivery = player.take()
        assert isinstance(delivery, ev.Delivery)
        assert delivery.result == expected


def test_patience_doubles_after_a_stall_and_returns_with_an_answer() -> None:
    player = Player(1, 1)
    player.begin()
    player.fill([0])
    player.handle(ev.WorkerReady(0, 0))
    assert player.patience(0) == 1
    player.handle(ev.WorkerStalled(0, 0, 1.0))
    player.handle(died(0, 0, 1.0))
    assert player.patience(0) == 2
    player.handle(ev.BatchReady(0, 1, 0, "zero"))
    assert player.patience(0) == 1


def test_replicas_that_end_drop_out_of_the_turn() -> None:
    player = Player(2, 2, iterable=True)
    player.begin()
    endless = [None] * 100
    player.fill(endless)
    for worker in range(2):
        player.handle(ev.WorkerReady(worker, 0))
    player.handle(ev.ReplicaEnded(0, 0, 0))
    player.fill(endless)
    for number in (1, 3, 4):
        player.handle(ev.BatchReady(1, 0, number, number))
    seen = []
    while isinstance(delivery := player.take(), ev.Delivery):
        seen.append(delivery.result)
        actions = player.fill(endless)
        assert all(action.worker == 1 for action in actions)
    assert seen == [1, 3, 4]


def test_a_replica_cannot_go_past_a_sample_that_kills() -> None:
    player = Player(1, 2, iterable=True)
    player.begin()
    player.fill([None] * 2)
    for generation in range(2):
        player.handle(ev.WorkerReady(0, generation))
        actions = player.handle(died(0, generation, 0.0, (0, 0)))
    assert actions == []
    delivery = player.take()
    assert isinstance(delivery, ev.Delivery)
    assert isinstance(delivery.result, ev.Poisoned)
    player.fill([None] * 2)
    assert player.take() is ev.END


def numbers(actions: list[ev.Action]) -> list[int]:
    """Of the tasks that are handed out."""
    items = [action.item for action in actions if isinstance(action, ev.Dispatch)]
    return [item.number for item in items if isinstance(item, ev.Task)]


@pytest.mark.parametrize(("at_first", "at_once"), [("one", 1), ("one-each", 2)])
def test_an_answer_that_brings_no_batch_says_nothing_of_how_large_they_are(
    at_first: m.BeforeSizesAreKnown, at_once: int
) -> None:
    """It is not known yet: one to see, or one for each worker where no limit was set."""
    player = Player(2, 4, before_sizes_are_known=at_first)
    player.handle(ev.RoomChanged(100))
    player.begin()
    indices = list(range(20))
    out = [action.item.number for action in player.fill(indices)]
    assert out == list(range(at_once))
    for worker in range(2):
        player.handle(ev.WorkerReady(worker, 0))
    for number in range(4):
        worker = number % 2
        out += numbers(player.handle(ev.BatchReady(worker, 0, number, "an error")))
        assert isinstance(player.take(), ev.Delivery)
        out += numbers([*player.handle(ev.UNPACKED), *player.fill(indices)])
        assert player.machine.largest is None
        assert len(out) <= number + 1 + at_once
    player.handle(ev.BatchReady(0, 0, 4, "a batch", 60))
    assert player.machine.largest == 60


@pytest.mark.parametrize("in_order", [True, False])
def test_what_a_batch_costs_does_not_depend_on_the_number_of_workers(in_order: bool) -> None:
    """In lines of the machine's that are run, which does not depend on how busy the computer is."""
    few, many = (lines_for_a_batch(workers, in_order) for workers in (2, 500))
    assert many <= 1.05 * few


def lines_for_a_batch(workers: int, in_order: bool) -> float:
    player = Player(workers, 2, in_order=in_order, largest=1)
    player.handle(ev.RoomChanged(workers))
    orders: deque[ev.Dispatch] = deque()
    lines = 0

    def count(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line" and frame.f_globals["__name__"] == m.__name__
        return count

    def obey(actions: list[ev.Action]) -> None:
        orders.extend(one for one in actions if isinstance(one, ev.Dispatch))

    def batch() -> None:
        obey(player.fill([None] * player.due))
        while not isinstance(player.take(), ev.Delivery):
            order = orders.popleft()
            assert isinstance(order.item, ev.Task)
            obey(player.handle(ev.BatchReady(order.worker, 0, order.item.number, None, 1)))
        obey(player.handle(ev.UNPACKED))

    player.begin()
    for _ in range(2 * workers):
        batch()
    before = sys.gettrace()
    sys.settrace(count)
    try:
        for _ in range(1000):
            batch()
    finally:
        sys.settrace(before)
    return lines / 1000


def hurried(sizes: list[int], workers: int = 2, length: int = 200) -> tuple[list[int], list[int]]:
    """Play a loader whose batches come quickly and have these sizes; what is ahead before each
    batch, and how many are drawn after it."""
    machine = m.Machine(workers=workers, prefetch=2, restarts=UNLIMITED, may_deepen=True)
    waiting: deque[ev.Dispatch] = deque()
    sampler = deque(range(length))
    ahead, drawn, due = [], [], 0

    def tell(event: ev.Event) -> list[ev.Delivery]:
        nonlocal due
        found = []
        for action in machine.handle(event):
            if isinstance(action, ev.Dispatch):
                waiting.append(action)
            elif isinstance(action, ev.Draw):
                due += action.count
            elif isinstance(action, ev.Deliver):
                found.append(action.what)
        return [one for one in found if isinstance(one, ev.Delivery)]

    def draw() -> int:
        nonlocal due
        count = 0
        while due > 0:
            due -= 1
            count += 1
            tell(ev.Drawn(sampler.popleft(), ()) if sampler else ev.DRAINED)
        return count

    tell(ev.Began())
    for worker in range(workers):
        tell(ev.WorkerReady(worker, 0))
    draw()
    for number in range(length):
        ahead.append(len(waiting))
        one = waiting.popleft()
        assert isinstance(one.item, ev.Task)
        nbytes = sizes[min(number, len(sizes) - 1)]
        tell(ev.BatchReady(one.worker, 0, one.item.number, None, nbytes))
        (delivery,) = tell(ev.ASKED)
        assert delivery.task.number == number
        if number == 2:
            tell(ev.HURRIED)
        drawn.append(draw())
    (last,) = machine.handle(ev.ASKED)
    assert isinstance(last, ev.Deliver)
    assert last.what is ev.END
    return ahead, drawn


def test_small_batches_that_come_quickly_are_drawn_several_at_a_time_and_further_ahead() -> None:
    ahead, drawn = hurried([100])
    assert ahead[:3] == [4, 4, 4]
    assert ahead[3] == 32
    assert min(ahead[3:160]) == 25  # never less than three quarters, until the sampler is empty
    assert set(drawn[3:160]) == {0, 8}


def test_large_batches_are_not_made_further_ahead_however_quickly_they_come() -> None:
    ahead, drawn = hurried([1 << 20])
    assert max(ahead) == 4
    assert set(drawn) == {1}


def test_what_is_ahead_falls_when_batches_turn_out_to_be_larger() -> None:
    ahead, _ = hurried([100] * 50 + [1 << 18] * 150)
    assert ahead[49] > 20
    assert max(ahead[90:]) == 8
    assert min(ahead[90:180]) > 4
