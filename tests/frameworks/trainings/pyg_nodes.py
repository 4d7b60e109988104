"""Parts of one large graph, by the loaders of PyTorch Geometric that sample nodes in workers.

`NeighborLoader` is such a loader, with a sampler that needs a compiled package; here the sampler is our own. A part has no
single sample that could be corrupt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader, RandomNodeLoader
from torch_geometric.sampler import BaseSampler, SamplerOutput

from tests.frameworks.trainings.parts import EPOCHS, Loader, label, values
from tests.frameworks.trainings.pyg_graphs import Convolution

NODES = 48


class Neighbours(BaseSampler):
    """For each node a neighbour drawn at random, in a ring."""

    def sample_from_nodes(self, index: Any, **kwargs: Any) -> SamplerOutput:
        seeds = index.node
        drawn = (seeds + torch.randint(1, 3, seeds.shape)) % NODES
        nodes = torch.cat([seeds, drawn])
        count = torch.arange(len(seeds))
        return SamplerOutput(
            node=nodes, row=count + len(seeds), col=count, edge=None, metadata=(seeds, None)
        )

    def sample_from_edges(self, index: Any, neg_sampling: Any = None) -> Any:
        raise NotImplementedError

    @property
    def edge_permutation(self) -> None:
        return None


def graph() -> Data:
    ring = torch.arange(NODES)
    return Data(
        x=torch.stack([values(index) for index in range(NODES)]),
        edge_index=torch.stack([ring, ring.roll(1)]),
        y=torch.tensor([label(index) for index in range(NODES)]),
    )


def train(loader: Loader, folder: Path, forgiving: bool) -> torch.nn.Module:
    """`loader` is not asked for: these classes make the loader themselves."""
    model = Convolution()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampled = NodeLoader(
        graph(), node_sampler=Neighbours(), batch_size=8, shuffle=True, num_workers=2
    )
    drawn = RandomNodeLoader(graph(), num_parts=6, shuffle=True, num_workers=2)
    for _ in range(EPOCHS):
        for batches in (sampled, drawn):
            for part in batches:
                optimizer.zero_grad()
                found = model.last(model.first(part.x, part.edge_index).relu())
                torch.nn.functional.cross_entropy(found, part.y).backward()
                optimizer.step()
    return model
