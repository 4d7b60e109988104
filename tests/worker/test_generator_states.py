"""The state of a single generator, read and written back."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.worker import generator_states
from holdfast.worker.generator_states import state_of
from tests.support.generators import Dice

MAKERS: dict[str, Callable[[int], Any]] = {
    "PCG64": np.random.default_rng,
    "PCG64DXSM": lambda seed: np.random.Generator(np.random.PCG64DXSM(seed)),
    "MT19937": lambda seed: np.random.Generator(np.random.MT19937(seed)),
    "Philox": lambda seed: np.random.Generator(np.random.Philox(seed)),
    "SFC64": lambda seed: np.random.Generator(np.random.SFC64(seed)),
    "RandomState": np.random.RandomState,
    "RandomState of PCG64": lambda seed: np.random.RandomState(np.random.PCG64(seed)),
    "random.Random": random.Random,
    "a subclass": Dice,
    "torch": lambda seed: torch.Generator().manual_seed(seed),
    "SeedSequence": np.random.SeedSequence,
}


def draw(generator: Any, how: int) -> Any:
    if isinstance(generator, np.random.Generator):
        draws: list[Callable[[], Any]] = [
            generator.random,
            generator.standard_normal,
            lambda: generator.integers(0, 99, dtype=np.uint32),  # half of a draw is left over
            lambda: generator.random(700).tolist(),
            lambda: generator.spawn(1)[0].random(),
        ]
    elif isinstance(generator, np.random.RandomState):
        draws = [generator.rand, generator.randn, lambda: generator.rand(700).tolist()]
    elif isinstance(generator, random.Random):
        draws = [generator.random, lambda: generator.gauss(0, 1)]
    elif isinstance(generator, torch.Generator):
        draws = [
            lambda: torch.rand(3, generator=generator).tolist(),
            lambda: torch.randn((), generator=generator).item(),
        ]
    else:
        draws = [lambda: generator.spawn(1)[0].generate_state(1).tolist()]
    return draws[how % len(draws)]()


HOWS = st.lists(st.integers(0, 4), max_size=8)


@pytest.mark.parametrize("name", sorted(MAKERS))
@settings(max_examples=25)
@given(hows=HOWS, more=HOWS)
def test_what_is_drawn_from_another_one_after_writing_is_what_was_drawn_after_reading(
    name: str, hows: list[int], more: list[int]
) -> None:
    one, another = MAKERS[name](5), MAKERS[name](5)
    for how in hows:
        draw(one, how)
    state, its = state_of(one), state_of(another)
    assert state is not None
    assert its is not None
    raw = state.read()
    assert state.read() == raw, "it is not changed by reading"
    expected = [draw(one, how) for how in (*more, 0, 1, 2, 3, 4)]
    for how in more:
        draw(another, how)  # it is somewhere else
    its.write(raw.ljust(len(raw) + 64, b"\0") if its.varies else raw)
    assert its.kind == state.kind
    assert its.read() == raw
    assert [draw(another, how) for how in (*more, 0, 1, 2, 3, 4)] == expected


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_every_draw_changes_it(name: str) -> None:
    generator = MAKERS[name](5)
    state = state_of(generator)
    assert state is not None
    before = state.read()
    for number in range(700):
        draw(generator, 1 + number % 2)
        assert state.read() != before, number
        before = state.read()


def test_the_quick_ways_are_taken_in_this_interpreter() -> None:
    """If they were not, every test here would pass and every batch would cost 100 µs more."""
    assert generator_states._twister_lies_in()
    assert generator_states._gauss_lies_at() is not None
    assert generator_states._children_lie_at() is not None
    for name in ("PCG64", "PCG64DXSM", "MT19937", "RandomState", "random.Random"):
        state = state_of(MAKERS[name](1))
        assert state is not None
        assert not state.varies


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_without_the_quick_ways_it_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator_states, "_twister_lies_in", lambda: False)
    monkeypatch.setattr(generator_states, "_gauss_lies_at", lambda: None)
    monkeypatch.setattr(generator_states, "_children_lie_at", lambda: None)
    monkeypatch.setattr(generator_states, "_lies_in", lambda kind: False)
    one, another = MAKERS[name](5), MAKERS[name](5)
    for how in range(5):
        draw(one, how)
    state, its = state_of(one), state_of(another)
    assert state is not None
    assert its is not None
    raw = state.read()
    expected = [draw(one, how) for how in range(5)]
    its.write(raw)
    assert [draw(another, how) for how in range(5)] == expected


def test_the_default_generators_and_those_without_a_state_are_left_alone() -> None:
    rand = np.random.mtrand._rand
    assert state_of(rand) is None
    assert state_of(rand._bit_generator) is None
    assert state_of(np.random.Generator(rand._bit_generator)) is None
    assert state_of(random._inst) is None  # type: ignore[attr-defined]
    assert state_of(torch.default_generator) is None
    assert state_of(random.SystemRandom()) is None
    assert state_of(object()) is None


TWO_ASK = """
import gc, threading, time
from holdfast.worker.generator_states import global_states

class Slow:
    def __init__(self):
        self.me = self  # only the garbage collector ends it

    def __del__(self):
        time.sleep(0.001)  # lets another thread run

def ask():
    for _ in range(200):
        Slow()
        torchs.read()

torchs = global_states()[0]
gc.set_threshold(1)
threads = [threading.Thread(target=ask) for _ in range(2)]
for one in threads:
    one.start()
for one in threads:
    one.join()
print("both have asked")
"""


@pytest.mark.slow
def test_two_threads_may_ask_one_torch_generator_whatever_the_garbage_collector_does() -> None:
    """Before Python 3.12 it runs inside torch's getter, which has the generator's lock then."""
    ended = subprocess.run(
        [sys.executable, "-c", TWO_ASK], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.stdout, ended.stderr) == ("both have asked\n", "")
