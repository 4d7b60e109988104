"""Lightning's Fabric: a loop of one's own."""

from __future__ import annotations

from pathlib import Path

import torch
from lightning.fabric import Fabric

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


def train(loader: Loader, folder: Path, forgiving: bool) -> torch.nn.Module:
    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp" if RANKS > 1 else "auto")
    fabric.launch()
    network = Network()
    model, optimizer = fabric.setup(network, torch.optim.SGD(network.parameters(), lr=0.1))
    batches = fabric.setup_dataloaders(
        loader(
            Samples(forgiving),
            batch_size=BATCH,
            shuffle=True,
            num_workers=2,
            collate_fn=without_none,
        )
    )
    for _ in range(EPOCHS):
        for batch in batches:
            optimizer.zero_grad()
            fabric.backward(loss_of(model, batch))
            optimizer.step()
    return network
