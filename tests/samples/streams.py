"""Run loaders and compare their batches."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import torch
import torch.utils.data

from holdfast import BadSampleWarning, DataLoader
from tests.samples.datasets import leave_out_none
from tests.support.golden import asked_once

Rows = list[list[tuple[float, ...]]]


def rows(batch: Any) -> list[tuple[float, ...]]:
    batch = batch if isinstance(batch, torch.Tensor) else torch.stack(list(batch))
    batch = batch if batch.ndim == 2 else batch[None]
    return [tuple(row.tolist()) for row in batch]


def seeded() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


def play(loader: Any, epochs: int = 1) -> list[Rows]:
    """All epochs, from one seed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BadSampleWarning)
        seeded()
        return [[rows(batch) for batch in loader if len(batch)] for _ in range(epochs)]


def ours(dataset: Any, *, epochs: int = 1, **options: Any) -> tuple[list[Rows], Any]:
    loader = DataLoader(dataset, **options)
    streams = play(loader, epochs)
    loader.close()
    return streams, loader


def stock(dataset: Any, *, epochs: int = 1, **options: Any) -> list[Rows]:
    """Stock torch with a dataset that catches, and a collation that leaves out."""
    options.setdefault("collate_fn", leave_out_none)
    return asked_once(
        "samples",
        (dataset, epochs, options),
        lambda: play(torch.utils.data.DataLoader(dataset, **options), epochs),
    )


def indices(stream: Rows) -> list[int]:
    return [int(row[0]) for batch in stream for row in batch]


def named(loader: Any) -> dict[Any, tuple[str, str]]:
    return {bad.index: (bad.kind, bad.error) for bad in loader.bad_samples}
