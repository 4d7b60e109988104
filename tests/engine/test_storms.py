"""Storms at the machine: workers are killed from outside at any rate and in any rhythm, and no
sample is convicted for having been there; one that really kills is, after five deaths at most.

Time is simulated. A worker boots, waits before a sample on trial if it is told to, and loads one
sample after the other; the storm strikes whatever it is doing. Dice are seeded, so a run is the
same every time.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine import events as ev
from holdfast.engine.seats import SeatState
from tests.engine.playing import Player, died

SIZE = 4  # samples in a batch
Storm = Callable[[random.Random], Iterator[float]]
"""The moments in which it strikes, from 0 on; or, below zero, how long after each start."""


def calm(dice: random.Random) -> Iterator[float]:
    return iter(())


def by_chance(pace: float) -> Storm:
    def strikes(dice: random.Random) -> Iterator[float]:
        return itertools.accumulate(dice.expovariate(1 / pace) for _ in itertools.count())

    return strikes


def by_the_clock(pace: float) -> Storm:
    return lambda dice: itertools.count(pace, pace)


def in_gusts(pace: float) -> Storm:
    """Five in quick succession, then nothing for a while."""

    def strikes(dice: random.Random) -> Iterator[float]:
        now = 0.0
        while True:
            now += pace * 5 * (0.5 + dice.random())
            yield from (now + pace / 20 * number for number in range(5))

    return strikes


@dataclass
class World:
    """One worker and what happens to it."""

    storm: Storm
    sample: float  # seconds it takes to load one
    boot: float = 0.01
    jitter: float = 0.002  # of everything, and of when a death is noticed
    age: float = math.inf  # every worker that is so old is killed from outside
    killer: tuple[int, int] | None = None  # batch and position
    fuse: float = 0.0  # seconds after which that one kills
    facts: dict[str, bool] = field(default_factory=lambda: {"outside": True})
    leaves_out: bool = False
    iterable: bool = False
    seed: int = 0
    now: float = 0.0
    deaths: int = 0
    batches: int = 0
    named: tuple[int, int | None] | None = None

    def run(self, kills: int, batches: int) -> None:
        """Until so many deaths or batches, or until a sample is named."""
        dice = random.Random(self.seed)
        strikes = self.storm(dice)
        strike = next(strikes, math.inf)
        player = Player(1, 1, leaves_out=self.leaves_out, iterable=self.iterable)
        orders = self._orders(player.begin())
        orders += self._orders(player.draw(0))
        left_out: set[tuple[int, int]] = set()
        while self.deaths < kills and self.batches < batches and self.named is None:
            born = self.now
            while strike <= born:
                strike = next(strikes, math.inf)
            end = min(strike, born + self.age)
            self.now += self.boot + self.jitter * dice.random()
            if self.now < end:
                player.handle(ev.WorkerReady(0, player.generation(0)))
            blamed, began, own = self._live(player, orders, end, dice, left_out, batches)
            if self.batches >= batches:
                return
            self.now = self.now if own else end
            self.deaths += 1
            noticed = self.now + self.jitter * dice.random()
            after = None if began is None else noticed - began
            facts = self.facts if own else {"outside": True}
            exit = died(0, player.generation(0), noticed, blamed, after=after, **facts)
            actions = player.handle(exit)
            self.now = noticed
            if player.state(0) is SeatState.PAUSED:
                self.now = player.deadline() or self.now
                actions += player.handle(ev.Ticked(self.now))
            for one in actions:
                if isinstance(one, ev.BanSample):
                    self.named = (one.task.number, one.sample)
            self._deliver(player, actions)
            orders = self._orders(actions)

    def _live(
        self,
        player: Player,
        orders: list[ev.Item],
        end: float,
        dice: random.Random,
        left_out: set[tuple[int, int]],
        batches: int,
    ) -> tuple[tuple[int, int | None] | None, float | None, bool]:
        """Do what is ordered until it dies: at which sample, begun when, and of it?"""
        while orders and self.now < end:
            item = orders[0]
            on_trial = isinstance(item, ev.IsolationTest)
            task = item.task if isinstance(item, ev.IsolationTest) else item
            assert isinstance(task, ev.Task)
            if isinstance(item, ev.IsolationTest):
                self.now += item.pause
                if self.now >= end:
                    return None, None, False
            positions = [item.sample] if isinstance(item, ev.IsolationTest) else range(SIZE)
            for position in positions:
                began = self.now
                known = began if on_trial else None
                blamed = (task.number, position)
                if (task.number, position) == self.killer:
                    if began + self.fuse < end:
                        self.now = began + self.fuse
                        return blamed, known, True
                    return blamed, known, False
                self.now += self.sample + self.jitter * dice.random() / 10
                if self.now >= end:
                    return blamed, known, False
            orders.pop(0)
            generation = player.generation(0)
            if on_trial:
                player.handle(ev.Survived(0, generation))
            else:
                self.batches += 1
                player.handle(ev.BatchReady(0, generation, task.number, task.number))
                if self.batches >= batches:
                    return None, None, False
                orders += self._deliver(player, [])
        return None, None, False

    def _deliver(self, player: Player, actions: list[ev.Action]) -> list[ev.Item]:
        taken = player.take()
        if not isinstance(taken, ev.Delivery):
            return []
        if isinstance(taken.result, ev.Poisoned):
            self.named = (taken.result.task.number, taken.result.position)
        actions = player.draw(taken.task.number + 1)
        return self._orders(actions)

    @staticmethod
    def _orders(actions: list[ev.Action]) -> list[ev.Item]:
        return [one.item for one in actions if isinstance(one, ev.Dispatch)]


PACES = [0.005, 0.04, 0.3, 2.0, 5.0]
SAMPLES = [0.0005, 0.02, 0.25, 3.0]  # up to where no sample and no trial can ever be finished


@pytest.mark.slow
@pytest.mark.parametrize("storm", [by_chance, by_the_clock, in_gusts])
@pytest.mark.parametrize("leaves_out", [False, True])
def test_no_storm_convicts_a_sample_at_any_rate(
    storm: Callable[[float], Storm], leaves_out: bool
) -> None:
    for pace, sample in itertools.product(PACES, SAMPLES):
        world = World(storm(pace), sample, leaves_out=leaves_out)
        world.run(kills=400, batches=4000)
        assert world.named is None, (pace, sample, world.deaths)
        assert world.deaths == 400 or world.batches == 4000


@pytest.mark.parametrize("age", [0.02, 0.3, 1.2, 2.5, 7.0])
def test_somebody_who_kills_workers_of_a_certain_age_convicts_no_sample(age: float) -> None:
    """Which is always at the same sample, and always in the same instant of a worker's life."""
    for sample in SAMPLES:
        world = World(calm, sample, age=age, jitter=0.0001)
        world.run(kills=300, batches=2000)
        assert world.named is None, (age, sample)


