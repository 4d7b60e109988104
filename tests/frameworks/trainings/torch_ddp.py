"""Plain DistributedDataParallel under torchrun: nothing but torch. The process group is there already."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from tests.frameworks.trainings.parts import (
    BATCH,
    EPOCHS,
    Loader,
    Network,
    Samples,
    fit,
    without_none,
)


def train(loader: Loader, folder: Path, forgiving: bool) -> torch.nn.Module:
    samples = Samples(forgiving)
    sampler: DistributedSampler[int] = DistributedSampler(samples, shuffle=True, seed=3)
    batches = loader(
        samples,
        batch_size=BATCH,
        sampler=sampler,
        num_workers=2,
        collate_fn=without_none,
        persistent_workers=True,
    )
    network = Network()
    model = DistributedDataParallel(network)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        fit(model, batches, epochs=1)
    return network
