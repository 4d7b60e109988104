"""Samples loaded in a worker that runs with `tracemalloc`.

A real worker, started as workers are: what a sample does when `get_worker_info()` is set, and the
memory of a process that does nothing else, are what is to be known; and a sample that crashes, or
takes all memory, ends that worker and not the command.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.data

from holdfast.doctor.probe import trouble_of
from holdfast.loader import DataLoader
from holdfast.memory.leaks import Findings, Round, Tracer, findings, suspects

__all__ = ["trace"]


class _Traced(torch.utils.data.Dataset[Any]):
    """A dataset whose samples are what is there after loading them, at the end of each round."""

    def __init__(self, dataset: Any, samples: int) -> None:
        self.dataset = dataset
        self.samples = samples
        self.tracer: Tracer | None = None
        self.stream: Iterator[Any] = iter(())

    def __getitem__(self, number: int) -> tuple[Round, list[str]] | None:
        if self.tracer is None:
            self.tracer = Tracer(self.samples)
            self.stream = _again(self.dataset)
        self._load(number)
        noted = self.tracer.loaded()
        return None if noted is None else (noted, suspects())

    def _load(self, number: int) -> None:
        """The n-th sample, beginning again at the end."""
        if isinstance(self.dataset, torch.utils.data.IterableDataset):
            next(self.stream)
        else:
            self.dataset[number % len(self.dataset)]


def _again(dataset: Any) -> Iterator[Any]:
    """A stream over and over, in one that has an end."""
    if isinstance(dataset, torch.utils.data.IterableDataset):
        for epoch in itertools.count(1):
            empty = True
            for sample in dataset:
                empty = False
                yield sample
            if empty:
                raise ValueError(f"the dataset gave no sample in epoch {epoch}: nothing to look at")


def trace(
    dataset: Any,
    samples: int,
    rounds: int,
    method: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Findings:
    """What grows from round to round in one worker; `Troubled` if that worker does not get through.

    One round comes before the first that is looked at, and another is what they are compared with.
    """
    loader: Any = DataLoader(
        _Traced(dataset, samples),
        batch_size=None,
        sampler=range((rounds + 2) * samples),
        num_workers=1,
        multiprocessing_context=method,
        max_restarts=0,
        worker_memory_limit=None,
    )
    noted: list[Round] = []
    native: list[str] = []
    say(f"round 0 of {rounds + 1}, to warm up")
    with loader, trouble_of(loader):
        for answer in loader:
            if answer is not None:
                noted.append(answer[0])
                native = answer[1]
                say(f"round {len(noted)} of {rounds + 1}")
    return findings(noted, samples, native)
