"""Datasets for the doctor: a healthy one, and one for every complaint."""

from __future__ import annotations

import random
import sqlite3
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

COUNTED: list[int] = []
TOTAL = 0


class Healthy(Dataset[Any]):
    def __init__(self) -> None:
        self.data = torch.arange(4000.0).reshape(400, 10)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


class Counting(Healthy):
    """Changes what each worker then has for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, Any] = {}
        self.calls = 0
        self.generator = random.Random(5)

    def __getitem__(self, index: int) -> Any:
        global TOTAL
        TOTAL += 1
        COUNTED.append(index)
        self.calls += 1
        self.cache[index] = self.generator.random()
        return self.data[index]


class Opened(Healthy):
    """Has opened in `__init__` what workers must not share."""

    def __init__(self) -> None:
        super().__init__()
        self.file = open(__file__, "rb")  # noqa: SIM115
        self.database = sqlite3.connect(":memory:")

    def close(self) -> None:
        self.file.close()
        self.database.close()


class Zipped(Healthy):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.inside = {"archive": zipfile.ZipFile(path, "w")}


class Listed(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.paths = [
            f"/a/rather/long/path/to/an/image/{number:09d}.jpg" for number in range(900_000)
        ]


class Unpicklable(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.transform = lambda value: value

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.data[index])


class Raising(Healthy):
    def __getitem__(self, index: int) -> Any:
        raise ValueError(f"broken file {index}.jpg")


class Uneven(Healthy):
    """One sample in ten is slow and large."""

    def __getitem__(self, index: int) -> Any:
        if index % 50 == 0 and index:
            time.sleep(0.1)
            return torch.zeros(1_000_000)
        return self.data[index]


class Streaming(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(200))


def make() -> Healthy:
    return Healthy()


def needs(argument: int) -> Healthy:
    return Healthy()


healthy = Healthy()
number = 5
EMPTY: list[int] = []
