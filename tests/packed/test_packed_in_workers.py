"""What a worker's memory does when it reads a list, and when it reads a packed one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data

import holdfast
from holdfast import DataLoader, PackedList

COUNT = 200_000
BATCH = 2000


class Paths:
    """Reads its samples and returns the private bytes of this process."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        path, label = self.samples[index]
        return len(path) + label


def private_bytes(_: list[int]) -> torch.Tensor:
    """A `collate_fn`: private bytes of the worker, and private ones of the packed mapping."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    mine = sum(map(int, re.findall(r"^Private_\w+:\s+(\d+) kB", rollup, re.MULTILINE)))
    return torch.tensor([mine << 10, torch.utils.data.get_worker_info().id])


def packed_mapping(_: list[int]) -> tuple[int, int, int]:
    """A `collate_fn`: inode of the packed memory here, its size, and how much of it is private."""
    entries = re.split(
        r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M
    )
    (entry,) = [one for one in entries if "memfd:holdfast-packed" in one]
    sizes = {name: int(size) << 10 for name, size in re.findall(r"^(\w+):\s+(\d+) kB", entry, re.M)}
    return int(entry.split()[4]), sizes["Size"], sizes["Private_Clean"] + sizes["Private_Dirty"]


def samples() -> list[tuple[str, int]]:
    return [(f"/data/images/train/{number:09d}.jpg", number % 1000) for number in range(COUNT)]


def growth(loader: Any) -> int:
    seen = [int(batch[0]) for batch in loader]
    return seen[-1] - seen[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(DataLoader, id="holdfast"),
        pytest.param(torch.utils.data.DataLoader, id="torch", marks=pytest.mark.slow),
    ],
)
def test_a_forked_worker_grows_with_a_list_and_not_with_a_packed_one(make: Any) -> None:
    options = {"batch_size": BATCH, "num_workers": 1, "collate_fn": private_bytes}
    plain = growth(make(Paths(samples()), multiprocessing_context="fork", **options))
    packed = growth(make(Paths(PackedList(samples())), multiprocessing_context="fork", **options))
    assert plain > 10 << 20
    assert packed < plain / 10


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_spawned_workers_have_one_copy_together(method: str) -> None:
    dataset = Paths(PackedList(samples()))
    nbytes = dataset.samples.nbytes
    loader = DataLoader(
        dataset,
        batch_size=COUNT // 8,
        num_workers=2,
        multiprocessing_context=method,
        collate_fn=packed_mapping,
    )
    seen = list(loader)
    assert len({inode for inode, _, _ in seen}) == 1
    assert {size for _, size, _ in seen} == {-(-nbytes // 4096) * 4096}
    assert max(private for _, _, private in seen) == 0
    assert loader.stats()["restarts"] == 0


def test_the_stream_is_that_of_the_list() -> None:
    numbers = [(str(n), n) for n in range(40_000)]
    streams = []
    for data in (numbers, PackedList(numbers)):
        torch.manual_seed(5)
        loader = DataLoader(data, batch_size=999, shuffle=True, num_workers=2)  # type: ignore[arg-type]
        streams.append([(list(names), labels.tolist()) for names, labels in loader])
    assert streams[0] == streams[1]


def test_a_packed_dataset_is_loaded_as_before() -> None:
    dataset = Paths(samples())
    plain = torch.cat(list(DataLoader(dataset, batch_size=BATCH, num_workers=2)))
    report = holdfast.pack(dataset)
    assert [one.path for one in report.packed] == ["dataset.samples"]
    assert isinstance(dataset.samples, PackedList)
    assert torch.equal(plain, torch.cat(list(DataLoader(dataset, batch_size=BATCH, num_workers=2))))
