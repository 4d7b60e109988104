"""Whatever a sample does to its worker, it is that sample which is named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

import holdfast
from tests.autopsy.injected import DEATHS, STALL_TIMEOUT, Minefield
from tests.faults.causes import CAUSES, GRANDCHILDREN, STALLS, end_child_left_behind

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

BATCH = 5
_LATE = {"all descriptors closed"}  # which shows only when the batch is sent
NAMED = [name for name in DEATHS if name not in _LATE]
_SLOW = {name for name in NAMED if name in CAUSES and CAUSES[name].verdict == STALLS}
_SLOW |= {name for name in NAMED if name.startswith(("hang", "spin"))}
QUICK = [name for name in NAMED if name not in _SLOW]


class Scattered(Minefield):
    """One sample of each five breaks its worker, at a place of its own."""

    def __len__(self) -> int:
        return BATCH * len(self.causes)

    def place(self, which: int) -> int:
        return BATCH * which + which % BATCH

    def __getitem__(self, index: int) -> Any:
        if index == self.place(index // BATCH):
            self.strike(index // BATCH)
        return torch.tensor(index)

    def sample_name(self, index: int) -> str:
        return f"train/{index:05d}.jpg"


@pytest.fixture
def children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What some causes leave behind is ended."""
    folder = tmp_path / "children"
    folder.mkdir()
    monkeypatch.setenv(GRANDCHILDREN, str(folder))
    yield
    for file in folder.iterdir():
        end_child_left_behind(int(file.name), file.read_text())


def places_in(batches: list[list[int]]) -> dict[int, tuple[int, int]]:
    """Which batch each sample stands in, and where."""
    return {
        index: (number, at)
        for number, batch in enumerate(batches)
        for at, index in enumerate(batch)
    }


def check(causes: list[str], folder: Path, method: str) -> None:
    dataset = Scattered(causes, str(folder))
    loader = holdfast.DataLoader(
        dataset,
        batch_size=BATCH,
        shuffle=True,
        num_workers=2,
        generator=torch.Generator().manual_seed(3),
        stall_timeout=STALL_TIMEOUT,
        max_restarts=None,
        multiprocessing_context=None if method == "fork" else method,
    )
    with loader:
        batches = [batch.tolist() for batch in loader]
    places = places_in(batches)
    told = {one.sample: one for one in loader.incidents}
    assert len(told) == len(loader.incidents) == len(causes), [str(one) for one in loader.incidents]
    for which, name in enumerate(causes):
        index = dataset.place(which)
        incident = told[index]
        where = (incident.batch, incident.position)
        assert where == places[index], f"{name}: {incident}"
        assert incident.sample_name == dataset.sample_name(index), f"{name}: {incident}"
        assert f"sample {index} (train/{index:05d}.jpg; " in str(incident), name
        assert incident.step == "fetch", name


@pytest.mark.slow
@pytest.mark.usefixtures("children")
def test_in_the_middle_of_shuffled_batches(tmp_path: Path) -> None:
    check([*QUICK, "hang", "SIGSTOP"], tmp_path, "fork")


@pytest.mark.slow
@pytest.mark.usefixtures("children")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_whatever_the_cause_and_the_start_method(method: str, tmp_path: Path) -> None:
    check(NAMED, tmp_path, method)


class Stream(IterableDataset[Any]):
    """Each worker has every other sample; one of them breaks it."""

    def __init__(self, field: Scattered) -> None:
        self.field = field

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        for index in range(info.id, len(self.field), info.num_workers):
            yield self.field[index]


@pytest.mark.usefixtures("children")
def test_in_a_stream_its_place_is_named(tmp_path: Path) -> None:
    """A sample of a stream has no index; what is known is the batch, and the place in it."""
    field = Scattered(QUICK, str(tmp_path))
    loader = holdfast.DataLoader(Stream(field), batch_size=BATCH, num_workers=2, max_restarts=None)
    with loader:
        batches = [batch.tolist() for batch in loader]
    places = places_in(batches)
    wanted = {places[field.place(which)] for which in range(len(QUICK))}
    assert {(one.batch, one.position) for one in loader.incidents} == wanted
    assert len(loader.incidents) == len(QUICK)
    assert {one.sample for one in loader.incidents} == {None}
