"""From a kill to the lost batch: where the time goes.

    python -m benchmarks.recovery                             # prints the table
    python -m benchmarks.recovery --write docs/performance.md # and puts it between the marks there

A worker is killed in the middle of a batch for which the consumer waits, again and again: small
batches, then batches of 38 MB. The functions that take part note when they are reached, in memory
that all processes share. If this may be done (it takes root), all processes run with real-time
priority, so that other programs of the machine do not count.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import logging
import mmap
import os
import signal
import statistics
import struct
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

import holdfast
from benchmarks.page import put
from holdfast.processes import exits, nursery_main, resources, starts, worker_main
from holdfast.worker import items

BATCH = 32
SMALL, LARGE = 4, 3 * 224 * 224 * 2  # numbers in a sample
KILLED = range(10, 90, 10)  # batches
PAUSE = 0.25  # seconds from one kill to the next: by then there is a warmed-up spare
FIRST_PAUSE = nursery_main.FIRST_SPARE_DELAY + PAUSE  # until there is the first
_MARK = struct.Struct("d")

# What is reached, by which function, and what has been done by then.
STEPS: tuple[tuple[Any, str, str], ...] = (
    (nursery_main.NurseryLoop, "_reap", "the kernel ends the process and frees its memory"),
    (exits.Exits, "_tell_exit", "the nursery reads its status and tells the trainer"),
    (starts.Starts, "start", "the trainer reads what the worker left, and decides"),
    (resources, "run", "a process is there that becomes the worker"),
    (items.Worker, "take_up", "seeds, `worker_init_fn`, the dataset's generators"),
    (items.Worker, "carry_out", "where its predecessor was; limits of memory"),
    (worker_main._WorkerProcess, "answer", "the batch is made"),
)
DELIVERED = "the consumer has it"


class Marks:
    """When each step was first reached after a kill, by any process."""

    def __init__(self) -> None:
        self.page = mmap.mmap(-1, mmap.PAGESIZE)
        for number, (place, name, _) in enumerate(STEPS):
            setattr(place, name, self._noting(number, getattr(place, name)))

    def _noting(self, number: int, function: Any) -> Any:
        @functools.wraps(function)
        def noted(*given: Any, **named: Any) -> Any:
            if not _MARK.unpack_from(self.page, number * _MARK.size)[0]:
                _MARK.pack_into(self.page, number * _MARK.size, time.perf_counter())
            return function(*given, **named)

        return noted

    def clear(self) -> None:
        self.page[: len(STEPS) * _MARK.size] = bytes(len(STEPS) * _MARK.size)

    def times(self) -> list[float]:
        return [_MARK.unpack_from(self.page, at * _MARK.size)[0] for at in range(len(STEPS))]


class Deadly(Dataset[Any]):
    """Some batches wait in their middle until their worker is killed, once each."""

    def __init__(self, width: int) -> None:
        self.data = torch.randn(2 * BATCH, width)
        self.struck = mmap.mmap(-1, mmap.PAGESIZE)
        self.victim = mmap.mmap(-1, mmap.PAGESIZE)

    def __len__(self) -> int:
        return 100 * BATCH

    def __getitem__(self, index: int) -> Any:
        batch, position = divmod(index, BATCH)
        if position == BATCH // 2 and batch in KILLED and not self.struck[batch]:
            self.struck[batch] = 1
            struct.pack_into("q", self.victim, 0, os.getpid())
            time.sleep(600)
        return self.data[index % len(self.data)].clone()

    def kill_again_and_again(self, killed_at: list[float], marks: Marks) -> None:
        while len(killed_at) < len(KILLED):
            time.sleep(0.001)
            (pid,) = struct.unpack_from("q", self.victim, 0)
            if pid:
                struct.pack_into("q", self.victim, 0, 0)
                time.sleep(PAUSE if killed_at else FIRST_PAUSE)
                marks.clear()
                killed_at.append(time.perf_counter())
                os.kill(pid, signal.SIGKILL)


def measure(marks: Marks, width: int = SMALL) -> list[list[float]]:
    """For each kill: the milliseconds that each step took."""
    dataset, killed_at, rows = Deadly(width), list[float](), list[list[float]]()
    threading.Thread(
        target=dataset.kill_again_and_again, args=(killed_at, marks), daemon=True
    ).start()
    for number, _ in enumerate(holdfast.DataLoader(dataset, batch_size=BATCH, num_workers=2)):
        if number in KILLED:
            reached = [killed_at[-1], *marks.times(), time.perf_counter()]
            rows.append([(b - a) * 1e3 for a, b in itertools.pairwise(reached)])
    return rows


def table(*columns: tuple[str, list[list[float]]]) -> str:
    lines = ["| until | " + " | ".join(name for name, _ in columns) + " |"]
    lines.append("| --- |" + " ---: |" * len(columns))
    for at, name in enumerate([*(step[2] for step in STEPS), DELIVERED]):
        found = (statistics.median(row[at] for row in rows) for _, rows in columns)
        lines.append(f"| {name} | " + " | ".join(f"{one:.1f}" for one in found) + " |")
    found = (statistics.median(map(sum, rows)) for _, rows in columns)
    lines.append("| **in all** | " + " | ".join(f"**{one:.1f}**" for one in found) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", type=Path, metavar="PAGE")
    asked = parser.parse_args()
    logging.getLogger("holdfast").setLevel(logging.CRITICAL)
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(50))
    marks = Marks()
    first, later, large = [], [], []
    for _ in range(asked.rounds):
        one, *others = measure(marks)
        first.append(one)
        later += others
        large += measure(marks, LARGE)
    told = table(("first death", first), ("later ones", later), ("batches of 38 MB", large))
    print(told)
    if asked.write is not None:
        put(asked.write, "recovery", told)


if __name__ == "__main__":
    main()
