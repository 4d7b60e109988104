"""Room for copies of batches that are being pinned."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.limits.budget import Budget, Share


def test_room_for_one_copy_is_left_of_the_budget() -> None:
    share = Share(shared := Budget(100))
    share.set_aside = 30
    assert share.room() == 70
    share.in_flight = 70
    assert share.may_copy(30)
    assert not share.may_copy(31)
    other = Share(shared)
    assert other.room() == 0, "what is set aside is not another loader's"
    other.in_flight = 40  # one batch alone passes
    assert not share.may_copy(30)
    share.close()
    assert other.room() == 100


def test_a_batch_that_is_too_large_for_the_budget_is_not_copied_ahead() -> None:
    share = Share(Budget(100))
    share.set_aside = share.in_flight = 80
    assert not share.may_copy(80)
    assert Share(Budget(None)).may_copy(1 << 60)


def test_after_a_death_by_memory_nothing_is_copied_ahead() -> None:
    share = Share(Budget(100))
    share.set_aside = share.in_flight = 10
    share.alone = True
    assert not share.may_copy(10)


@given(st.integers(1, 200), st.integers(1, 50), st.integers(0, 8))
def test_batches_and_a_copy_fit_into_the_budget_together(total: int, size: int, asked: int) -> None:
    """As the machine hands out tasks of one size: while there is room, or if there are none."""
    share = Share(Budget(total))
    share.set_aside = size
    for _ in range(asked):
        room = share.room()
        assert room is not None
        if not share.in_flight or share.in_flight + size <= room:
            share.in_flight += size
    if share.in_flight and share.may_copy(size):
        assert share.in_flight + size <= total
