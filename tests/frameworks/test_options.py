"""Every option of a loader survives what frameworks make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import option_sources

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(300)]

GIVEN: dict[str, Any] = {
    "max_restarts": 7,
    "stall_timeout": 61.0,
    "on_bad_sample": "replace",
    "max_bad_samples": 5,
    "memory_budget": "100MiB",
    "worker_memory_limit": "300MiB",
    "name": "train",
    "iterable_recovery": "replay",
    "pin_in_place": "8MiB",
    "seeding": "sample",
    "worker_method": "ray",
    "ray_options": {"num_cpus": 2},
}
DATA: Any = list(range(32))


def accelerate_prepares(loader: Any) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(loader)


def accelerate_dispatches(loader: Any) -> Any:
    from accelerate.data_loader import prepare_data_loader

    return prepare_data_loader(
        loader,
        device=torch.device("cpu"),
        num_processes=2,
        process_index=0,
        put_on_device=True,
        dispatch_batches=True,
    )


def accelerate_divides(loader: Any) -> Any:
    from accelerate.data_loader import prepare_data_loader

    return prepare_data_loader(
        loader, num_processes=2, process_index=1, split_batches=True, dispatch_batches=False
    )


def accelerate_skips(loader: Any) -> Any:
    from accelerate import skip_first_batches

    return skip_first_batches(accelerate_prepares(loader), 2)


def lightning_rebuilds(loader: Any) -> Any:
    from lightning.fabric.utilities.data import _update_dataloader
    from torch.utils.data import DistributedSampler

    return _update_dataloader(loader, DistributedSampler(DATA, num_replicas=2, rank=0))


def fabric_wraps(loader: Any) -> Any:
    from lightning.fabric import Fabric

    return Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader)


@pytest.mark.parametrize(
    "rebuild",
    [
        accelerate_prepares,
        accelerate_dispatches,
        accelerate_divides,
        accelerate_skips,
        lightning_rebuilds,
        fabric_wraps,
    ],
)
def test_every_option_survives(rebuild: Any, tmp_path: Path) -> None:
    files = {"quarantine": str(tmp_path / "bad.jsonl"), "logbook": str(tmp_path / "book")}
    given = {**GIVEN, **files}
    assert given.keys() == option_sources.DEFAULTS.keys(), "give the new option here too"
    made = rebuild(holdfast.DataLoader(DATA, batch_size=4, num_workers=1, **given))
    assert {name: holdfast.of(made).options[name] for name in given} == given
