"""Four datasets that run out of memory, each for another reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

MIB = 1 << 20
_leaked: list[Any] = []


class Leaking(Dataset[Any]):
    """Every sample leaves 3 MB behind."""

    size = 240

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        _leaked.append(np.ones(3 * MIB, np.uint8))
        return torch.rand(16) + index


class CopyOnWrite(Dataset[Any]):
    """A long list: whoever reads it copies it, page by page."""

    size = 240
    rows = 1_500_000

    def __init__(self) -> None:
        self.names = [f"a/path/to/somewhere/that/is/long/{n:09d}.jpg" for n in range(self.rows)]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        step = self.rows // self.size
        total = 0
        for name in self.names[index * step : (index + 1) * step]:
            total += len(name)
        return torch.rand(16) + index + total


class Cyclic(Dataset[Any]):
    """Every sample leaves a cycle behind that holds 8 MB: few objects, many bytes."""

    size = 160

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        holder: dict[str, Any] = {"array": np.ones(8 * MIB, np.uint8)}
        holder["self"] = holder
        return torch.rand(16) + index


class Large(Dataset[Any]):
    """Samples of 12 MB: a few dozen prefetched are more than there is."""

    size = 96

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return torch.full((12 * MIB // 8,), float(index), dtype=torch.float64) + torch.rand(1)


KINDS = {kind.__name__: kind for kind in (Leaking, CopyOnWrite, Cyclic, Large)}
OPTIONS: dict[str, dict[str, Any]] = {
    "Leaking": {"batch_size": 4},
    "CopyOnWrite": {"batch_size": 4},
    "Cyclic": {"batch_size": 4},
    "Large": {"batch_size": 2, "prefetch_factor": 12},
}
