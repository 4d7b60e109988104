"""Batches of any size, one after the other."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from holdfast import DataLoader

pytestmark = pytest.mark.timeout(300, method="thread")


class Sized(Dataset[Any]):
    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Any:
        return make(self.sizes[index])


def make(nbytes: int) -> torch.Tensor:
    made = torch.empty(nbytes, dtype=torch.uint8)
    made.fill_(nbytes % 251)
    made[-8:] = 17
    return made


def same(samples: list[Any]) -> Any:
    return samples


EDGES = sorted(
    {
        size + step
        for size in (0, 64, 4096, 16 << 10, 64 << 10, 256 << 10, 4 << 20)
        for step in (-65, -1, 0, 1, 65)
        if size + step >= 0
    }
)


def check(batches: Any, sizes: list[int]) -> None:
    for batch, nbytes in zip(batches, sizes, strict=True):
        batch = batch[0] if isinstance(batch, list) else batch.reshape(-1)
        assert batch.nbytes == nbytes
        assert torch.equal(batch, make(nbytes))


@pytest.mark.parametrize("collate", [None, same], ids=["default", "custom"])
def test_sizes_around_every_limit_come_through(collate: Any) -> None:
    with DataLoader(Sized(EDGES), num_workers=2, collate_fn=collate) as loader:
        check(loader, EDGES)


@pytest.mark.slow
@pytest.mark.parametrize("collate", [None, same], ids=["default", "custom"])
@pytest.mark.parametrize("keep", [False, True])
def test_sizes_that_change_wildly_from_batch_to_batch_come_through(
    keep: bool, collate: Any
) -> None:
    order = random.Random(1)
    sizes = [int(2 ** order.uniform(0, 24)) for _ in range(150)]
    with DataLoader(Sized(sizes), num_workers=2, collate_fn=collate) as loader:
        check(list(loader) if keep else loader, sizes)


def test_a_batch_without_any_bytes_comes_through() -> None:
    with DataLoader(Sized([0] * 10), batch_size=5, num_workers=1) as loader:
        assert [batch.shape for batch in loader] == [(5, 0), (5, 0)]


@pytest.mark.slow
def test_a_batch_of_hundreds_of_megabytes_comes_through() -> None:
    sizes = [1, 300 << 20, 5, 200 << 20, 7]
    with DataLoader(Sized(sizes), num_workers=1, prefetch_factor=1) as loader:
        check(loader, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("collate", [None, same], ids=["default", "custom"])
def test_a_batch_of_two_gibibytes_comes_through(collate: Any) -> None:
    sizes = [10, (2 << 30) + 3, 10]
    with DataLoader(Sized(sizes), num_workers=1, prefetch_factor=1, collate_fn=collate) as loader:
        check(loader, sizes)
