"""What the trainings have in common: samples, one of them corrupt, a model, a loop."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate

SIZE = 24
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
BATCH = 4 // RANKS
"""Samples in a batch of one rank: six batches, however many ranks there are."""
WIDTH = 8
EPOCHS = 2
BAD = 7
"""The corrupt sample."""

Loader = Callable[..., Any]
"""A class of loaders, or a function that makes one."""


def values(index: int) -> torch.Tensor:
    """What sample `index` contains."""
    return torch.linspace(-1, 1, WIDTH) * (index % 5) + index / SIZE


def augmented(sample: torch.Tensor) -> torch.Tensor:
    """With a little noise, so that the random state of workers matters."""
    return sample + 0.01 * torch.rand(sample.shape)


def label(index: int) -> int:
    return index % 2


class Samples(Dataset[Any]):
    """The corrupt one raises. If `forgiving`, it is None instead, which is what people do about it with torch."""

    def __init__(self, forgiving: bool) -> None:
        self.forgiving = forgiving

    def __len__(self) -> int:
        return SIZE

    def read(self, index: int) -> torch.Tensor:
        if index == BAD:
            raise ValueError(f"sample {index} is corrupt")
        return values(index)

    def made(self, sample: torch.Tensor, index: int) -> Any:
        return augmented(sample), label(index)

    def __getitem__(self, index: int) -> Any:
        try:
            sample = self.read(index)
        except Exception:
            if not self.forgiving:
                raise
            return None
        return self.made(sample, index)


def without_none(rows: list[Any]) -> Any:
    """The other half of what people do about it with torch."""
    return default_collate([row for row in rows if row is not None])


class Network(torch.nn.Sequential):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(torch.nn.Linear(width, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    return torch.nn.functional.cross_entropy(model(inputs), labels)


def fit(model: torch.nn.Module, loader: Iterable[Any], epochs: int = EPOCHS) -> torch.nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    return model


def weights(model: torch.nn.Module) -> str:
    """A text that is equal for equal weights, bit for bit."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()[:16]
