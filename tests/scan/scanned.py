"""What the tests of `holdfast scan` scan; named on command lines, so importable."""

from __future__ import annotations

import itertools
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from tests.samples import corpus


def read(path: str) -> Any:
    return corpus.read(Path(path))


class Gated(Dataset[Any]):
    """Every 50th is bad. From the 600th on it waits until the gate is open. Notes what it loads."""

    def __init__(self, folder: str, size: int = 700) -> None:
        self.folder = Path(folder)
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        with (self.folder / "loaded").open("a") as file:
            file.write(f"{index}\n")
        if not (self.folder / "open").exists():
            time.sleep(0.01)
            while index >= 600 and not (self.folder / "open").exists():
                time.sleep(0.01)
        if index % 50 == 7:
            raise ValueError(f"record {index} has no label")
        return torch.tensor(index)


class Peculiar(Dataset[Any]):
    """Draws from the seeded generators, or one of its own, unless `index % 4` is 1; differs each
    time if it is 2."""

    numbers = itertools.count()

    def __init__(self) -> None:
        self.own = np.random.default_rng(3)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            return {"x": torch.zeros(1, 8, 8), "y": index}
        if index == 13:
            return {"x": torch.zeros(3, 8, 8, dtype=torch.float64), "y": index}
        if index % 4 == 2:
            return {"x": torch.full((3, 8, 8), float(next(self.numbers))), "y": index}
        draws = (torch.empty(()).uniform_, random.random, np.random.rand, self.own.random)
        drawn = 0.0 if index % 4 == 1 else float(draws[index // 3 % 4]())
        if index == 20:
            time.sleep(0.2)
        return {"x": torch.full((3, 8, 8), drawn), "y": index}


class Sized(Dataset[Any]):
    """As photographs are: each of another size, one of them grey."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Any:
        return np.zeros((10 + index, 20, 1 if index == 321 else 3), np.uint8)


class Together(Dataset[Any]):
    """Sample 30 breaks something, of which any later one dies: alone, each is good."""

    broken = False

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        if type(self).broken:
            os.abort()
        type(self).broken = index == 30
        return index


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield 1


def counted(count: int = 10, *, word: str = "x") -> list[str]:
    return [f"{word}{number}" for number in range(count)]


ready = [torch.zeros(2), torch.zeros(2), None, torch.zeros(2)]
number = 5
empty: list[Any] = []


def all_bad(count: int) -> Any:
    return _AllBad(count)


class _AllBad(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        raise FileNotFoundError(2, "No such file or directory", f"/data/{index}.jpg")
