"""What it costs that a loader can be resumed.

    python -m benchmarks.resume --write docs/resume.md

CPU time, because other programs of the machine count less in it; the smallest of some rounds, in
turns.

- An ordinary batch, of one number and with two workers: without the lines of the iterator that
  count batches for `state_dict`, with them, and with a call after each batch. torchdata's
  StatefulDataLoader, if it is installed, makes a state with each batch too.
- A call of `state_dict` at several positions of a shuffled epoch of a million samples, and the size
  of the state.
- An iterable dataset whose state is large: what a batch costs in the main process and in its
  worker.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import holdfast
from benchmarks.page import put
from holdfast.engine import iterator as engine
from tests.support.datasets import Numbers

BATCHES = 4_000
POSITIONS = (10, 1_000, 10_000)
STATES = (0, 1_000, 100_000, 1_000_000, 10_000_000)
STREAMED = 120  # batches of a stream


class Stream(torch.utils.data.IterableDataset[float]):
    """Each element is the CPU time that its worker has used so far."""

    def __init__(self, nbytes: int | None) -> None:
        self.done = 0
        self.large = b"" if nbytes is None else bytes(nbytes)
        if nbytes is not None:
            self.state_dict = lambda: {"done": self.done, "large": self.large}
            self.load_state_dict = lambda state: None

    def __iter__(self) -> Iterator[float]:
        for self.done in range(STREAMED):
            yield time.process_time()


def uncounted_next(self: Any) -> Any:
    """`WorkerIterator.__next__` without what `state_dict` needs."""
    data = self._next_data()
    self._num_yielded += 1
    self._in_hand = engine._NOTHING
    return data


def per_batch(make: Callable[[], Any], after: Callable[[Any], object] | None = None) -> float:
    """CPU time of this process for one batch, in microseconds."""
    loader = make()
    iterator = iter(loader)
    next(iterator)
    began, count = time.process_time(), 0
    for _ in iterator:
        count += 1
        if after is not None:
            after(loader)
    return (time.process_time() - began) / count * 1e6


def ordinary(rounds: int) -> list[str]:
    def ours() -> Any:
        return holdfast.DataLoader(Numbers(BATCHES), num_workers=2, prefetch_factor=2)

    def without() -> float:
        with mock.patch.object(engine.WorkerIterator, "__next__", uncounted_next):
            return per_batch(ours)

    variants: dict[str, Callable[[], float]] = {
        "holdfast without the counting": without,
        "holdfast": lambda: per_batch(ours),
        "holdfast, `state_dict()` after each batch": lambda: per_batch(
            ours, lambda loader: loader.state_dict()
        ),
        "torch": lambda: per_batch(
            lambda: torch.utils.data.DataLoader(Numbers(BATCHES), num_workers=2)
        ),
    }
    try:
        stateful = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
    except ImportError:
        pass
    else:
        variants["torchdata, a state with each batch"] = lambda: per_batch(
            lambda: stateful(Numbers(BATCHES), num_workers=2)
        )
    figures: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, measure in variants.items():
            gc.collect()
            figures[name].append(measure())
    lines = ["| one batch | µs of CPU in the main process |", "| --- | ---: |"]
    return lines + [f"| {name} | {min(one):.0f} |" for name, one in figures.items()]


def positions() -> list[str]:
    lines = ["| after batch | one call, ms | size, kB |", "| ---: | ---: | ---: |"]
    for workers in (0, 2):
        loader: Any = holdfast.DataLoader(
            Numbers(1_000_000), batch_size=64, shuffle=True, num_workers=workers
        )
        for number, _ in enumerate(loader, 1):
            if number in POSITIONS:
                calls = []
                for _ in range(20):
                    began = time.process_time()
                    state = loader.state_dict()
                    calls.append(time.process_time() - began)
                took = min(calls)
                size = len(json.dumps(state)) / 1e3
                lines.append(
                    f"| {number:,} (`num_workers={workers}`) | {took * 1e3:.2f} | {size:.1f} |"
                )
            if number == max(POSITIONS):
                break
        loader.close()
    return lines


def large_states(rounds: int) -> list[str]:
    lines = ["| state of the dataset | main process, ms | worker, ms |", "| --- | ---: | ---: |"]
    for nbytes in (None, *STATES):
        here, there = [], []
        for _ in range(rounds):
            loader: Any = holdfast.DataLoader(Stream(nbytes), batch_size=None, num_workers=1)
            iterator = iter(loader)
            first, began = next(iterator), time.process_time()
            *_, last = iterator
            here.append((time.process_time() - began) / (STREAMED - 1))
            there.append((last - first) / (STREAMED - 1))
        named = "none" if nbytes is None else f"{nbytes:,} bytes"
        figures = (min(one) * 1e3 for one in (here, there))
        lines.append(f"| {named} | " + " | ".join(f"{one:.2f}" for one in figures) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resume", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", type=Path, metavar="PAGE")
    asked = parser.parse_args()
    logging.getLogger("holdfast").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    parts = (ordinary(asked.rounds), positions(), large_states(asked.rounds))
    told = "\n\n".join("\n".join(part) for part in parts)
    print(told)
    if asked.write is not None:
        put(asked.write, "resume", told)


if __name__ == "__main__":
    main()
