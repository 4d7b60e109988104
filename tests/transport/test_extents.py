"""The allocator, without any memory behind it."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from holdfast.transport.extents import GRAIN, LARGE, PAGE, Extents

CAPACITY = 4 << 20
sizes = st.one_of(
    st.integers(0, 5000), st.integers(LARGE - 100, LARGE + 5000), st.integers(0, CAPACITY // 3)
)


def occupied(nbytes: int) -> int:
    unit = PAGE if nbytes >= LARGE else GRAIN
    return max(-(-nbytes // unit) * unit, GRAIN)


class Histories(RuleBasedStateMachine):
    """Every byte belongs to one block or to one free extent, whatever happened before."""

    blocks = Bundle("blocks")

    def __init__(self) -> None:
        super().__init__()
        self.extents = Extents(CAPACITY)
        self.live: dict[int, int] = {}

    @rule(target=blocks, nbytes=sizes)
    def allocate(self, nbytes: int) -> object:
        offset = self.extents.allocate(nbytes)
        if offset is None:
            unit = PAGE if nbytes >= LARGE else GRAIN
            for start, length in self.extents.free_extents():
                assert -(-start // unit) * unit + occupied(nbytes) > start + length
            return multiple()
        assert offset % (PAGE if nbytes >= LARGE else GRAIN) == 0
        self.live[offset] = nbytes
        return offset

    @rule(offset=consumes(blocks))
    def free(self, offset: int) -> None:
        self.extents.free(offset)
        del self.live[offset]

    @rule()
    def start_again_beside_the_same_blocks(self) -> None:
        self.extents = Extents(CAPACITY)
        for offset, nbytes in self.live.items():
            self.extents.reserve(offset, nbytes)

    @rule(offset=blocks)
    def what_is_used_cannot_be_reserved(self, offset: int) -> None:
        with pytest.raises(ValueError, match="not free"):
            self.extents.reserve(offset, 1)

    @invariant()
    def nothing_overlaps_and_nothing_is_lost(self) -> None:
        used = [(offset, occupied(nbytes)) for offset, nbytes in self.live.items()]
        assert self.extents.used() == sorted(used)
        assert self.extents.in_use == sum(size for _, size in used)
        free = self.extents.free_extents()
        at = 0
        for offset, size in sorted(used + free):
            assert offset == at
            at += size
        assert at == CAPACITY

    @invariant()
    def neighbours_are_merged(self) -> None:
        free = self.extents.free_extents()
        ends = {start + size for start, size in free}
        assert not any(start in ends for start, _ in free)

    @precondition(lambda self: not self.live)
    @invariant()
    def all_free_is_one_extent(self) -> None:
        assert self.extents.free_extents() == [(0, CAPACITY)]


Histories.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestHistories = Histories.TestCase


def test_the_lowest_fitting_place_is_taken() -> None:
    extents = Extents(CAPACITY)
    blocks = [extents.allocate(1000) for _ in range(10)]
    assert blocks[2] is not None
    assert blocks[7] is not None
    extents.free(blocks[7])
    extents.free(blocks[2])
    assert extents.allocate(900) == blocks[2]
    assert extents.allocate(900) == blocks[7]


def test_a_hundred_thousand_live_blocks_do_not_slow_it_down() -> None:
    extents = Extents(1 << 36)
    chance = random.Random(0)
    live = [extents.allocate(chance.randrange(1, 200_000)) for _ in range(100_000)]
    chance.shuffle(live)
    for offset in live[:30_000]:
        assert offset is not None
        extents.free(offset)
    live = live[30_000:]
    began = time.process_time()
    for _ in range(2000):
        offset = live.pop()
        assert offset is not None
        extents.free(offset)
        live.append(extents.allocate(chance.randrange(1, 200_000)))
    assert (time.process_time() - began) / 2000 < 1e-3
