"""Where the time of a batch goes, step by step, in one process.

    python -m benchmarks.anatomy                             # prints the table
    python -m benchmarks.anatomy --write docs/performance.md # and puts it between the marks there

A worker's steps and the trainer's are taken in turn here, in one process and without waiting for
anybody, so that each has the machine to itself. Medians, in microseconds. What is not in it: the
wake-ups and switches between processes, which `python -m benchmarks` measures with all the rest.
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch.utils.data import default_collate

from benchmarks.page import put
from benchmarks.workloads import WORKLOADS, Workload
from holdfast.autopsy.blackbox import BlackBoxes, Recorder
from holdfast.processes.channel import Channel, pair
from holdfast.processes.protocol import order
from holdfast.transport import codec, collate
from holdfast.transport.arena import Arena
from holdfast.transport.mapping import create
from holdfast.transport.window import Window
from holdfast.worker.fetch import MapFetcher
from holdfast.worker.randomness import Randomness

ROUNDS = {"tiny": 3000, "tokens": 3000, "ragged": 1500, "nested": 500, "image": 60, "big": 60}
STEPS = (
    ("trainer: ask", "the indices pickled and sent, with the blocks that are free again"),
    ("worker: hear", "received and unpickled"),
    ("worker: load", "`dataset[i]` for each sample, noted in the black box, and collated"),
    ("worker: encode", "the batch described; what is not in the arena yet is copied there"),
    ("worker: random state", "of torch, random and NumPy, saved in the black box"),
    ("worker: send", "the description, a few hundred bytes"),
    ("trainer: hear", "received; its blocks taken over"),
    ("trainer: unpack", "tensors made on the arena's memory, without a copy"),
)
T = TypeVar("T")


class Watch:
    """Sums up what each step took."""

    def __init__(self) -> None:
        self.times: dict[str, list[int]] = {name: [] for name, _ in STEPS}

    def time(self, step: str, work: Callable[[], T]) -> T:
        began = time.perf_counter_ns()
        done = work()
        self.times[step].append(time.perf_counter_ns() - began)
        return done

    def median(self, step: str) -> float:
        return statistics.median(self.times[step]) / 1000


def dissect(workload: Workload, rounds: int) -> Watch:
    watch = Watch()
    fd = create("anatomy")
    arena, window = Arena(fd), Window(fd)
    collate.install(arena)
    boxes = BlackBoxes(1)
    recorder = Recorder(boxes.fd, 1, 0)
    randomness = Randomness()
    trainer, socket = pair()
    worker = Channel(socket)
    dataset: Any = workload.dataset
    fetcher = MapFetcher(
        dataset,
        auto_collation=True,
        collate_fn=workload.collate_fn or default_collate,
        drop_last=False,
        recorder=recorder,
        arena=arena,
        faults=None,
    )

    for number in range(rounds):
        index = list(range(number * workload.batch_size, (number + 1) * workload.batch_size))

        def ask(number: int = number, index: list[int] = index) -> None:
            trainer.post(order("task", number, index, window.take_released()))

        def hear() -> Any:
            message = worker.receive()
            assert message is not None
            heard = pickle.loads(message)
            for offset in heard[3]:
                arena.release(offset)
            return heard

        watch.time("trainer: ask", ask)
        _, task, keys, _ = watch.time("worker: hear", hear)
        batch = watch.time("worker: load", partial(fetcher.fetch, task, keys))
        frame = watch.time("worker: encode", partial(codec.encode, batch, arena))
        del batch
        watch.time("worker: random state", partial(randomness.keep, recorder, number))
        watch.time("worker: send", partial(worker.send, frame))
        arena.trim()

        def take() -> codec.Parcel:
            message = trainer.poll()
            assert message is not None
            return codec.Parcel(message, window)

        parcel = watch.time("trainer: hear", take)
        batch = watch.time("trainer: unpack", parcel.unpack)
        del parcel, batch
    trainer.close()
    worker.close()
    return watch


def table(names: list[str]) -> str:
    watches = {name: dissect(WORKLOADS[name], ROUNDS[name]) for name in names}
    lines = [
        f"| step | {' | '.join(f'*{name}*' for name in names)} | |",
        f"| --- | {' | '.join('---:' for _ in names)} | --- |",
    ]
    for step, about in STEPS:
        cells = " | ".join(f"{watches[name].median(step):,.0f}" for name in names)
        lines.append(f"| {step} | {cells} | {about} |")
    for side in ("worker", "trainer"):
        sums = [
            sum(watches[name].median(step) for step, _ in STEPS if step.startswith(side))
            for name in names
        ]
        lines.append(f"| **{side}, in all** | {' | '.join(f'{one:,.0f}' for one in sums)} | |")
    return "\n".join(lines)


def notes(rounds: int = 200_000) -> str:
    """What the black box costs: for each sample, for each step, for each measurement of size."""
    boxes = BlackBoxes(1)
    recorder = Recorder(boxes.fd, 1, 0)
    cell, measured = recorder.cell, recorder.measured

    def samples() -> None:
        for position in range(rounds):
            cell[0] = position

    def steps() -> None:
        for task in range(rounds):
            recorder.note(task, -1, 2)

    def sizes() -> None:
        for size in range(rounds):
            measured(size, size, 0.0)

    def nothing() -> None:
        for _ in range(rounds):
            pass

    def once(work: Callable[[], None]) -> float:
        began = time.perf_counter_ns()
        work()
        return (time.perf_counter_ns() - began) / rounds / 1000

    empty, *costs = (
        statistics.median(once(work) for _ in range(5)) for work in (nothing, samples, steps, sizes)
    )
    sample, step, size = (max(0.0, cost - empty) for cost in costs)
    return (
        f"A note in the black box takes {sample:.2f} µs for each sample, {step:.2f} µs for each "
        f"step of a batch, {size:.2f} µs for each measurement of the worker's size."
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.anatomy", description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=ROUNDS, default=list(ROUNDS))
    parser.add_argument("--write", type=Path, metavar="PAGE")
    asked = parser.parse_args()
    told = f"{table(asked.workloads)}\n\n{notes()}"
    print(told)
    if asked.write is not None:
        put(asked.write, "anatomy", told)


if __name__ == "__main__":
    main()
