"""Whose message it is: the loader's name and the rank, in logs, incidents, logbooks and errors."""

from __future__ import annotations

import json
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

import holdfast
from holdfast.autopsy.cause import Remedy
from holdfast.autopsy.incident import Incident
from holdfast.cli import main
from holdfast.engine.deaths import _not_worth_the_run
from holdfast.engine.memory_control import MemoryController, _Warned
from holdfast.limits.budget import Budget, Share
from holdfast.loader_identity import LoaderIdentity, Rank, name_of, rank
from holdfast.run_report import logged_run
from tests.faults.outside import kill_and_see_it_dead
from tests.support.processes import eventually
from tests.support.scripts import run_script

pytestmark = pytest.mark.timeout(90, method="thread")

TENSORS = TensorDataset(torch.arange(4))


class Photos(Dataset[int]):
    def __init__(self, dataset: Any = "a folder") -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        (Photos(), "Photos"),
        (Subset(Photos(), [1]), "Subset of Photos"),
        (Subset(Subset(Photos(), [1]), [0]), "Subset of Subset of Photos"),
        (ConcatDataset([TENSORS, TENSORS]), "ConcatDataset of TensorDataset"),
        (ConcatDataset([Photos(), TENSORS]), "ConcatDataset of Photos, TensorDataset"),
        (Photos(TENSORS), "Photos of TensorDataset"),
        ([1, 2], "list"),
    ],
)
def test_a_loader_is_called_after_its_dataset(dataset: Any, name: str) -> None:
    assert name_of(dataset) == name


class Untouchable(Dataset[int]):
    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"nothing of the user's runs for a name, not even for {name}")


def test_nothing_of_the_users_runs_for_a_name() -> None:
    assert name_of(Untouchable()) == "Untouchable"


def test_a_dataset_within_itself_has_a_name() -> None:
    endless = Photos()
    endless.dataset = endless
    assert name_of(endless) == "Photos of Photos of Photos of Photos"


@pytest.mark.parametrize("given", ["", "  ", "two\nlines", 5, b"train", ["train"]])
def test_a_wrong_name_is_shown_with_what_would_be_right(given: Any) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        holdfast.DataLoader([1], name=given)
    assert f"name={given!r}" in str(caught.value)
    assert '"train"' in str(caught.value)


def test_the_name_stays_as_it_was_given() -> None:
    """Frameworks make a loader anew from its attributes."""
    assert holdfast.DataLoader(Photos()).name is None
    assert holdfast.DataLoader(Photos(), name="train").name == "train"


# --- ranks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "found", "told"),
    [
        ({}, Rank(0, 1), None),
        ({"RANK": "3", "WORLD_SIZE": "8", "SLURM_PROCID": "1"}, Rank(3, 8), 3),
        ({"RANK": "0", "WORLD_SIZE": "8"}, Rank(0, 8), 0),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Rank(0, 1), None),
        ({"SLURM_PROCID": "1"}, Rank(1, None), 1),
        ({"SLURM_PROCID": "0"}, Rank(0, None), None),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, Rank(0, 2), 0),
        ({"RANK": "x", "WORLD_SIZE": "y"}, Rank(0, 1), None),
    ],
)
def test_the_rank_that_a_launcher_gives(
    environment: dict[str, str], found: Rank, told: int | None
) -> None:
    assert rank(environment) == found
    assert found.told == told


RANKS = """
import os, sys
import torch
import torch.distributed
import torch.multiprocessing

class Photos:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        mark = f"{sys.argv[1]}/killed-{torch.distributed.get_rank()}"
        if index == 2 and not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), 9)
        return index

def work(rank):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=2
    )
    loader = DataLoader(Photos(), num_workers=1, logbook=f"{sys.argv[1]}/book")
    assert [int(batch) for batch in loader] == [0, 1, 2, 3]
    assert [(one.loader, one.rank) for one in loader.incidents] == [("Photos", rank)]
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()

torch.multiprocessing.start_processes(work, nprocs=2, start_method="fork")
"""


