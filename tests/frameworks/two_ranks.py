"""A program for two ranks under torchrun: what each of them gets and writes, in ``FOLDER/RANK.json``.

``python -m torch.distributed.run --nproc-per-node=2 -m tests.frameworks.two_ranks FOLDER``
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import numpy as np
import torch
from datasets.distributed import split_dataset_by_node
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, DistributedSampler, get_worker_info

from holdfast import DataLoader
from holdfast.limits import gauge

SIZE = 48
EPOCHS = 3
DEATHS = "after-fetch:SIGKILL@worker=0,task=2;before-send:SIGKILL@worker=1,task=7"
RANKS = 2


class Seeds(Dataset[Any]):
    """What a worker knows of its seeds, and what it draws."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return index, info.seed, torch.rand(()).item(), random.random(), float(np.random.rand())


class Damaged(Dataset[Any]):
    """The samples in `bad` raise."""

    def __init__(self, bad: range, size: int = SIZE) -> None:
        self.bad = bad
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.bad:
            raise ValueError(f"sample {index} is corrupt")
        return torch.tensor([float(index)])


def deaths(here: bool = True) -> Any:
    """Workers of this rank are killed, or are not."""
    return mock.patch.dict(os.environ, HOLDFAST_FAULTS=DEATHS if here else "")


def plain(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: plain(value) for name, value in batch.items()}
    return batch.tolist() if isinstance(batch, torch.Tensor) else [plain(one) for one in batch]


def seeds(kind: Any, persistent: bool) -> Any:
    """All batches of all epochs, of a sampler that is told the epoch."""
    torch.manual_seed(5 + distributed.get_rank())
    samples = Seeds()
    sampler: DistributedSampler[int] = DistributedSampler(samples, shuffle=True)
    loader = kind(
        samples, batch_size=2, sampler=sampler, num_workers=2, persistent_workers=persistent
    )
    found = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        found.append([plain(batch) for batch in loader])
    return found


def stream(kind: Any, persistent: bool) -> Any:
    """The same, of a stream that workers shuffle, and that is told the epoch."""
    torch.manual_seed(5)
    table = datasets.Dataset.from_dict({"number": list(range(SIZE))})
    whole = table.to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=8)
    part = split_dataset_by_node(whole, rank=distributed.get_rank(), world_size=RANKS)
    loader = kind(part, batch_size=2, num_workers=2, persistent_workers=persistent)
    found = []
    for epoch in range(EPOCHS):
        part.set_epoch(epoch)
        found.append([plain(batch) for batch in loader])
    return found


def compared(make: Any, persistent: bool) -> dict[str, Any]:
    """With torch, and with holdfast while workers of rank 0 are killed."""
    expected = make(TorchLoader, persistent)
    with deaths(distributed.get_rank() == 0):
        made: list[Any] = []

        def ours(*args: Any, **kwargs: Any) -> Any:
            made.append(DataLoader(*args, max_restarts=None, **kwargs))
            return made[0]

        found = make(ours, persistent)
    made[0].close()
    numbers = [json.dumps(epoch) for epoch in found]
    return {
        "equal": found == expected,
        "epochs": len(set(numbers)),
        "deaths": len(made[0].incidents),
        "batches": [len(epoch) for epoch in found],
    }


def trained(policy: str, *, joined: bool = False) -> dict[str, Any]:
    """Batches of each rank, of which the second batch of rank 0 is bad altogether."""
    samples = Damaged(range(4, 8, 2))
    loader = DataLoader(
        samples,
        batch_size=2,
        sampler=DistributedSampler(samples, shuffle=False),
        num_workers=2,
        on_bad_sample=policy,  # type: ignore[arg-type]
        max_restarts=None,
    )
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    with warnings.catch_warnings(record=True) as said, deaths():
        warnings.simplefilter("always")
        if joined:
            with model.join():
                sizes = [_step(model, batch) for batch in loader]
        else:
            # Without a step: if one rank has fewer batches, the others would wait for it.
            sizes = [len(batch) for batch in loader]
    told = any('on_bad_sample="replace" keeps' in str(one.message) for one in said)
    return {"sizes": sizes, "told": told, "deaths": len(loader.incidents)}


def _step(model: Any, batch: torch.Tensor) -> int:
    model(batch).sum().backward()
    return len(batch)


def quarantine(path: Path) -> int:
    """How many samples this rank has listed there."""
    samples = Damaged(range(0, 400, 3), 400)
    loader = DataLoader(
        samples,
        batch_size=4,
        sampler=DistributedSampler(samples),
        num_workers=2,
        on_bad_sample="replace",
        max_bad_samples=math.inf,
        quarantine=path,
        max_restarts=None,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        distributed.barrier()
        for _ in loader:
            pass
    return len({bad.index for bad in loader.bad_samples})


def pids(book: Path) -> list[int]:
    """The workers that were killed in this rank."""
    samples = Damaged(range(0))
    sampler: DistributedSampler[int] = DistributedSampler(samples, shuffle=False)
    loader = DataLoader(
        samples, batch_size=2, sampler=sampler, num_workers=2, logbook=book, name="train"
    )
    with deaths():
        for _ in loader:
            pass
    return [one.pid for one in loader.incidents]


def budget() -> dict[str, Any]:
    """What "auto" is here, and what it would be if this were the only rank."""
    loader = DataLoader(Damaged(range(0)), batch_size=2, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    distributed.barrier()
    found = loader.stats()["budget_bytes"]
    del iterator
    return {"bytes": found, "free": gauge.read().free, "ranks": gauge.ranks()}


def main() -> None:
    folder = Path(sys.argv[1])
    distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    results = {
        "seeds": {str(kept): compared(seeds, kept) for kept in (False, True)},
        "stream": {str(kept): compared(stream, kept) for kept in (False, True)},
        "skip": trained("skip"),
        "joined": trained("skip", joined=True),
        "replace": trained("replace"),
        "quarantine": quarantine(folder / "quarantine.jsonl"),
        "pids": pids(folder / "book"),
        "budget": budget(),
    }
    (folder / f"{distributed.get_rank()}.json").write_text(json.dumps(results))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
