"""Albumentations keeps generators of its own in every transform, deaf to torch's seeds: with
``A.Compose(seed=137)`` all workers begin with the same ones, and each goes its own way."""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

import holdfast

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(120)]
A = pytest.importorskip("albumentations")

KILLS = ";".join(
    (
        "after-fetch:SIGKILL@worker=0,task=2",
        "before-send:SIGKILL@worker=1,task=3",
        "after-collate:SIGKILL@worker=0,task=6,generation=1",
        "after-send:SIGSEGV@worker=1,task=5,generation=1",
    )
)


def pipeline(seed: int | None) -> Any:
    return A.Compose(
        [
            A.RandomCrop(24, 24),
            A.HorizontalFlip(p=0.5),
            A.OneOf([A.GaussNoise(p=1.0), A.RandomBrightnessContrast(p=1.0)], p=0.8),
            A.SomeOf([A.Affine(), A.CoarseDropout(), A.Sharpen()], n=2),
            A.Compose([A.Affine(rotate=(-30, 30), p=0.7)], p=0.9),
        ],
        seed=seed,
    )


class Pictures(torch.utils.data.Dataset[Any]):
    def __init__(self, seed: int | None) -> None:
        self.transform = pipeline(seed)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        picture = np.random.default_rng(index).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        return self.transform(image=picture)["image"]


def stream(loader_class: Any, dataset: Any, **given: Any) -> str:
    torch.manual_seed(3)
    loader = loader_class(dataset, batch_size=4, num_workers=2, persistent_workers=True, **given)
    digest = hashlib.sha256()
    for _ in range(2):
        for batch in loader:
            digest.update(batch.numpy().tobytes())
    assert loader_class is not holdfast.DataLoader or len(loader.incidents) == 4
    return digest.hexdigest()


@pytest.mark.parametrize("seed", [137, None])
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_augmentations_after_kills_are_those_of_a_run_without(
    seed: int | None,
    method: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    dataset = Pictures(seed)
    wanted = stream(torch.utils.data.DataLoader, dataset, multiprocessing_context=method)
    monkeypatch.setenv("HOLDFAST_FAULTS", KILLS)
    with caplog.at_level(logging.WARNING, "holdfast"):
        got = stream(
            holdfast.DataLoader, dataset, multiprocessing_context=method, max_restarts=None
        )
    assert got == wanted
    assert "random generator" not in caplog.text
