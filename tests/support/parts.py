"""Samplers, batch samplers, collate functions and worker_init_fns by name.

The differential tests draw names, not objects, so that a failing plan can be printed and pasted;
both loaders then get their own fresh objects.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from tests.support.datasets import Numbers, OneString


class EagerPermutation(Sampler[int]):
    """Draws from torch's global generator in `__iter__` itself: shows how often a loader calls
    iter() on its sampler."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.size).tolist())


class LazyDraws(Sampler[int]):
    """Draws from `random` for each index: shows in the random state how far a loader has advanced
    its sampler."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return (random.randrange(self.size) for _ in range(self.size))


class BatchesOfAnySize(Sampler[list[int]]):
    """Batches of one to three indices, the size drawn from NumPy's global generator."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        while start < self.size:
            stop = min(self.size, start + np.random.randint(1, 4))
            yield list(range(start, stop))
            start = stop


class EagerBatches(BatchesOfAnySize):
    """Batches of two in an order that is drawn in `__iter__` itself."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.size).tolist()
        return iter([order[start : start + 2] for start in range(0, self.size, 2)])


SAMPLERS: dict[str, Callable[[int, torch.Generator | None], Any]] = {
    "range": lambda size, generator: range(size - 1, -1, -1),
    "list": lambda size, generator: list(range(0, size, 2)),
    "numpy integers": lambda size, generator: list(np.arange(size)),
    "eager permutation": lambda size, generator: EagerPermutation(size),
    "lazy draws": lambda size, generator: LazyDraws(size),
    "with replacement": lambda size, generator: RandomSampler(
        Numbers(size), replacement=True, num_samples=size + 3, generator=generator
    ),
    "weighted": lambda size, generator: WeightedRandomSampler(
        [1.0] * size, size, generator=generator
    ),
    "subset": lambda size, generator: SubsetRandomSampler(range(0, size, 2), generator=generator),
    "distributed": lambda size, generator: DistributedSampler(
        Numbers(size), num_replicas=2, rank=1, seed=3
    ),
}

BATCH_SAMPLERS: dict[str, Callable[[int, torch.Generator | None], Any]] = {
    "unequal lists": lambda size, generator: [
        list(range(size))[i : i + 1 + i % 3] for i in range(0, size, 2)
    ],
    "tuples": lambda size, generator: [tuple(range(size))[i : i + 2] for i in range(0, size, 2)],
    "random sampler": lambda size, generator: BatchSampler(
        RandomSampler(Numbers(size), generator=generator), 2, drop_last=False
    ),
    "drop last": lambda size, generator: BatchSampler(EagerPermutation(size), 3, drop_last=True),
    "eager batches": lambda size, generator: EagerBatches(size),
    "any size": lambda size, generator: BatchesOfAnySize(size),
    "an empty batch": lambda size, generator: [[0], [], [size - 1]],
}


def identity(batch: Any) -> Any:
    return batch


def as_tuple(batch: Any) -> Any:
    return tuple(batch) if isinstance(batch, list) else (batch,)


def draws(batch: Any) -> Any:
    """Draws in the collate function, after all samples of the batch have drawn."""
    info = get_worker_info()
    return {
        "batch": batch,
        "worker": None if info is None else info.id,
        "torch": torch.rand(3),
        "random": random.random(),
        "numpy": np.random.rand(),
    }


def default_inside(batch: Any) -> Any:
    """What most people's collate functions do: default_collate, and then a little more."""
    return {"collated": default_collate(batch), "first": batch[0]}


def refuses_pairs(batch: Any) -> Any:
    if isinstance(batch, list) and len(batch) == 2:
        raise OneString(f"no pairs please: {len(batch)}")
    return batch


def nothing(batch: Any) -> None:
    return None


class Callable_:
    """A collate function with state of its own: it counts its calls in each process."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batch: Any) -> Any:
        self.calls += 1
        return self.calls, batch


def _tagged(tag: str, batch: Any) -> Any:
    return tag, batch


COLLATES: dict[str, Callable[[], Any]] = {
    "default": lambda: None,
    "identity": lambda: identity,
    "as tuple": lambda: as_tuple,
    "draws": lambda: draws,
    "default inside": lambda: default_inside,
    "refuses pairs": lambda: refuses_pairs,
    "nothing": lambda: nothing,
    "counts its calls": Callable_,
    "partial": lambda: functools.partial(_tagged, "tag"),
    "default_collate": lambda: default_collate,
}


def reseed(worker_id: int) -> None:
    torch.manual_seed(1000 + worker_id)
    random.seed(1000 + worker_id)
    np.random.seed(1000 + worker_id)


def mark(worker_id: int) -> None:
    """Changes the worker's own copy of the dataset."""
    info = get_worker_info()
    assert info is not None
    info.dataset.mark = 100 * (worker_id + 1)  # type: ignore[attr-defined]


def draw_once(worker_id: int) -> None:
    torch.rand(1)
    random.random()
    np.random.rand()


def fail_in_worker_1(worker_id: int) -> None:
    if worker_id == 1:
        raise OneString("worker 1 will not start")


WORKER_INITS: dict[str, Callable[[int], None] | None] = {
    "none": None,
    "reseed": reseed,
    "mark": mark,
    "draw once": draw_once,
    "fail in 1": fail_in_worker_1,
}
