"""What two ranks under torchrun, with gloo, have in common: seeds, the number of batches, logbook, quarantine, memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("datasets")

from holdfast.limits.shares import shares
from holdfast.run_report import logged_run
from tests.frameworks.trainings import ways
from tests.frameworks.two_ranks import EPOCHS, RANKS, SIZE, Damaged

pytestmark = [pytest.mark.frameworks, pytest.mark.faults, pytest.mark.timeout(540)]
BATCHES = SIZE // RANKS // 2


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """What two ranks found, and the folder that they wrote to."""
    folder = tmp_path_factory.mktemp("two")
    module = "tests.frameworks.two_ranks"
    program = ways.started(["-m", *ways.torchrun(RANKS), "-m", module, str(folder)])
    ways.wait_for(program)
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return lambda what: folder if what == "folder" else [one[what] for one in found]


@pytest.mark.parametrize("persistent", ["True", "False"])
@pytest.mark.parametrize("what", ["seeds", "stream"])
def test_seeds_samplers_and_the_epoch_reach_replaced_workers(
    what: str, persistent: str, two: Callable[[str], Any]
) -> None:
    """Workers of rank 0 are killed, those of rank 1 are not: both get torch's batches, as many as each other."""
    first, second = (found[persistent] for found in two(what))
    assert first["equal"]
    assert second["equal"]
    assert first["epochs"] == second["epochs"] == EPOCHS  # none is like another
    assert first["batches"] == second["batches"] == [BATCHES] * EPOCHS
    assert (first["deaths"] >= 2, second["deaths"]) == (True, 0)


def test_a_batch_that_is_skipped_altogether_makes_ranks_uneven_and_that_is_told(
    two: Callable[[str], Any],
) -> None:
    first, second = two("skip")
    assert (len(first["sizes"]), len(second["sizes"])) == (BATCHES - 1, BATCHES)
    assert first["told"]
    assert second["told"]


def test_uneven_ranks_end_together_with_torchs_join(two: Callable[[str], Any]) -> None:
    first, second = two("joined")
    assert (len(first["sizes"]), len(second["sizes"])) == (BATCHES - 1, BATCHES)


def test_replacing_bad_samples_keeps_ranks_even(two: Callable[[str], Any]) -> None:
    first, second = two("replace")
    assert first["sizes"] == second["sizes"] == [2] * BATCHES
    assert first["deaths"] == second["deaths"] == 2
    assert not first["told"]


def test_a_quarantine_that_ranks_write_at_once_loses_nothing(two: Callable[[str], Any]) -> None:
    lines = (two("folder") / "quarantine.jsonl").read_text().splitlines()
    listed = [json.loads(line)["index"] for line in lines]
    assert sorted(listed) == list(Damaged(range(0, 400, 3), 400).bad)
    assert all(count > 20 for count in two("quarantine"))


def test_incidents_of_both_ranks_are_in_one_logbook_and_told_apart(
    two: Callable[[str], Any],
) -> None:
    story = logged_run.read(two("folder") / "book")
    assert [run["rank"] for run in story.runs] == [0, 1]
    for rank, pids in enumerate(two("pids")):
        assert [one["pid"] for one in story.incidents if one["rank"] == rank] == pids
        assert len(pids) == 2


def test_the_automatic_memory_budget_is_shared_by_the_ranks_of_a_machine(
    two: Callable[[str], Any],
) -> None:
    first, second = two("budget")
    assert first["ranks"] == second["ranks"] == RANKS
    alone = shares(max(first["free"], second["free"]), 2).in_flight
    # What is free changes from one reading to another; two whole budgets would be twice as much.
    assert first["bytes"] + second["bytes"] < 1.5 * alone
