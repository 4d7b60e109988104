"""The shares of "auto" together fit into the free memory, however much that is."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.limits.shares import BASE, IN_FLIGHT, LEAST, TAKES, WORKERS, Shares, shares
from holdfast.limits.worker_limit import allowance

MIB = 1 << 20
ROOMS = [MIB << power for power in range(7, 21)]  # 128 MiB to 1 TiB
COUNTS = [1, 2, 3, 4, 8, 16, 32, 64]
BATCHES = [0, 1, 100_000, MIB, 16 * MIB, 100 * MIB, 1 << 30, 1 << 36]


def promised(found: Shares, workers: int) -> int:
    """The sum of all shares, as they are really used."""
    return TAKES * found.in_flight + workers * (found.worker + found.base)


@pytest.mark.parametrize("workers", COUNTS)
@pytest.mark.parametrize("room", ROOMS)
def test_all_that_is_promised_fits_in_the_room_and_nobody_gets_nothing(
    room: int, workers: int
) -> None:
    for batch in BATCHES:
        found = shares(room, workers, batch)
        assert promised(found, workers) <= room
        assert min(found.in_flight, found.worker, found.base) > 0
        if TAKES * batch <= room // 4:  # a batch that passes alone fits as well
            alone = max(found.in_flight, batch)
            assert TAKES * alone + workers * (found.worker + found.base) <= room


@pytest.mark.parametrize("workers", COUNTS)
@pytest.mark.parametrize("room", ROOMS)
def test_what_workers_are_told_fits_in_the_room_wherever_the_least_they_need_does(
    room: int, workers: int
) -> None:
    told = allowance("auto", free=room, confined=True, workers=workers, ranks=1).private
    assert told is not None
    assert told >= LEAST, "or it would be replaced for having begun"
    found = shares(room, workers)
    if 2 * workers * LEAST <= room:
        assert TAKES * found.in_flight + workers * (told + found.base) <= room


def test_where_workers_are_many_less_is_in_flight_so_that_each_can_grow_at_all() -> None:
    found = shares(512 * MIB, 30)
    assert found.worker == LEAST
    assert 2 * found.in_flight < shares(512 * MIB, 8).in_flight
    assert promised(found, 30) <= 512 * MIB


@given(
    room=st.integers(128 * MIB, 1 << 40),
    more=st.integers(0, 1 << 40),
    workers=st.integers(1, 64),
    batch=st.integers(0, 1 << 38),
)
def test_more_room_is_never_less_for_anybody(
    room: int, more: int, workers: int, batch: int
) -> None:
    before, after = shares(room, workers, batch), shares(room + more, workers, batch)
    assert after.in_flight >= before.in_flight
    assert after.worker >= before.worker


def test_more_workers_and_larger_batches_are_never_more_for_each_worker() -> None:
    for room, batch in itertools.product(ROOMS, BATCHES):
        by_count = [shares(room, workers, batch).worker for workers in COUNTS]
        assert by_count == sorted(by_count, reverse=True)
    for room, workers in itertools.product(ROOMS, COUNTS):
        by_batch = [shares(room, workers, batch).worker for batch in BATCHES]
        assert by_batch == sorted(by_batch, reverse=True)


def test_in_a_large_room_the_parts_are_those_that_are_documented() -> None:
    room = 1 << 40
    found = shares(room, 4)
    assert found.in_flight == pytest.approx(IN_FLIGHT * room, rel=0.001)
    assert 4 * found.worker == pytest.approx(WORKERS * room, rel=0.001)
    assert found.base == BASE


def test_a_room_that_is_gone_is_no_error() -> None:
    found = shares(0, 4)
    assert (found.in_flight, found.worker) == (1, 1)
