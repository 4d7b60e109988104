"""Graphs of PyTorch Geometric: many small ones, of which one is corrupt, and parts of a large one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch_geometric.loader
from torch_geometric.data import Batch, Data, Dataset
from torch_geometric.nn import GCNConv, global_mean_pool

from tests.frameworks.trainings.parts import (
    BAD,
    BATCH,
    EPOCHS,
    SIZE,
    WIDTH,
    Loader,
    augmented,
    label,
    values,
)


class Graphs(Dataset):
    def __init__(self, forgiving: bool) -> None:
        super().__init__()
        self.forgiving = forgiving

    def len(self) -> int:
        return SIZE

    def get(self, index: int) -> Any:
        if index == BAD:
            if self.forgiving:
                return None
            raise ValueError(f"graph {index} is corrupt")
        nodes = 3 + index % 4
        ring = torch.arange(nodes)
        return Data(
            x=augmented(values(index).expand(nodes, WIDTH)),
            edge_index=torch.stack([ring, ring.roll(1)]),
            y=torch.tensor(label(index)),
        )


def without_none(graphs: list[Any]) -> Any:
    return Batch.from_data_list([graph for graph in graphs if graph is not None])


class Convolution(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = GCNConv(WIDTH, 8)
        self.last = torch.nn.Linear(8, 2)

    def forward(self, graphs: Any) -> torch.Tensor:
        found = self.first(graphs.x, graphs.edge_index).relu()
        return self.last(global_mean_pool(found, graphs.batch))


def train(loader: Loader, folder: Path, forgiving: bool) -> torch.nn.Module:
    model = Convolution()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"batch_size": BATCH, "shuffle": True, "num_workers": 2}
    if loader is torch.utils.data.DataLoader and not forgiving:
        batches = torch_geometric.loader.DataLoader(Graphs(forgiving), **given)
    else:
        batches = loader(Graphs(forgiving), collate_fn=without_none, **given)
    for _ in range(EPOCHS):
        for graphs in batches:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(graphs), graphs.y).backward()
            optimizer.step()
    return model
