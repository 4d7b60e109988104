"""Two ranks under torchrun, with gloo: trainings whose workers are killed end with the weights of an undisturbed run on
torch, bit for bit, and ranks never get different numbers of batches."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.run_report import logged_run
from tests.frameworks.trainings import ways

pytestmark = [pytest.mark.frameworks, pytest.mark.faults, pytest.mark.timeout(540)]
RANKS = 2


@pytest.fixture(scope="module")
def undisturbed_and_others(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Three ways of each training, in one program: importing the packages takes longest."""
    folder = tmp_path_factory.mktemp("ranks")
    program = ways.launched("undisturbed,import,install", folder, ways.WITH_RANKS, RANKS)
    return ways.ended(program, folder)


@pytest.fixture(scope="module")
def below_run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("run")
    program = ways.launched("run", folder, ways.WITH_RANKS, RANKS)
    return ways.ended(program, folder), folder / "logbook"


def check(name: str, way: str, found: Any, expected: Any) -> None:
    assert len(found) == len(expected) == RANKS
    weights = {ranks[name, "undisturbed"]["weights"] for ranks in expected}
    assert len(weights) == 1
    assert {ranks[name, way]["weights"] for ranks in found} == weights
    assert all(ranks[name, way]["deaths"] >= 2 for ranks in found)
    assert sum(ranks[name, way]["bad_samples"] for ranks in found) >= 1


@pytest.mark.parametrize("way", ["import", "install"])
@pytest.mark.parametrize("name", ways.WITH_RANKS)
def test_weights_of_two_ranks_are_those_of_an_undisturbed_run_on_torch(
    name: str, way: str, undisturbed_and_others: Any
) -> None:
    check(name, way, undisturbed_and_others, undisturbed_and_others)


@pytest.mark.parametrize("name", ways.WITH_RANKS)
def test_weights_of_two_ranks_below_holdfast_run_are_the_same(
    name: str, undisturbed_and_others: Any, below_run: Any
) -> None:
    check(name, "run", below_run[0], undisturbed_and_others)


def test_all_ranks_below_holdfast_run_write_one_logbook(below_run: Any) -> None:
    outcomes, book = below_run
    story = logged_run.read(book)
    for rank, outcome in enumerate(outcomes):
        told = [one for one in story.incidents if one["rank"] == rank]
        assert len(told) == sum(found["deaths"] for found in outcome.values())
