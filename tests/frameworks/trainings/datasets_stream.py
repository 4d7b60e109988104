"""A stream of Hugging Face's datasets with a row that cannot be parsed, and an epoch that persistent workers are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.frameworks.trainings.datasets_table import collate, parsed, table
from tests.frameworks.trainings.parts import BATCH, EPOCHS, Loader, Network, fit


def parse(row: dict[str, Any]) -> dict[str, Any]:
    return {"sample": parsed(row["text"]), "label": row["label"]}


def parse_or_mark(row: dict[str, Any]) -> dict[str, Any]:
    try:
        return {**parse(row), "good": True}
    except ValueError:
        return {"sample": None, "label": row["label"], "good": False}


def only_good(rows: list[Any]) -> Any:
    return collate([row if row.get("good", True) else None for row in rows])


def train(loader: Loader, folder: Path, forgiving: bool) -> torch.nn.Module:
    stream = table().to_iterable_dataset(num_shards=4)
    stream = stream.map(parse_or_mark if forgiving else parse, remove_columns=["text"])
    given = {"batch_size": BATCH, "num_workers": 2, "persistent_workers": True}
    batches = loader(stream.with_format("torch"), collate_fn=only_good, **given)
    model = Network()
    for epoch in range(EPOCHS):
        stream.set_epoch(epoch)
        fit(model, batches, epochs=1)
    return model
