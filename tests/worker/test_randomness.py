"""Random states saved by a worker and brought back by its replacement."""

from __future__ import annotations

import linecache
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.worker.randomness import OWN_AT, Randomness, seed_worker

DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(3).tolist(),
    "torch normal": lambda: torch.randn(1).item(),
    "random": random.random,
    "random gauss": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "numpy gauss": np.random.randn,
    "numpy many": lambda: np.random.randint(0, 9, 700).tolist(),
}


@pytest.fixture(autouse=True)
def _leave_no_trace() -> Any:
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state())
    yield
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    np.random.set_state(before[2])


def some_draws(names: list[str]) -> list[Any]:
    return [DRAWS[name]() for name in names]


class Slots:
    """Where states are kept, as in the black box."""

    def __init__(self) -> None:
        self.slots = [np.zeros(OWN_AT, np.uint8) for _ in range(3)]
        self.kept: list[bytes] = []  # each state that was written

    def free_slot(self) -> Any:
        return self.slots[len(self.kept) % 3]

    def commit(self, number: int, size: int) -> None:
        self.kept.append(self.free_slot().tobytes()[:size])

    def still(self, number: int) -> None:
        pass


def keeps(randomness: Randomness, slots: Slots) -> bool:
    """Whether the present state is another than the last, so that it is written."""
    before = len(slots.kept)
    randomness.keep(slots, 1)
    return len(slots.kept) > before


@pytest.fixture
def randomness(monkeypatch: pytest.MonkeyPatch) -> Randomness:
    made = Randomness()
    monkeypatch.setattr(made, "search_if_due", lambda: False)
    return made


@given(st.lists(st.sampled_from(sorted(DRAWS)), max_size=12), st.integers(0, 2**40))
def test_what_is_drawn_after_restoring_is_what_was_drawn_after_saving(
    names: list[str], seed: int
) -> None:
    seed_worker(seed, 1)
    randomness, slots = Randomness(), Slots()
    for number in range(1, 4):  # the same object saves again and again, with and without changes
        some_draws(names)
        randomness.keep(slots, number)
    everything = [*sorted(DRAWS), *sorted(DRAWS)]
    expected = some_draws(everything)
    seed_worker(seed + 5, 0)
    some_draws(names)
    randomness.restore(slots.kept[-1])
    assert some_draws(everything) == expected


@pytest.mark.parametrize("name", sorted(DRAWS))
def test_every_draw_is_noticed(name: str, randomness: Randomness) -> None:
    seed_worker(7, 0)
    slots = Slots()
    assert keeps(randomness, slots), "nothing was saved yet"
    for draws in range(1, 700):  # more than a twister makes at a time
        DRAWS[name]()
        assert keeps(randomness, slots), f"draw {draws}"


def test_where_nothing_is_drawn_nothing_has_changed(randomness: Randomness) -> None:
    seed_worker(7, 0)
    some_draws(["torch", "random", "numpy", "numpy gauss"])
    slots = Slots()
    assert keeps(randomness, slots)
    assert not keeps(randomness, slots)
    randomness.restore(slots.kept[-1])
    assert not keeps(randomness, slots), "it is the same state again"
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.MT19937(1))
    try:
        assert keeps(randomness, slots), "another generator"
    finally:
        np.random.set_bit_generator(before)
    assert keeps(randomness, slots), "what was saved last is the other one's"


def test_the_quick_way_is_taken_in_this_interpreter(randomness: Randomness) -> None:
    """If it were not, every test here would pass and every batch would cost 90 µs more."""
    assert not any(state.varies for state in randomness._global)


def test_another_bit_generator_is_saved_the_slow_way(randomness: Randomness) -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(7))
    try:
        saved = randomness.saved()
        expected = np.random.rand(4).tolist()
        np.random.rand(9)
        randomness.restore(saved)
        assert np.random.rand(4).tolist() == expected
    finally:
        np.random.set_bit_generator(before)


def test_a_state_that_is_saved_aside_is_not_the_last_one_kept(randomness: Randomness) -> None:
    slots = Slots()
    assert keeps(randomness, slots)
    random.random()
    saved = randomness.saved()
    assert keeps(randomness, slots), "what is kept is the one before"
    expected = random.random()
    randomness.restore(saved)
    assert random.random() == expected


def test_an_empty_slot_is_not_a_state() -> None:
    with pytest.raises(ValueError, match="not a saved random state"):
        Randomness().restore(bytes(OWN_AT))


def test_seeding_reads_no_source() -> None:
    linecache.clearcache()
    seed_worker(7, 0)
    assert not linecache.cache
    assert not hasattr(sys, "tracebacklimit")
    torch.manual_seed(7)
    if not linecache.cache:
        pytest.skip("this torch does not read any either, so there is nothing to be spared")


def test_seeding_leaves_a_limit_of_the_users_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "tracebacklimit", 3, raising=False)
    seed_worker(7, 0)
    assert sys.tracebacklimit == 3
