"""Pictures that OpenCV decodes and Albumentations augments; one file was cut off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import albumentations as A
import cv2
import numpy as np
import torch

from tests.frameworks.trainings.parts import (
    BAD,
    BATCH,
    SIZE,
    Loader,
    Network,
    Samples,
    fit,
    label,
    without_none,
)

EDGE = 8


def prepare(folder: Path) -> None:
    for index in range(SIZE):
        picture = np.random.default_rng(index).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        _, content = cv2.imencode(".png", picture)
        whole = content.tobytes()
        (folder / f"{index}.png").write_bytes(whole[:20] if index == BAD else whole)


class Pictures(Samples):
    def __init__(self, forgiving: bool, folder: Path) -> None:
        super().__init__(forgiving)
        self.folder = folder
        self.transform = A.Compose(
            [
                A.RandomCrop(EDGE, EDGE),
                A.HorizontalFlip(p=0.5),
                A.OneOf([A.GaussNoise(p=1.0), A.RandomBrightnessContrast(p=1.0)], p=0.8),
            ],
            seed=137,
        )

    def read(self, index: int) -> Any:
        picture = cv2.imread(str(self.folder / f"{index}.png"))
        if picture is None:
            raise OSError(f"{index}.png cannot be decoded")
        return picture

    def made(self, sample: Any, index: int) -> Any:
        picture = self.transform(image=sample)["image"]
        return torch.from_numpy(picture).float().flatten() / 255, label(index)


def train(loader: Loader, folder: Path, forgiving: bool) -> torch.nn.Module:
    given = {"batch_size": BATCH, "shuffle": True, "num_workers": 2, "persistent_workers": True}
    batches = loader(Pictures(forgiving, folder), collate_fn=without_none, **given)
    return fit(Network(EDGE * EDGE * 3), batches)
