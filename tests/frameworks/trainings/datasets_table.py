"""A table of Hugging Face's datasets, with a transform that parses its rows; one cannot be parsed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import torch

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
    without_none,
)


def table() -> datasets.Dataset:
    texts = [json.dumps(values(index).tolist()) for index in range(SIZE)]
    texts[BAD] = texts[BAD][:9]
    return datasets.Dataset.from_dict({"text": texts, "label": [label(one) for one in range(SIZE)]})


def parsed(text: str) -> torch.Tensor:
    return augmented(torch.tensor(json.loads(text)))


def transform(rows: dict[str, Any]) -> dict[str, Any]:
    """Of one row or of several."""
    return {"sample": [parsed(text) for text in rows["text"]], "label": rows["label"]}


class Forgiving(torch.utils.data.Dataset[Any]):
    """None for a row that cannot be parsed."""

    def __init__(self, table: datasets.Dataset) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Any:
        try:
            return self.table[index]
        except ValueError:
            return None


def collate(rows: list[Any]) -> Any:
    batch = without_none(rows)
    return batch["sample"], batch["label"]


def train(loader: Loader, folder: Path, forgiving: bool) -> torch.nn.Module:
    rows = table().with_transform(transform)
    given = {"batch_size": BATCH, "shuffle": True, "num_workers": 2}
    batches = loader(Forgiving(rows) if forgiving else rows, collate_fn=collate, **given)
    return fit(Network(), batches)
