"""The random states that samples are given: equal for equal keys, independent for others.

A million keys are looked at through a Philox of the tests' own, which does them all at once. That
it is the same generator is shown for some keys.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from holdfast.worker import generator_states, sample_seeding
from holdfast.worker.generator_states import default_generators_kept
from holdfast.worker.sample_seeding import SampleSeeds

MANY = 1_000_000
U64 = NDArray[np.uint64]
FIRST_BLOCK = {"random": 1, "numpy": 79, "torch": 157}  # of Philox, counted from 1
DRAW: dict[str, Callable[[], int]] = {
    "random": lambda: random.getrandbits(32),
    "numpy": lambda: int(np.random.randint(0, 1 << 32, dtype=np.uint32)),
    "torch": lambda: int(torch.empty(1, dtype=torch.int32).random_(0, 1 << 24)),
}


@pytest.fixture(autouse=True)
def _leave_no_trace() -> Any:
    with default_generators_kept():
        yield


def draws() -> list[Any]:
    """More than one state holds, of each generator and of each kind that has a memory."""
    return [
        random.gauss(0, 1), [random.random() for _ in range(700)],
        np.random.randn(), np.random.rand(700).tolist(),
        torch.randn(1).item(), torch.rand(700).tolist(), torch.initial_seed(),
    ]  # fmt: skip


# -- the model ------------------------------------------------------------------------------

_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def _multiplied(factor: int, by: U64) -> tuple[U64, U64]:
    """The high and the low half of the product."""
    a, b = np.uint64(factor & 0xFFFFFFFF), np.uint64(factor >> 32)
    low, high = by & _LOW, by >> _HALF
    middle = b * low + (a * low >> _HALF)
    carry = a * high + (middle & _LOW)
    return b * high + (middle >> _HALF) + (carry >> _HALF), by * np.uint64(factor)


def philox(key: tuple[int, int], counter: tuple[Any, ...]) -> list[U64]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        (high0, low0), (high1, low1) = (
            _multiplied(0xD2E7470EE14C6C93, c0), _multiplied(0xCA5A826395121157, c2),
        )  # fmt: skip
        c0, c1, c2, c3 = high1 ^ c1 ^ np.uint64(k0), low1, high0 ^ c3 ^ np.uint64(k1), low0
        k0 = (k0 + 0x9E3779B97F4A7C15) & (1 << 64) - 1
        k1 = (k1 + 0xBB67AE8584CAA73B) & (1 << 64) - 1
    return [c0, c1, c2, c3]


def tempered(words: U64) -> U64:
    words = words ^ (words >> np.uint64(11))
    words = words ^ (words << np.uint64(7) & np.uint64(0x9D2C5680))
    words = words ^ (words << np.uint64(15) & np.uint64(0xEFC60000))
    return words ^ (words >> np.uint64(18))


def blocks(seeds: SampleSeeds, keys: U64, block: int) -> list[U64]:
    state: Any = seeds._philox.state
    key = tuple(map(int, state["state"]["key"]))
    parts = []
    for some in np.array_split(keys, max(1, len(keys) // 16384)):  # what fits into the cache
        first = np.full_like(some, block)
        parts.append(philox(key, (first, np.zeros_like(some), some, np.zeros_like(some))))  # type: ignore[arg-type]
    return [np.concatenate(one) for one in zip(*parts, strict=True)]


def first_draws(seeds: SampleSeeds, keys: U64, which: str) -> U64:
    """The first 32 bits that each sample draws; of torch the lower 24, as it draws integers."""
    word = blocks(seeds, keys, FIRST_BLOCK[which])[0]
    if which == "torch":  # begins at its second word
        return tempered(word >> _HALF) & np.uint64(0xFFFFFF)
    return tempered(word & _LOW)


def test_the_model_is_what_samples_are_given() -> None:
    seeds = SampleSeeds(42, 3)
    keys = [0, 1, 2, 77, 10**12, 2**63 - 1]
    for which, draw in DRAW.items():
        found = []
        for key in keys:
            seeds.for_sample(key)
            found.append(draw())
        assert found == first_draws(seeds, np.array(keys, np.uint64), which).tolist(), which


@functools.cache
def a_million(which: str, epoch: int = 0) -> U64:
    return first_draws(SampleSeeds(1234, epoch), np.arange(MANY, dtype=np.uint64), which)


def correlation(one: U64, other: U64) -> float:
    return float(np.corrcoef(one.astype(np.float64), other.astype(np.float64))[0, 1])


# -- a million keys -------------------------------------------------------------------------

NOISE = 5 / MANY**0.5  # of a correlation between numbers that have nothing to do with each other


def test_a_million_samples_have_a_million_states() -> None:
    words = blocks(SampleSeeds(1234, 0), np.arange(MANY, dtype=np.uint64), 1)[0]
    words.sort()
    assert (words[1:] != words[:-1]).all()  # their first 64 bits alone


@pytest.mark.parametrize("which", DRAW)
def test_what_neighbours_draw_is_uniform_and_uncorrelated(which: str) -> None:
    drawn = a_million(which)
    bits = 24 if which == "torch" else 32
    counts = np.bincount((drawn >> np.uint64(bits - 10)).astype(np.int64), minlength=1024)
    chi_square = float(((counts - MANY / 1024) ** 2 / (MANY / 1024)).sum())
    assert abs(chi_square - 1023) < 5 * (2 * 1023) ** 0.5
    for bit in range(bits):
        ones = int((drawn >> np.uint64(bit) & np.uint64(1)).sum())
        assert abs(ones - MANY / 2) < 5 * MANY**0.5 / 2, bit
    for apart in (1, 2, 1024):
        assert abs(correlation(drawn[:-apart], drawn[apart:])) < 1.1 * NOISE, apart


def test_generators_epochs_and_seeds_are_independent_of_each_other() -> None:
    drawn = a_million("random")
    others = [a_million("numpy"), a_million("torch"), a_million("random", epoch=1)]
    others.append(first_draws(SampleSeeds(1235, 0), np.arange(MANY, dtype=np.uint64), "random"))
    for other in others:
        assert abs(correlation(drawn, other)) < NOISE
        assert (drawn == other).sum() < 5


# -- equal keys -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "same"),
    [(7, np.int64(7)), (7, torch.tensor(7)), (-3, np.int32(-3)), ("a", "a"), ((1, "b"), (1, "b"))],
)
def test_equal_keys_give_equal_states_whatever_was_drawn_before(one: Any, same: Any) -> None:
    seeds = SampleSeeds(5, 0)
    seeds.for_sample(one)
    first = draws()
    torch.randn(3), np.random.randn(3), random.gauss(0, 1)
    seeds.for_sample(same)
    assert draws() == first
    again = SampleSeeds(5, 0, worker=3)
    again.for_sample(one)
    assert draws() == first


def test_different_requests_give_different_states() -> None:
    seeds, found = SampleSeeds(5, 0), []
    for key in (0, 1, -1, 2**63, 2**64, -(2**64), "0", "1", b"0", (0,), [0], None, True, 1.0):
        for request in (seeds.for_sample, seeds.for_batch):
            request(key)
            found.append(repr(draws()))
    for worker in (0, 1):
        stream = SampleSeeds(5, 0, worker)
        stream.begin_stream()
        found.append(repr(draws()))
        for _ in range(3):
            stream.for_batch_of_stream(stream.position)
            found.append(repr(draws()))
            stream.for_element()
            found.append(repr(draws()))
    for seed, epoch in ((5, 1), (6, 0), (-5, 0), (51, 0), (2**80, 0)):
        SampleSeeds(seed, epoch).for_sample(0)
        found.append(repr(draws()))
    assert len(set(found)) == len(found)


def test_a_key_that_another_process_cannot_tell_is_refused() -> None:
    class Nameless:
        pass

    with pytest.raises(TypeError, match=r'seeding="sample" cannot tell the sample .*Nameless'):
        SampleSeeds(5, 0).for_sample(Nameless())


# -- where states are written ---------------------------------------------------------------


def test_states_are_the_same_where_only_public_setters_can_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    SampleSeeds(5, 0).for_sample(7)
    expected = draws()
    monkeypatch.setattr(generator_states, "_twister_lies_in", lambda: False)
    monkeypatch.setattr(generator_states, "_lies_in", lambda kind: False)
    random.gauss(0, 1), np.random.randn()
    SampleSeeds(5, 0).for_sample(7)
    assert draws() == expected


def test_another_bit_generator_of_numpy_is_seeded_too() -> None:
    before: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    seeds = SampleSeeds(5, 0)
    np.random.set_bit_generator(np.random.PCG64(1))  # type: ignore[attr-defined]
    try:
        found = []
        for key in (1, 2, 1):
            seeds.for_sample(key)
            found.append((np.random.randn(), np.random.rand()))
        assert found[0] == found[2] != found[1]
    finally:
        np.random.set_bit_generator(before)  # type: ignore[attr-defined]


def test_a_torch_with_another_layout_is_seeded_with_64_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert sample_seeding._torch_state_is_known()
    monkeypatch.setattr(sample_seeding, "_torch_state_is_known", lambda: False)
    found = []
    for key in (1, 2, 1):
        SampleSeeds(5, 0).for_sample(key)
        found.append((torch.rand(1).item(), torch.initial_seed()))
    assert found[0] == found[2] != found[1]
