"""Samples in an LMDB, of which one was cut off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lmdb
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
    with (
        lmdb.open(str(folder / "samples.lmdb"), map_size=1 << 20) as store,
        store.begin(write=True) as writing,
    ):
        for index in range(SIZE):
            content = values(index).numpy().tobytes()
            writing.put(b"%06d" % index, content[:13] if index == BAD else content)


class InStore(Samples):
    """Opened where it is read, as LMDB wants it: an environment must not be used across a fork."""

    def __init__(self, forgiving: bool, path: Path) -> None:
        super().__init__(forgiving)
        self.path = path
        self.store: Any = None

    def read(self, index: int) -> torch.Tensor:
        if self.store is None:
            self.store = lmdb.open(str(self.path), readonly=True, lock=False)
        with self.store.begin() as reading:
            content = reading.get(b"%06d" % index)
        return torch.from_numpy(np.frombuffer(content, np.float32).reshape(WIDTH).copy())


def train(loader: Loader, folder: Path, forgiving: bool) -> torch.nn.Module:
    dataset = InStore(forgiving, folder / "samples.lmdb")
    given = {"batch_size": BATCH, "shuffle": True, "num_workers": 2}
    return fit(Network(), loader(dataset, collate_fn=without_none, **given))
