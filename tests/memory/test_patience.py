"""How long a worker waits for a block to come back."""

from __future__ import annotations

import pytest

from holdfast.memory.patience import BATCHES, MOST, RAREST, Patience


def waits(patience: Patience, occasions: int) -> int:
    """How often it waits, in vain."""
    found = 0
    for _ in range(occasions):
        if patience.seconds():
            found += 1
            patience.judge(False)
    return found


def test_nobody_waits_before_there_was_a_batch() -> None:
    assert Patience().seconds() == 0


def test_as_long_as_a_few_of_the_slower_batches_take() -> None:
    patience = Patience()
    patience.made(0.01)
    patience.made(0.001)
    assert patience.seconds() == pytest.approx(BATCHES * 0.009)
    patience.made(60)
    assert patience.seconds() == MOST


def test_who_keeps_everything_is_waited_for_a_few_times_only() -> None:
    patience = Patience()
    patience.made(1)
    assert waits(patience, 10) == 2
    assert waits(patience, 1000) == 3
    assert waits(patience, 10 * RAREST) == 10


def test_after_something_came_back_it_waits_again() -> None:
    patience = Patience()
    patience.made(1)
    waits(patience, 1000)
    patience.judge(True)
    assert patience.seconds()
