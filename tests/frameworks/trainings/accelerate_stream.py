"""A stream of Hugging Face's datasets, whose shards Accelerate divides among ranks."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import DataLoaderConfiguration, skip_first_batches

from tests.frameworks.trainings.accelerate_loop import new_accelerator
from tests.frameworks.trainings.datasets_stream import only_good, parse, parse_or_mark
from tests.frameworks.trainings.datasets_table import table
from tests.frameworks.trainings.parts import BATCH, EPOCHS, Loader, Network, loss_of


def train(loader: Loader, folder: Path, forgiving: bool) -> torch.nn.Module:
    accelerator = new_accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    stream = table().to_iterable_dataset(num_shards=4)
    stream = stream.map(parse_or_mark if forgiving else parse, remove_columns=["text"])
    network = Network()
    model, optimizer, batches = accelerator.prepare(
        network,
        torch.optim.SGD(network.parameters(), lr=0.1),
        loader(stream.with_format("torch"), batch_size=BATCH, num_workers=2, collate_fn=only_good),
    )
    for epoch in range(EPOCHS):
        for batch in skip_first_batches(batches, 1) if epoch == 0 else batches:
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    return network
