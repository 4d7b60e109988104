"""Room returns when the last tensor of a batch is gone, wherever and in whatever order that happens."""

from __future__ import annotations

import gc
import os
import queue
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import DataLoader
from tests.support.processes import kill
from tests.transport.test_kept_batches import Blocks

pytestmark = pytest.mark.timeout(300, method="thread")

BATCH = 160_000  # bytes of a batch of Blocks
BATCHES = [pytest.param(600), pytest.param(2000, marks=pytest.mark.slow)]


def arena_bytes() -> int:
    """Memory in all memory files of ours that this process has open or mapped, each counted once."""
    found = {}
    for folder in (
        "/proc/self/fd",
        "/proc/self/map_files",
    ):  # what is mapped may have no descriptor
        for entry in os.listdir(folder):
            try:
                if "memfd:holdfast-" in os.readlink(f"{folder}/{entry}"):
                    status = os.stat(f"{folder}/{entry}")
                    found[status.st_ino] = status.st_blocks * 512
            except PermissionError:
                pytest.skip("only root may look at files that are mapped but not open")
            except OSError:
                continue
    return sum(found.values())


def run(batches: int, keep: Any) -> list[int]:
    """Memory of the arenas after each fiftieth batch; `keep` is given each batch and may hold it for a while."""
    measured = []
    with DataLoader(Blocks(batches), num_workers=2) as loader:
        for number, batch in enumerate(loader):
            assert bool((batch == number).all())
            keep(batch)
            del batch
            if number % 50 == 49:
                measured.append(arena_bytes())
    assert len(measured) == batches // 50
    assert measured[0] > 0  # or we have looked in the wrong place
    return measured


# Two workers, two batches ahead each, a few in hand, and slack of 16 MB each that an arena may keep for itself.
BOUND = 2 * (16 << 20) + 32 * BATCH


@pytest.mark.parametrize("batches", BATCHES)
def test_memory_stays_bounded_when_batches_are_dropped_at_once(batches: int) -> None:
    measured = run(batches, lambda batch: None)
    assert max(measured) < BOUND
    assert max(measured) < batches * BATCH / 2  # a leak would not fit


@pytest.mark.parametrize("batches", BATCHES)
def test_memory_stays_bounded_when_batches_are_dropped_in_random_order(batches: int) -> None:
    held: list[Any] = []
    order = random.Random(0)

    def keep(batch: Any) -> None:
        held.append(batch)
        if len(held) > 16:
            held.pop(order.randrange(len(held)))

    assert max(run(batches, keep)) < BOUND


@pytest.mark.parametrize("batches", BATCHES)
def test_memory_stays_bounded_when_batches_are_dropped_in_another_thread(batches: int) -> None:
    line: queue.Queue[Any] = queue.Queue(4)

    def consume() -> None:
        while (batch := line.get()) is not None:
            del batch

    thread = threading.Thread(target=consume)
    thread.start()
    try:
        measured = run(batches, line.put)
    finally:
        line.put(None)
        thread.join()
    assert max(measured) < BOUND


def test_memory_stays_bounded_when_batches_die_in_reference_cycles() -> None:
    def keep(batch: Any) -> None:
        cycle: list[Any] = [batch]
        cycle.append(cycle)
        counter.append(None)
        if len(counter) % 20 == 0:
            gc.collect()

    counter: list[None] = []
    gc.freeze()  # what other tests have left need not be looked at thirty times
    assert max(run(600, keep)) < BOUND


def test_one_batch_kept_for_ever_does_not_hold_the_room_behind_it() -> None:
    held: list[Any] = []

    def keep(batch: Any) -> None:
        if len(held) < 8:
            held.append(batch)

    assert max(run(600, keep)) < BOUND


@pytest.mark.faults
def test_memory_stays_bounded_through_deaths() -> None:
    """The unfinished batch of a dead worker, and blocks released to it, are reused."""
    with DataLoader(Blocks(600), num_workers=2, max_restarts=None) as loader:
        iterator = iter(loader)
        measured = []
        held: list[Any] = []
        for number in range(600):
            held.append(next(iterator))
            assert bool((held[-1] == number).all())
            del held[:-8]
            if number % 40 == 20:
                kill(iterator._workers[number // 40 % 2].pid)
                measured.append(arena_bytes())
        assert len(loader.incidents) == 15
    assert max(measured) < BOUND


@pytest.mark.slow
def test_memory_of_a_large_past_is_given_back() -> None:
    """Large batches are followed by small ones: the room for the large ones does not stay for ever.

    It is given back in steps, which are paced by the clock.
    """
    largest, began = 0, time.monotonic()
    with DataLoader(Mixed(10_000_000), batch_size=None, num_workers=1) as loader:
        for number, _ in enumerate(loader):
            measured = arena_bytes()
            largest = max(largest, measured)
            if number >= 20 and (measured < 40 << 20 or time.monotonic() - began > 60):
                break
    assert largest > 60 << 20
    assert measured < 40 << 20


class Mixed(Blocks):
    def __getitem__(self, index: int) -> Any:
        return torch.full((4_000_000,) if index < 20 else (20_000,), index)


def test_everything_is_given_back_when_the_loader_is_closed_and_its_batches_are_gone() -> None:
    gc.collect()
    before = arena_bytes()
    loader = DataLoader(Blocks(100), num_workers=2)
    kept = list(loader)
    assert arena_bytes() >= 100 * BATCH
    loader.close()
    del loader, kept
    gc.collect()
    assert arena_bytes() <= before


def test_after_close_only_the_kept_batches_cost_memory() -> None:
    loader = DataLoader(Blocks(200), num_workers=2)
    kept = list(loader)
    loader.close()
    assert all(
        bool((batch == number).all()) for number, batch in enumerate(kept)
    )  # every page was touched
    whole = memory_mapped()
    assert whole >= 200 * BATCH
    del kept[5:], loader
    gc.collect()
    assert memory_mapped() < whole / 10
    assert all(bool((batch == number).all()) for number, batch in enumerate(kept))


def memory_mapped() -> int:
    """Proportional memory of this process in mappings of our memory files."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0] and ":" not in line.split(" ")[0]:
            ours = "memfd:holdfast-" in line
        elif ours and line.startswith("Pss:"):
            total += int(line.split()[1]) << 10
    return total


class Waits(torch.utils.data.Dataset[torch.Tensor]):
    """Batches of 8 MB; the third is not begun before the consumer allows it."""

    BATCH = 8 << 20

    def __init__(self, signal: Path) -> None:
        self.signal = signal

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:
        deadline = time.monotonic() + 60
        while index == 2 and not self.signal.exists():
            assert time.monotonic() < deadline, "the consumer has not come by"
            time.sleep(0.001)
        return torch.full((self.BATCH,), index, dtype=torch.uint8)


def test_what_was_let_go_of_serves_the_batch_that_is_being_made(tmp_path: Path) -> None:
    with DataLoader(Waits(tmp_path / "go on"), num_workers=1, batch_size=1) as loader:
        before = arena_bytes()
        batches = iter(loader)
        del_at_once = next(batches)  # the third batch is asked for now
        del del_at_once
        second = next(batches)
        (tmp_path / "go on").touch()
        third = next(batches)
        assert int(second[0, -1]) == 1
        assert int(third[0, -1]) == 2
        assert arena_bytes() - before < 2.5 * Waits.BATCH
