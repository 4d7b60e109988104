"""Accelerate. One line is different: where DataLoader comes from.

`prepare` makes another loader of every loader. Of ours it makes one of ours, with its options.
"""

import torch
from accelerate import Accelerator

import holdfast
from holdfast import DataLoader

if __name__ == "__main__":
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    layer = torch.nn.Linear(4, 1)
    model, optimizer, batches = accelerator.prepare(
        layer,
        torch.optim.SGD(layer.parameters(), lr=0.1),
        DataLoader(torch.rand(64, 4), batch_size=8, num_workers=2, on_bad_sample="replace"),
    )
    for _ in range(2):
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
    print("workers that died:", len(holdfast.of(batches).incidents))
