"""Shards of WebDataset, one with a sample that cannot be decoded, which WebDataset's own handler leaves out."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset as wds

from tests.frameworks.trainings.parts import (
    BAD,
    BATCH,
    SIZE,
    Loader,
    Network,
    augmented,
    fit,
    label,
    values,
)

SHARDS = 4


def prepare(folder: Path) -> None:
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for index in range(shard * SIZE // SHARDS, (shard + 1) * SIZE // SHARDS):
                content = io.BytesIO()
                np.save(content, values(index).numpy())
                whole = content.getvalue()
                _add(tar, f"{index:06d}.npy", whole[:40] if index == BAD else whole)
                _add(tar, f"{index:06d}.cls", str(label(index)).encode())


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))


def sample_of(pair: Any) -> Any:
    return augmented(torch.from_numpy(pair[0])), pair[1]


def train(loader: Loader, folder: Path, forgiving: bool) -> torch.nn.Module:
    stream = (
        wds.WebDataset(
            [str(folder / f"{shard}.tar") for shard in range(SHARDS)], shardshuffle=SHARDS, seed=7
        )
        .compose(wds.detshuffle(8, seed=42))
        .decode(handler=wds.ignore_and_continue)
        .to_tuple("npy", "cls")
        .map(sample_of)
    )
    kind = wds.WebLoader if loader is torch.utils.data.DataLoader else loader
    return fit(Network(), kind(stream, batch_size=BATCH, num_workers=2))
