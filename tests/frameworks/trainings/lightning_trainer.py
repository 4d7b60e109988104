"""Lightning's Trainer: two epochs, each with a validation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning import pytorch as lightning

from tests.frameworks.trainings.parts import (
    BATCH,
    EPOCHS,
    RANKS,
    Loader,
    Network,
    Samples,
    loss_of,
    without_none,
)

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = Network()

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        return loss_of(self.network, batch)

    def validation_step(self, batch: Any, number: int) -> torch.Tensor:
        return loss_of(self.network, batch)

    def predict_step(self, batch: Any, number: int) -> torch.Tensor:
        return self.network(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loaders(loader: Loader, forgiving: bool) -> tuple[Any, Any]:
    given = {"batch_size": BATCH, "num_workers": 2, "collate_fn": without_none}
    return (
        loader(Samples(forgiving), shuffle=True, persistent_workers=True, **given),
        loader(Samples(forgiving), **given),
    )


def train(loader: Loader, folder: Path, forgiving: bool) -> torch.nn.Module:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp" if RANKS > 1 else "auto",
        max_epochs=EPOCHS,
        num_sanity_val_steps=1,
        **QUIET,
    )
    module = Module()
    trainer.fit(module, *loaders(loader, forgiving))
    return module
