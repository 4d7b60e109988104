"""Accelerate: gradients accumulated over the end of the loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

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

ACCUMULATED = 4
"""Of 6 batches: the end of the loader comes in the middle of it."""


def new_accelerator(**given: Any) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **given)


def train(loader: Loader, folder: Path, forgiving: bool) -> torch.nn.Module:
    accelerator = new_accelerator(gradient_accumulation_steps=ACCUMULATED)
    network = Network()
    model, optimizer, batches = accelerator.prepare(
        network,
        torch.optim.SGD(network.parameters(), lr=0.1),
        loader(
            Samples(forgiving),
            batch_size=BATCH,
            shuffle=True,
            num_workers=2,
            collate_fn=without_none,
        ),
    )
    steps = 0
    for _ in range(EPOCHS):
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            steps += accelerator.sync_gradients
    assert steps == 2 * EPOCHS, "the end of the loader was not seen"
    if RANKS == 1:  # it ends the process group too, which the next training needs
        accelerator.end_training()
    return network
