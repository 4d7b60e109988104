"""A child forked off the trainer has the batches its parent held, and they stay as they were."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

from holdfast import DataLoader
from holdfast.transport import forks
from tests.support.processes import eventually

pytestmark = pytest.mark.timeout(60, method="thread")

SIDE = 200  # 160 kB for a sample: its batch lies in the arena


class Numbered(Dataset[torch.Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((SIDE, SIDE), float(index))


class Mixed(Dataset[float]):
    """Returns what it finds in a batch of another loader."""

    reference: torch.Tensor | None = None

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        assert self.reference is not None
        return float(self.reference.sum())


def contents(batch: torch.Tensor) -> bytes:
    """What is in it, found without torch's thread pool, which does not survive a fork."""
    return " ".join(str(value) for value in sorted(set(batch.flatten().tolist()))).encode()


class Child:
    """A forked process that answers when it is told to."""

    def __init__(self, answer: Callable[[], bytes]) -> None:
        go, self.go = os.pipe()
        self.said, say = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            signal.alarm(50)
            os.close(self.go)
            os.read(go, 1)
            os.write(say, answer())
            os._exit(0)
        os.close(go)
        os.close(say)

    def ask(self) -> bytes:
        os.close(self.go)
        said = os.read(self.said, 100)
        os.close(self.said)
        os.waitpid(self.pid, 0)
        return said


def test_a_forked_child_keeps_the_batch_its_parent_lets_go_of() -> None:
    batches = iter(DataLoader(Numbered(120), batch_size=2, num_workers=2))
    next(batches)
    kept = [next(batches)]
    child = Child(lambda: contents(kept[0]))
    kept.clear()
    for _ in batches:
        gc.collect(0)
    assert child.ask() == b"2.0 3.0"


def test_also_when_the_loader_is_closed_and_its_memory_given_back() -> None:
    with DataLoader(Numbered(20), batch_size=2, num_workers=1) as loader:
        kept = [next(iter(loader))]
    child = Child(lambda: contents(kept[0]))
    kept.clear()
    list(DataLoader(Numbered(20), batch_size=2, num_workers=1))
    assert child.ask() == b"0.0 1.0"


@pytest.mark.parametrize("kind", [DataLoader, TorchLoader])
def test_workers_of_another_loader_keep_a_batch_they_were_forked_with(kind: Any) -> None:
    batches = iter(DataLoader(Numbered(120), batch_size=2, num_workers=2))
    next(batches)
    dataset = Mixed()
    dataset.reference = next(batches)
    others = kind(dataset, num_workers=1, persistent_workers=True)
    wanted = [SIDE * SIDE * 5.0] * 4
    assert [float(one) for one in others] == wanted
    dataset.reference = None
    for _ in batches:
        pass
    assert [float(one) for one in others] == wanted


def test_what_was_kept_for_a_child_is_recycled_when_the_child_is_gone() -> None:
    def held() -> float:
        gc.collect()
        return loader.stats()["held_bytes"]

    loader = DataLoader(Numbered(400), batch_size=2, num_workers=1)
    batches = iter(loader)
    kept = [next(batches)]
    child = Child(lambda: b"fine")
    kept.clear()
    for _ in range(20):
        next(batches)
    with_child = held()
    assert child.ask() == b"fine"
    for _ in range(20):
        next(batches)
    assert held() <= with_child - 2 * SIDE * SIDE * 4


@pytest.mark.slow
def test_forking_costs_no_descriptor_once_the_children_are_gone() -> None:
    batches = iter(DataLoader(Numbered(400), batch_size=2, num_workers=1))
    kept = next(batches)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(12):
        assert Child(lambda: b"x").ask() == b"x"
    forks.sweep()
    assert len(os.listdir("/proc/self/fd")) == before
    assert float(kept.sum()) == SIDE * SIDE


def test_a_child_that_becomes_another_program_keeps_nothing() -> None:
    batches = iter(DataLoader(Numbered(40), batch_size=2, num_workers=1))
    kept = next(batches)
    before = set(forks._pins.pinned)  # other tests' children may be on their way out

    def released() -> bool:
        forks.sweep()
        return set(forks._pins.pinned) <= before

    pid = os.fork()
    if pid == 0:
        os.execv("/bin/sleep", ["sleep", "30"])
    try:
        while _name(pid) != "sleep":
            os.sched_yield()
        assert eventually(released)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert float(kept.sum()) == SIDE * SIDE


def _name(pid: int) -> str:
    with open(f"/proc/{pid}/comm") as file:
        return file.read().strip()
