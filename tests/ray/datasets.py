"""Datasets for workers on a Ray cluster. Marks are files, because actors share no memory."""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

__all__ = ["Noisy", "Stream", "Waits", "digest", "marked"]


def marked(path: Path) -> bool:
    """Whether this is the first call with this path, in any process."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Noisy(Dataset[Any]):
    """Every sample shows the random states it was made from. Samples in `deadly` do what it says,
    once (unless it says otherwise)."""

    def __init__(
        self,
        length: int = 80,
        seconds: float = 0.0,
        deadly: dict[int, str] | None = None,
        marks: Path | None = None,
        size: int = 1,
        uses: int = 0,
    ) -> None:
        self.length, self.seconds, self.size = length, seconds, size
        self.deadly, self.marks, self.uses = deadly or {}, marks, uses
        self.shift = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        what = self.deadly.get(index)
        if what == "raise":
            raise ValueError(f"sample {index} is broken")
        if what == "die each time":
            os._exit(9)
        if what and marked(self.marks / str(index)):  # type: ignore[operator]
            if what == "hang":
                time.sleep(600)
            if what == "eat":
                eaten = []
                while len(eaten) << 27 < self.uses:  # until it is killed
                    eaten.append(np.ones(1 << 27, np.uint8))
                    time.sleep(0.05)
                time.sleep(10)
            os._exit(9)
        drawn = [random.random(), float(torch.rand(())), float(np.random.rand())]
        values = [index + self.shift, *drawn]
        return torch.tensor(values, dtype=torch.float64).repeat(self.size)

    def set_epoch(self, epoch: int) -> None:
        self.shift = 1000 * epoch


class Waits(Dataset[int]):
    """Sample 9 waits until this file exists."""

    def __init__(self, go_on: Path) -> None:
        self.go_on = go_on

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        while index == 9 and not self.go_on.exists():
            time.sleep(0.05)
        return index


class Stream(IterableDataset[Any]):
    """Each worker has its part."""

    def __init__(self, length: int = 40, dies: Path | None = None) -> None:
        self.length, self.dies = length, dies

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for index in range(info.id, self.length, info.num_workers):
            if index == self.length // 2 and self.dies is not None and marked(self.dies):
                os._exit(9)
            yield torch.tensor([index, int(torch.randint(1 << 30, ()))])


def digest(batches: Iterable[Any]) -> str:
    found = hashlib.sha256()
    for batch in batches:
        found.update(batch.numpy().tobytes())
    return found.hexdigest()
