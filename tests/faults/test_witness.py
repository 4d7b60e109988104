"""The witness of bytes in flight: a budget that is not kept is found out."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.faults.checker import play, seeded
from tests.faults.scenario import arguments, check_budget, wait_until_idle, witness_of
from tests.faults.table import Case
from tests.faults.witness import Witness
from tests.support.processes import eventually

pytestmark = [pytest.mark.faults, pytest.mark.timeout(60, method="thread")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["map", "map, large", "iterable"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_loader_without_a_budget_is_found_out(kind: str, workers: int, tmp_path: Path) -> None:
    """Or no row would prove anything. By the count of samples alone, and by what it says itself."""
    case = Case("SIGKILL", "sample", kind=kind, workers=workers)
    witness = witness_of(case, tmp_path)

    def make() -> Any:
        seeded()
        return holdfast.DataLoader(**arguments(case, witness=witness), memory_budget=None)

    def interfere(iterator: Any, epoch: int, number: int) -> None:
        if number == 1:
            wait_until_idle(iterator)
            asked = witness.seen.asked
            assert eventually(lambda: witness.seen.asked > asked + 1)

    history = play(make, interfere=interfere, witness=witness)
    assert history.seen is not None
    said = history.seen.said
    history.seen = replace(history.seen, said=0)
    with pytest.raises(AssertionError, match=r"I6: .* in flight, .* are allowed: samples"):
        check_budget(case, history)
    history.seen = replace(history.seen, said=said, most=0, most_inside=0)
    with pytest.raises(AssertionError, match="I6: the loader says"):
        check_budget(case, history)


def test_a_witness_that_cannot_ask_any_more_says_so(tmp_path: Path) -> None:
    """Else what was said before that would pass for all of the run."""
    answers = iter([1, 2])
    witness = Witness(tmp_path / "begun", [8], asked=lambda: next(answers))
    with pytest.raises(StopIteration), witness:
        assert eventually(lambda: not witness._thread.is_alive())
    assert witness.seen.asked == 3
    assert witness.seen.said == 2


def test_the_most_follows_from_the_times(tmp_path: Path) -> None:
    """Sample 1 begins inside the second call, 2 between two calls, 3 after its batch has come."""
    file = tmp_path / "begun"
    witness = Witness(file, [1, 10, 100, 1000])
    witness._calls = [(1.0, 2.0, ()), (3.0, 4.0, [0]), (5.0, 6.0, [1, 2, 3])]
    file.write_bytes(struct.pack("dddd", 0.5, 3.5, 4.5, 7.0))
    witness._add_up()
    assert (witness.seen.most_inside, witness.seen.most) == (11, 110)
    assert witness.seen.at_most == {1, 2}
    assert witness.seen.begun == 4
