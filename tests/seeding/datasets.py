"""Datasets whose samples are what they draw."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info


def drawn() -> list[float]:
    return [
        random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(),
        torch.rand(1).item(), torch.randn(1).item(),
    ]  # fmt: skip


class Draws:
    """Each sample is its key and what it draws, which is more for some samples than for others."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, key: int) -> tuple[int, list[float]]:
        for _ in range(int(key) % 3):
            drawn()
        return int(key), drawn()


class DrawsAtOnce(Draws):
    def __getitems__(self, keys: list[int]) -> list[Any]:
        return [self[key] for key in keys]


class Temporary(Draws):
    """Every third sample fails at first, after it has drawn; sample 4 is bad for good."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.failed: set[int] = set()

    def __getitem__(self, key: int) -> tuple[int, list[float]]:
        drawn()
        if key == 4:
            raise ValueError("bad")
        if key % 3 == 0 and key not in self.failed:
            self.failed.add(key)
            raise ConnectionResetError("for now")
        return key, drawn()


class Stream(IterableDataset[Any]):
    """Draws when iter() is called, and for each element."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(self.size).tolist()
        info = get_worker_info()
        return self._elements(order[info.id :: info.num_workers] if info else order)

    def _elements(self, order: list[int]) -> Iterator[Any]:
        for key in order:
            yield key, drawn()


class BadElement(IterableDataset[Any]):
    """A generator that raises in the middle, and can be continued from its state."""

    def __init__(self) -> None:
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]

    def __iter__(self) -> Iterator[Any]:
        first, self.next = self.next, 0
        for key in range(first, 20):
            self.next = key + 1
            if key == 9:
                raise ValueError("bad")
            yield key, drawn()
        self.next = 0


def as_is(samples: list[Any]) -> list[Any]:
    return samples


def noisy(samples: list[Any]) -> list[Any]:
    return [*samples, ("batch", drawn())]
