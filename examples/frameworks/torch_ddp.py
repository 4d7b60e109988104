"""Plain DistributedDataParallel: torchrun --nproc-per-node 2 torch_ddp.py

One line is different: where DataLoader comes from. With several ranks use on_bad_sample="replace":
it keeps the number of batches of all ranks equal.
"""

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from holdfast import DataLoader

if __name__ == "__main__":
    distributed.init_process_group("gloo")
    samples = torch.rand(64, 4)
    sampler = DistributedSampler(samples)
    loader = DataLoader(
        samples, batch_size=8, sampler=sampler, num_workers=2, on_bad_sample="replace"
    )
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            model(batch).pow(2).mean().backward()
            optimizer.step()
    print(f"rank {distributed.get_rank()}, workers that died: {len(loader.incidents)}")
    distributed.destroy_process_group()
