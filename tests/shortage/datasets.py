"""Four datasets that run out of memory, each for another reason.

Each says how much stock torch piles up with it, in two workers; the harmless form of each has the
same needs but for that.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import Dataset

MIB = 1 << 20
WORKERS = 2
_leaked: list[Any] = []


class Shortage(Dataset[Any]):
    size: ClassVar[int]
    options: ClassVar[dict[str, Any]] = {"batch_size": 4}
    piles_up: ClassVar[int]  # bytes, in all workers together
    title: ClassVar[str]  # what is wrong with it, for tables and plots

    def __init__(self, *, harmless: bool = False) -> None:
        self.harmless = harmless

    def __len__(self) -> int:
        return self.size


class Leaking(Shortage):
    """Every sample leaves something behind."""

    size = 240
    leaves = 3  # MiB
    piles_up = size * leaves * MIB
    title = f"leaks {leaves} MiB per sample"

    def __getitem__(self, index: int) -> Any:
        if not self.harmless:
            _leaked.append(np.ones(self.leaves * MIB, np.uint8))
        return torch.rand(16) + index


class CopyOnWrite(Shortage):
    """A long list: a worker that reads it copies it, page by page. Here each worker reads its half."""

    size = 240
    rows = 1_500_000
    piles_up = rows * 96  # what Python takes for one of these strings
    title = "reads a long list (copy-on-write)"

    def __init__(self, *, harmless: bool = False) -> None:
        super().__init__(harmless=harmless)
        self.names = [f"a/path/to/somewhere/that/is/long/{n:09d}.jpg" for n in range(self.rows)]

    def __getitem__(self, index: int) -> Any:
        step = 1 if self.harmless else self.rows // self.size
        total = 0
        for name in self.names[index * step : (index + 1) * step]:
            total += len(name)
        return torch.rand(16) + index + total


class Cyclic(Shortage):
    """Every sample leaves a cycle behind that holds an array: few objects, many bytes."""

    size = 160
    holds = 8  # MiB
    piles_up = size * holds * MIB
    title = f"leaves cycles that hold {holds} MiB"

    def __getitem__(self, index: int) -> Any:
        holder: dict[str, Any] = {"array": np.ones(self.holds * MIB, np.uint8)}
        if not self.harmless:
            holder["self"] = holder
        return torch.rand(16) + index


class Large(Shortage):
    """Large samples: a few dozen prefetched are more than there is."""

    size = 96
    weighs, ahead, batch = 12, 12, 2  # MiB, batches, samples
    options: ClassVar[dict[str, Any]] = {"batch_size": batch, "prefetch_factor": ahead}
    piles_up = WORKERS * ahead * batch * weighs * MIB
    title = f"{weighs} MiB samples, prefetch_factor={ahead}"

    def __getitem__(self, index: int) -> Any:
        nbytes = 8 if self.harmless else self.weighs * MIB
        return torch.full((nbytes // 8,), float(index), dtype=torch.float64) + torch.rand(1)


KINDS: dict[str, type[Shortage]] = {
    kind.__name__: kind for kind in (Leaking, CopyOnWrite, Cyclic, Large)
}
