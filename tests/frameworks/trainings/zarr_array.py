"""Samples in a Zarr array, one chunk for each, of which one is damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import zarr

from tests.frameworks.trainings.parts import (
    BAD,
    BATCH,
    SIZE,
    WIDTH,
    Loader,
    Network,
    Samples,
    fit,
    values,
    without_none,
)


def prepare(folder: Path) -> None:
    path = folder / "samples.zarr"
    array = zarr.create_array(str(path), shape=(SIZE, WIDTH), chunks=(1, WIDTH), dtype="float32")
    for index in range(SIZE):
        array[index] = values(index).numpy()
    (path / "c" / str(BAD) / "0").write_bytes(b"no chunk")


class InArray(Samples):
    """Opened where it is read: Zarr reads in a thread of its own, which a forked worker does not have."""

    def __init__(self, forgiving: bool, path: Path) -> None:
        super().__init__(forgiving)
        self.path = path
        self.array: Any = None

    def read(self, index: int) -> torch.Tensor:
        if self.array is None:
            self.array = zarr.open_array(str(self.path), mode="r")
        return torch.from_numpy(self.array[index])


def train(loader: Loader, folder: Path, forgiving: bool) -> torch.nn.Module:
    dataset = InArray(forgiving, folder / "samples.zarr")
    given = {"batch_size": BATCH, "shuffle": True, "num_workers": 2}
    return fit(Network(), loader(dataset, collate_fn=without_none, **given))