@pytest.mark.parametrize("inherited", [{}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}])
def test_ranks_that_the_environment_does_not_tell_apart_are_kept_apart(
    inherited: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As below Lightning's own launcher, and there below Slurm."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in inherited.items():
        monkeypatch.setenv(name, value)
    ended = run_script("holdfast", RANKS.replace("sys.argv[1]", repr(str(tmp_path))))
    assert ended.code == 0, ended.err
    for number in (0, 1):
        assert ended.err.count(f"[Photos, rank {number}] worker 0 (pid ") == 1, ended.err
    story = logged_run.read(tmp_path / "book")
    assert [run["rank"] for run in story.runs] == [0, 1]
    assert sorted((one["rank"], one["loader"]) for one in story.incidents) == [
        (0, "Photos"),
        (1, "Photos"),
    ]
    for folder, number in ((tmp_path / "book", 0), (tmp_path / "book" / "rank-1", 1)):
        lines = (folder / "incidents.jsonl").read_text().splitlines()
        assert [json.loads(line)["rank"] for line in lines] == [number]
    shown = CliRunner().invoke(main, ["incidents", str(tmp_path / "book")]).output
    assert "[Photos, rank 0] worker 0 (pid" in shown
    assert "[Photos, rank 1] worker 0 (pid" in shown


# --- where it is said -----------------------------------------------------------------------------


def test_deaths_that_are_alike_are_explained_once_for_a_loader(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In every epoch workers are new; why one dies, and what to do, is not."""
    loader = holdfast.DataLoader(range(20), num_workers=1, name="train")
    with caplog.at_level(logging.WARNING, "holdfast"):
        for epoch in range(3):
            iterator: Any = iter(loader)
            seen = [int(next(iterator))]
            kill_and_see_it_dead(iterator._workers[0].pid)
            assert seen + [int(batch) for batch in iterator] == list(range(20))
            assert len(loader.incidents) == epoch + 1
    told = [one.getMessage() for one in caplog.records]
    assert all(text.startswith("[train] worker 0 (pid ") for text in told)
    assert ["because:" in text for text in told] == [True, False, False]


def incident(**fields: Any) -> Incident:
    known: dict[str, Any] = dict.fromkeys(Incident.__dataclass_fields__)
    known |= {"kind": "killed", "worker_id": 0, "step": "idle", "stack": "", "action": "replaced"}
    known |= {
        "loader": "train",
        "because": (),
        "evidence": {},
        "confidence": "high",
        "cause": "oom-killed",
    }
    return Incident(**known | {"remedies": ()} | fields)


def test_deaths_are_alike_that_have_one_cause_and_one_remedy_whatever_the_figures() -> None:
    some = incident(remedies=(Remedy("Use less than 1.5 GiB", "DataLoader(..., num_workers=3)"),))
    again = incident(remedies=(Remedy("Use less than 900 MiB", "DataLoader(..., num_workers=2)"),))
    other = incident(remedies=(Remedy("Raise the limit", "ulimit"),))
    assert some.kind_of_death() == again.kind_of_death()
    assert some.kind_of_death() != other.kind_of_death()
    assert some.kind_of_death() != incident(cause="abort", remedies=some.remedies).kind_of_death()


def test_an_incident_says_whose_worker_it_was() -> None:
    assert str(incident(rank=1)).startswith("[train, rank 1] worker 0 ")
    assert str(incident()).startswith("[train] worker 0 ")
    assert incident(rank=1).to_json()["text"].startswith("worker 0 "), (
        "the record has fields for it"
    )
    assert LoaderIdentity().prefix == ""


class Fails(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise ValueError("no such sample")


class Exits(Fails):
    def __getitem__(self, index: int) -> int:
        os._exit(7)


def error_of(loader: Any) -> str:
    with pytest.raises(Exception) as caught:
        list(loader)
    return str(caught.value)


def test_errors_say_whose_worker_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    whose = "[val, rank 1] "
    text = error_of(holdfast.DataLoader(Fails(), num_workers=1, name="val"))
    assert f"\nholdfast: {whose}raised by sample 0 " in text
    text = error_of(holdfast.DataLoader(Exits(), num_workers=1, name="val", max_restarts=0))
    assert f"exited unexpectedly: {whose}1 deaths within" in text
    text = error_of(holdfast.DataLoader(Exits(), num_workers=1, name="val"))
    assert f"exited unexpectedly: {whose}sample 0 (" in text
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        text = error_of(
            holdfast.DataLoader(Fails(), name="val", on_bad_sample="skip", max_bad_samples=0)
        )
    assert text.startswith(f"{whose}1 bad samples are more than max_bad_samples=0")
    assert str(caught[0].message).startswith(f"holdfast: {whose}sample 0 raised ValueError")


def test_a_worker_that_is_not_replaced_is_said_to_have_had_nothing_left_to_do() -> None:
    with holdfast.DataLoader(range(4), num_workers=2) as loader:
        iterator: Any = iter(loader)
        assert [int(next(iterator)) for _ in range(3)] == [0, 1, 2]
        kill_and_see_it_dead(iterator._workers[0].pid)
        assert eventually(lambda: len(loader.incidents) == 1)
        assert loader.incidents[0].action == "not replaced, because it had nothing left to do"
        assert [int(batch) for batch in iterator] == [3]


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("fork", "what worker_init_fn or iter(dataset) loads in each worker"),
        ("spawn", "the dataset itself, copied into each worker by spawn or forkserver"),
    ],
)
def test_what_a_worker_has_before_its_first_batch_is_said_as_it_came_there(
    method: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("holdfast.engine.memory_control._warned", _Warned())
    controller = MemoryController(
        Share(Budget(None)), 1 << 30, 2, origin=LoaderIdentity("train", 1), start_method=method
    )
    controller.raised(0, 2 << 30, 3 << 30)
    (record,) = caplog.records
    assert record.getMessage().startswith("[train, rank 1] worker 0 has 2.0 GiB of its own")
    assert record.getMessage().endswith(f"Most often that is {said}.")


@pytest.mark.parametrize("verb", ["scan", "doctor"])
def test_all_verbs_call_the_number_of_workers_alike(verb: str) -> None:
    for option in ("--num-workers", "--workers"):
        refused = CliRunner().invoke(main, [verb, "nothing.here:data", option, "0"])
        assert refused.exit_code == 2
        assert "0 is not in the range x>=1" in refused.output, option


def test_a_failure_of_our_own_says_whose_pool_it_was_in(caplog: pytest.LogCaptureFixture) -> None:
    with _not_worth_the_run(LoaderIdentity("train", 1)):
        raise ValueError("a file that was not expected")
    (told,) = caplog.messages
    assert told.startswith("[train, rank 1] the examination of a death failed")
