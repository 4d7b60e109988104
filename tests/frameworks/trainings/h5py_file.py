"""Samples in an HDF5 file, one compressed chunk for each, of which one is damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

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
    path = folder / "samples.h5"
    with h5py.File(path, "w") as file:
        made = file.create_dataset(
            "samples", (SIZE, WIDTH), np.float32, chunks=(1, WIDTH), compression="gzip"
        )
        for index in range(SIZE):
            made[index] = values(index).numpy()
        chunk = made.id.get_chunk_info_by_coord((BAD, 0))
    with path.open("r+b") as raw:
        raw.seek(chunk.byte_offset)
        raw.write(b"\xff" * chunk.size)


class InFile(Samples):
    """The file is opened where it is read: a handle that was open before a fork is of no use in a worker."""

    def __init__(self, forgiving: bool, path: Path) -> None:
        super().__init__(forgiving)
        self.path = path
        self.file: Any = None

    def read(self, index: int) -> torch.Tensor:
        if self.file is None:
            self.file = h5py.File(self.path, "r")
        return torch.from_numpy(self.file["samples"][index])


def train(loader: Loader, folder: Path, forgiving: bool) -> torch.nn.Module:
    dataset = InFile(forgiving, folder / "samples.h5")
    given = {"batch_size": BATCH, "shuffle": True, "num_workers": 2}
    return fit(Network(), loader(dataset, collate_fn=without_none, **given))
