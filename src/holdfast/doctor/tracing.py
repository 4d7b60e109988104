"""Load samples in a worker that runs with `tracemalloc`.

It is a real worker: `get_worker_info()` is set, and the process does nothing but load samples. A
sample that crashes, or takes all memory, ends that worker and not the command.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.data

from holdfast.doctor.probe import trouble_of
from holdfast.loader import DataLoader
from holdfast.worker.leak_tracer import Findings, Tracer


class _Traced(torch.utils.data.Dataset[Any]):
    """A dataset that loads another one's samples. Its last item is what was found; the others are
    None."""

    def __init__(self, dataset: Any, samples: int, rounds: int) -> None:
        self.dataset = dataset
        self.samples = samples
        self.rounds = rounds
        self.tracer: Tracer | None = None
        self.stream: Iterator[Any] = iter(())

    def __getitem__(self, number: int) -> Findings | None:
        if self.tracer is None:
            self.tracer = Tracer(self.samples, self.rounds, self.dataset)
            self.stream = _again(self.dataset)
            gc.unfreeze()  # the object that holds the leak may be older than this process
        self._load(number)
        return self.tracer.step()

    def _load(self, number: int) -> None:
        """Load the n-th sample; after the last one comes the first again."""
        if isinstance(self.dataset, torch.utils.data.IterableDataset):
            next(self.stream)
        else:
            self.dataset[number % len(self.dataset)]


def _again(dataset: Any) -> Iterator[Any]:
    """An iterable dataset's samples, epoch after epoch; nothing for a map-style dataset."""
    if isinstance(dataset, torch.utils.data.IterableDataset):
        for epoch in itertools.count(1):
            empty = True
            for sample in dataset:
                empty = False
                yield sample
            if empty:
                raise ValueError(f"the dataset gave no sample in epoch {epoch}: nothing to trace")


def trace(
    dataset: Any,
    samples: int,
    rounds: int,
    method: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Findings:
    """What grows from round to round in one worker; raises `Troubled` if the worker fails.

    Two more rounds come first: one to warm up, and one that the others are compared with.
    """
    number = (rounds + 2) * samples
    loader: Any = DataLoader(
        _Traced(dataset, samples, rounds),
        batch_size=None,
        sampler=range(number),
        num_workers=1,
        multiprocessing_context=method,
        max_restarts=0,
        worker_memory_limit=None,
    )
    found: Findings | None = None
    with loader, trouble_of(loader):
        for loaded, answer in enumerate(loader):
            found = found or answer
            if loaded % samples == 0:
                turn = loaded // samples
                progress(f"round {turn} of {rounds + 1}" + (", to warm up" if turn == 0 else ""))
    assert found is not None
    return found
