"""Lightning's Fabric. One line is different: where DataLoader comes from."""

import torch
from lightning.fabric import Fabric

import holdfast
from holdfast import DataLoader

if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu")
    layer = torch.nn.Linear(4, 1)
    model, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    loader = DataLoader(torch.rand(64, 4), batch_size=8, shuffle=True, num_workers=2)
    batches = fabric.setup_dataloaders(loader)
    for _ in range(2):
        for batch in batches:
            optimizer.zero_grad()
            fabric.backward(model(batch).pow(2).mean())
            optimizer.step()
    print("workers that died:", len(holdfast.of(batches).incidents))