def test_a_storm_over_a_stream_convicts_no_element() -> None:
    for pace, sample in itertools.product(PACES, SAMPLES):
        world = World(by_chance(pace), sample, iterable=True)
        world.run(kills=400, batches=4000)
        assert world.named is None


def test_a_storm_lets_a_run_go_on_that_could_go_on_without_trials() -> None:
    """Trials cost some of the time between two strikes, and never all of it."""
    world = World(by_chance(0.04), 0.004)
    world.run(kills=3000, batches=10**9)
    assert world.named is None
    assert world.batches > 200


@given(
    fuse=st.floats(0, 0.03),
    sample=st.floats(0.0001, 1.0),
    leaves_out=st.booleans(),
    seed=st.integers(0, 1 << 16),
    position=st.integers(0, SIZE - 1),
)
def test_a_sample_that_kills_without_a_trace_is_named_after_five_deaths(
    fuse: float, sample: float, leaves_out: bool, seed: int, position: int
) -> None:
    world = World(calm, sample, killer=(2, position), fuse=fuse, leaves_out=leaves_out, seed=seed)
    world.run(kills=50, batches=50)
    assert world.named == (2, position)
    assert world.deaths <= 5


@pytest.mark.parametrize("leaves_out", [False, True])
@pytest.mark.parametrize(
    ("facts", "deaths"),
    [({}, 2), ({"outside": True, "memory": True}, 3)],
)
def test_one_that_leaves_a_trace_is_named_sooner(
    facts: dict[str, bool], deaths: int, leaves_out: bool
) -> None:
    world = World(calm, 0.01, killer=(2, 1), fuse=2.0, facts=facts, leaves_out=leaves_out)
    world.run(kills=50, batches=50)
    assert world.named == (2, 1)
    assert world.deaths == deaths


def test_one_that_kills_is_named_in_the_middle_of_a_storm_too() -> None:
    """As soon as the storm leaves it the time, and no other is named before."""
    for seed in range(20):
        world = World(by_chance(0.3), 0.001, killer=(2, 1), facts={}, seed=seed)
        world.run(kills=500, batches=10**6)
        assert world.named == (2, 1)


def test_one_that_takes_long_to_kill_without_a_trace_is_not_named() -> None:
    """No wait is long enough to tell it from a storm: it counts as restarts."""
    world = World(calm, 0.01, killer=(2, 1), fuse=2.0)
    world.run(kills=100, batches=50)
    assert world.named is None
    assert world.deaths == 100
