"""Hundreds of epochs and loaders in one process: nothing may grow."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest
import torch

from holdfast import DataLoader
from tests.lifecycle.samples import Numbers
from tests.support.processes import eventually, kill, mappings, open_files

pytestmark = pytest.mark.timeout(300, method="thread")


def all_children() -> int:
    """With zombies."""
    return len(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())


def footprint() -> dict[str, int]:
    gc.collect()
    return {
        "descriptors": open_files(),
        "threads": threading.active_count(),
        "tasks": len(os.listdir("/proc/self/task")),
        "mappings": mappings(),
        "children": all_children(),
    }


def grown(before: dict[str, int]) -> dict[str, int]:
    after = footprint()
    # The allocator maps and unmaps as it likes; one mapping per epoch or death would be beyond that.
    slack = {"mappings": 10}
    return {
        name: after[name] - before[name]
        for name in before
        if after[name] - before[name] > slack.get(name, 0)
    }


def large(samples: list[int]) -> torch.Tensor:
    return torch.full((50_000,), samples[0])


EPOCHS = [pytest.param(12), pytest.param(200, marks=pytest.mark.slow)]


@pytest.mark.slow
@pytest.mark.parametrize("epochs", EPOCHS)
@pytest.mark.parametrize("persistent", [False, True])
def test_epochs_do_not_add_descriptors_threads_mappings_or_children(
    persistent: bool, epochs: int
) -> None:
    with DataLoader(
        Numbers(6), num_workers=2, collate_fn=large, persistent_workers=persistent
    ) as loader:
        for _ in range(3):
            list(loader)
        before = footprint()
        for _ in range(epochs):
            assert len(list(loader)) == 6
        assert eventually(lambda: not grown(before), 5.0), grown(before)


@pytest.mark.parametrize("epochs", EPOCHS)
def test_loaders_that_are_dropped_half_way_add_nothing(epochs: int) -> None:
    def half_an_epoch() -> None:
        iterator = iter(DataLoader(Numbers(6), num_workers=2, collate_fn=large))
        next(iterator), next(iterator)

    for _ in range(3):
        half_an_epoch()
    before = footprint()
    for _ in range(epochs):
        half_an_epoch()
    assert eventually(lambda: not grown(before), 5.0), grown(before)


@pytest.mark.faults
@pytest.mark.parametrize("deaths", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_replaced_workers_add_nothing(deaths: int) -> None:
    with DataLoader(Numbers(10**6), num_workers=2, collate_fn=large, max_restarts=None) as loader:
        iterator = iter(loader)

        def die(times: int) -> None:
            for number in range(times):
                next(iterator)
                kill(iterator._workers[number % 2].pid)
                wanted = len(loader.incidents)
                while len(loader.incidents) == wanted:
                    next(iterator)

        die(4)
        before = footprint()
        die(deaths)
        assert eventually(lambda: not grown(before), 5.0), grown(before)
        assert len(loader.incidents) == deaths + 4
