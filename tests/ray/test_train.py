"""Loaders in the training loop of Ray Train: a checkpoint carries the loader's state, and another process goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
pytest.importorskip("pyarrow", reason="Ray Train is not installed: make test-ray")
import torch
from torch.utils.data import DistributedSampler

import holdfast
import ray.train
from ray.train.torch import TorchTrainer
from tests.ray.datasets import Noisy, digest
from tests.ray.stock import stock

RANKS = 1  # two were tried as well, and take longer
KINDS: dict[str, dict[str, Any]] = {
    "processes": {},
    "actors": {"worker_method": "ray", "ray_options": {"num_cpus": 0}},
}


def options(rank: int) -> dict[str, Any]:
    return {"batch_size": 4, "sampler": DistributedSampler(Noisy(), RANKS, rank, seed=5)}


def train(config: dict[str, Any]) -> None:
    """What runs in each process of a trainer. The first ones fail after seven of twenty batches, of which the last
    checkpoint has five."""
    rank, folder = ray.train.get_context().get_world_rank(), Path(config["folder"])
    torch.manual_seed(7)
    loaders = {
        kind: holdfast.DataLoader(Noisy(), num_workers=2, **options(rank), **more)
        for kind, more in KINDS.items()
    }
    seen: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    begun = ray.train.get_checkpoint()
    if begun is not None:
        with begun.as_directory() as kept:
            seen, states = torch.load(Path(kept) / f"{rank}.pt")
        for kind, loader in loaders.items():
            loader.load_state_dict(states[kind])
    iterators = {}
    for kind, loader in loaders.items():
        torch.manual_seed(7)  # as for a loader that is alone
        iterators[kind] = iter(loader)
    while len(seen["actors"]) < 20:
        for kind, iterator in iterators.items():
            seen[kind].append(next(iterator))
        count = len(seen["actors"])
        if count == 5:
            kept = folder / f"kept-{os.getpid()}"
            kept.mkdir()
            states = {kind: loader.state_dict() for kind, loader in loaders.items()}
            torch.save((seen, states), kept / f"{rank}.pt")
            ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(kept))
        if count == 7 and begun is None:
            raise RuntimeError("preempted")
    ends = [next(iterator, "end") for iterator in iterators.values()]
    said = {kind: digest(batches) for kind, batches in seen.items()}
    (folder / f"{rank}.json").write_text(json.dumps([begun is not None, ends, said]))
    for loader in loaders.values():
        loader.close()


@pytest.mark.slow
def test_a_checkpoint_of_ray_train_carries_the_state_of_a_loader(
    cluster: Any, tmp_path: Path
) -> None:
    TorchTrainer(
        train,
        train_loop_config={"folder": str(tmp_path)},
        scaling_config=ray.train.ScalingConfig(num_workers=RANKS),
        run_config=ray.train.RunConfig(
            storage_path=str(tmp_path / "runs"),
            failure_config=ray.train.FailureConfig(max_failures=1),
        ),
    ).fit()
    for rank in range(RANKS):
        whole = stock(Noisy(), **options(rank))
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == [True, ["end", "end"], dict.fromkeys(KINDS, whole)]
