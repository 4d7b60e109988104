"""The processes, descriptors and mappings of a pool, without the pool: a real nursery, for tests of one part."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch.utils.data import IterableDataset

from holdfast.engine.continuation import REPLAY, ResumptionPlan
from holdfast.limits.worker_limit import Allowance
from holdfast.processes.nursery_reports import Report
from holdfast.processes.protocol import Setup
from holdfast.processes.resources import ProcessResources, descriptor_lock
from holdfast.worker.interface import Blueprint
from holdfast.worker.sample_seeding import NO_SEEDS
from tests.support.parts import identity
from tests.support.processes import eventually

__all__ = ["blueprint_of", "opened", "setup_of", "wait_for_report"]

WORKERS = 2
T = TypeVar("T", bound=Report)


def blueprint_of(dataset: Any) -> Blueprint:
    iterable = isinstance(dataset, IterableDataset)
    return Blueprint(
        dataset=dataset,
        iterable=iterable,
        auto_collation=True,
        collate_fn=identity,
        drop_last=False,
        worker_init_fn=None,
        base_seed=0,
        num_workers=WORKERS,
        batch_index=[None] if iterable else None,
    )


def setup_of(resources: ProcessResources, **given: Any) -> Setup:
    """Of a process that is to take up a stream of which one batch was delivered."""
    options: dict[str, Any] = {
        "worker": 0,
        "generation": 0,
        "seeds": NO_SEEDS,
        "held": (),
        "answered": 1,
        "epochs_done": 0,
        "batches_done": 1,
        "exhausted": False,
        "random_state": None,
        "epoch_state": None,
        "allowance": Allowance(None),
        "plan": ResumptionPlan(REPLAY, bytes(8), 1),
        "marks": True,
        "regions": resources.boxes.workers,
    }
    return Setup(**{**options, **given})


@contextlib.contextmanager
def opened(
    dataset: Any, before_fork: Callable[[], None] = lambda: None
) -> Iterator[ProcessResources]:
    with descriptor_lock():
        blueprint = blueprint_of(dataset)
        resources = ProcessResources(blueprint, None, WORKERS, before_fork)
    try:
        yield resources
    finally:
        resources.send_all_away(0.0)
        if not resources.nursery.wait(5.0):
            resources.nursery.kill()
            assert resources.nursery.wait(5.0)
        resources.release_all()


def wait_for_report(resources: ProcessResources, kind: type[T]) -> T:
    """The first report of this kind that the nursery sends from now on."""
    found: list[T] = []

    def look() -> bool:
        found.extend(one for one in resources.nursery.reports() or () if isinstance(one, kind))
        return bool(found)

    assert eventually(look, 30.0), f"no {kind.__name__} at {time.monotonic()}"
    return found[0]
