"""Datasets for worker threads. What hangs does so until it is let go: a test must do that."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Gate:
    """Hangs at some samples: each time, or only the first time. A copy of it is the same gate."""

    def __init__(self, *at: int, always: bool = False) -> None:
        self.at = set(at)
        self.always = always
        self.open = threading.Event()
        self.passed: list[int] = []  # samples that hung and were let go

    def __deepcopy__(self, memo: Any) -> Gate:
        return self

    def enter(self, index: int) -> None:
        if index in self.at:
            if not self.always:
                self.at.discard(index)
            self.open.wait(60)
            self.passed.append(index)


def drawn(index: int) -> Any:
    """Numbers from all generators of the worker."""
    info: Any = get_worker_info()
    rng = info.rng
    numbers = rng.random_generator.random(), float(rng.numpy_generator.standard_normal())
    return index, info.id, info.seed, *numbers, torch.rand(3, generator=rng.torch_generator)


class Drawing(Dataset[Any]):
    """Each sample draws from the worker's own generators."""

    def __init__(self, length: int = 40, gate: Gate | None = None) -> None:
        self.length = length
        self.gate = gate

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        found = drawn(index)
        if self.gate is not None:
            self.gate.enter(index)
        return found


class Stream(IterableDataset[Any]):
    """Each worker has every n-th number. Its position is in the object."""

    def __init__(self, length: int = 31, gate: Gate | None = None) -> None:
        self.length = length
        self.gate = gate
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        info: Any = get_worker_info()
        assert info.dataset is self
        for number in range(info.id, self.length, info.num_workers):
            self.at = number
            if self.gate is not None:
                self.gate.enter(self.at)
            yield drawn(self.at)


class OwnGenerator(Dataset[float]):
    """Draws from a generator that is an attribute."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(7)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> float:
        return float(self.rng.random())


class NotThreadSafe(OwnGenerator):
    thread_safe = False


class Plain(Dataset[Any]):
    """No randomness. Sample `bad` raises."""

    def __init__(self, length: int = 24, bad: int = -1) -> None:
        self.length = length
        self.bad = bad

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise ValueError(f"sample {index} is broken")
        return {"x": torch.full((2,), index), "y": np.float32(index), "name": f"sample {index}"}
