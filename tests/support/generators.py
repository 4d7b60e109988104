"""A dataset with random generators of its own, of every kind and in every kind of place."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

GLOBAL = np.random.default_rng(90)
TABLE = {"global": [random.Random(91)]}


def as_imported() -> None:
    """Set the generators that all objects share to what a fresh interpreter has: a forked worker
    inherits them as the tests before have left them, one that is spawned does not."""
    GLOBAL.bit_generator.state = np.random.default_rng(90).bit_generator.state
    TABLE["global"][0].setstate(random.Random(91).getstate())
    Sharing.rng.bit_generator.state = np.random.default_rng(92).bit_generator.state


class Dice(random.Random):
    """A subclass whose own code is not to run because it is looked at."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.given = seed

    def __reduce__(self) -> Any:
        return Dice, (self.given,)

    def getstate(self) -> Any:
        raise AssertionError("it must not be asked")

    setstate = getstate  # type: ignore[assignment]


class Slotted:
    __slots__ = ("rng",)

    def __init__(self, seed: int) -> None:
        self.rng = np.random.RandomState(seed)

    def __call__(self) -> float:
        return float(self.rng.standard_normal())  # of two Gaussians one is kept for the next


class Transform:
    """One of many that share a generator, and have one of their own."""

    def __init__(self, shared: np.random.Generator, seed: int) -> None:
        self.random_generator = shared
        self.py_random = random.Random(seed)

    def __call__(self) -> float:
        return float(self.random_generator.normal()) + self.py_random.gauss(0, 1)


class Compose:
    def __init__(self, *transforms: Callable[[], float]) -> None:
        self.transforms = list(transforms)

    def __call__(self) -> float:
        return sum(transform() for transform in self.transforms)


def add(first: Callable[[], float], second: Callable[[], float]) -> float:
    return first() + second()


def helper() -> float:
    return float(GLOBAL.random()) + TABLE["global"][0].random()


class Sharing:
    """What its objects have in common."""

    rng = np.random.default_rng(92)

    def __call__(self) -> float:
        return float(self.rng.random())


def normal(generator: torch.Generator) -> float:
    return float(torch.randn((), generator=generator))


class Drawing(Dataset[Any]):
    """Every sample draws from all of them."""

    def __init__(self, size: int = 24) -> None:
        self.size = size
        shared = np.random.default_rng(1)
        self.rng = np.random.default_rng(2)
        self.halves = np.random.default_rng(3)
        self.twister = np.random.Generator(np.random.MT19937(4))
        self.bits = {
            "philox": np.random.Generator(np.random.Philox(5)),
            ("sfc", 64): (np.random.Generator(np.random.SFC64(6)),),
            3: [np.random.Generator(np.random.PCG64DXSM(7))],
        }
        self.old = np.random.RandomState(8)
        self.odd = np.random.RandomState(np.random.PCG64(9))
        self.dice = deque([random.Random(10), Dice(11)])
        self.torch = torch.Generator().manual_seed(12)
        self.transform = Compose(
            Transform(shared, 13),
            Compose(Transform(shared, 14), Slotted(15), Sharing()),
            functools.partial(add, Slotted(16), second=random.Random(17).random),
        )
        self.method = np.random.RandomState(18).uniform
        self.seeds = np.random.SeedSequence(19)
        self.parent = np.random.default_rng(20)
        self.lazy: np.random.Generator | None = None
        self.each: np.random.Generator | None = None
        self.table: list[float] | None = None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.lazy is None:  # as many do; and something else with it
            worker = get_worker_info()
            self.lazy = np.random.default_rng(21 + (worker.id if worker else 0))
            self.table = [0.5]
        assert self.table is not None
        if not index % 3:
            self.each = np.random.default_rng(index)  # another one
        drawn = [
            float(index),
            self.rng.normal(),
            self.halves.integers(0, 1 << 20, dtype=np.uint32),  # half of a draw is kept
            self.twister.random(),
            *(float(one.random()) for one in self._bits()),
            self.old.randn(),
            self.odd.randn(),
            *(one.gauss(0, 1) for one in self.dice),
            normal(self.torch),
            self.transform(),
            self.method(),
            np.random.default_rng(self.seeds.spawn(1)[0]).random(),
            self.parent.spawn(1)[0].random(),
            self.lazy.random() + self.table[0],
            0.0 if self.each is None else self.each.random(),
            helper(),
            torch.rand(()).item() + random.random() + np.random.rand(),
        ]
        return torch.tensor(drawn, dtype=torch.float64)

    def _bits(self) -> Iterator[np.random.Generator]:
        for value in self.bits.values():
            yield value if isinstance(value, np.random.Generator) else value[0]


class Jitter:
    """A collate function with a generator."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples) + float(self.rng.random())


class Streaming(IterableDataset[Any]):
    """Draws from generators of the dataset, of its epoch and of its iterator."""

    def __init__(self, size: int = 24) -> None:
        self.size = size
        self.rng = np.random.default_rng(1)
        self.epoch = 0
        self.of_epoch = np.random.default_rng(0)

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.epoch += 1
        self.of_epoch = np.random.default_rng(self.epoch)
        worker = get_worker_info()
        for number in range(worker.id, self.size, worker.num_workers):
            drawn = [float(number), self.rng.random(), self.of_epoch.random(), np.random.rand()]
            yield torch.tensor(drawn, dtype=torch.float64)


class _Position:
    def __init__(self, dataset: Resuming) -> None:
        worker = get_worker_info()
        self.dataset = dataset
        self.at = worker.id
        self.step = worker.num_workers
        self.dice = random.Random(5)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        if self.at >= self.dataset.size:
            raise StopIteration
        drawn = [float(self.at), self.dataset.rng.random(), self.dice.random(), random.random()]
        self.at += self.step
        return torch.tensor(drawn, dtype=torch.float64)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Resuming(IterableDataset[Any]):
    """Its iterator says where it is, and nothing of its generators."""

    def __init__(self, size: int = 24) -> None:
        self.size = size
        self.rng = np.random.default_rng(1)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return _Position(self)
