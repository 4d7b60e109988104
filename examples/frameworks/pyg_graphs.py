"""Graphs of PyTorch Geometric.

PyG makes its loaders itself, so holdfast is installed for all loaders of the program.
"""

import torch
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

import holdfast

holdfast.install()

graphs = [
    Data(x=torch.rand(4, 2), edge_index=torch.tensor([[0, 1, 2], [1, 2, 3]])) for _ in range(64)
]
loader = DataLoader(graphs, batch_size=8, shuffle=True, num_workers=2)
print("graphs:", sum(batch.num_graphs for batch in loader))
print("workers that died:", len(holdfast.of(loader).incidents))
holdfast.uninstall()
