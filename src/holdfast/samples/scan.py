"""Loading every sample of a dataset once, to find the bad ones before training does.

A scan uses an ordinary loader, so it survives and judges whatever samples do in the same way. Only
the batches differ. The dataset is wrapped so that a worker keeps a few numbers of each sample. The
collate function adds them up, and the main process gets one small tally for thousands of samples. A
bad sample is replaced by its own record, so a batch always arrives whole, and all samples of a
batch that has arrived are done.

Batches grow until one takes about half a second: large enough that a million cheap samples are a
few hundred messages, small enough that little is repeated when a sample ends its worker. They may
arrive in any order: a sample that hangs delays only the samples behind it in the same worker.

This is the only module of this folder that imports the loader.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from holdfast.engine.randomness import Randomness, Snapshot, bring_back
from holdfast.errors import WorkerLost
from holdfast.loader import DataLoader
from holdfast.samples.contents import digest, weigh
from holdfast.samples.oddity import form
from holdfast.samples.progress import Ranges
from holdfast.samples.record import BadSample, name_of
from holdfast.samples.tally import Reading, Tally

__all__ = ["Harvest", "Settings", "scan"]

FIRST_BATCH: Final = 16
LARGEST_BATCH: Final = 4096
BATCH_SECONDS: Final = 0.5
BAD_IN_A_ROUND: Final = 10_000  # a loader keeps every record; after this many it is replaced


@dataclass(frozen=True, slots=True)
class Settings:
    """How to scan."""

    workers: int
    stall_timeout: float | None = 60.0
    twice: bool = False
    seed: int = 0
    start_method: str = "fork"
    show_output: bool = False


class Harvest(NamedTuple):
    """The result of a batch: positions from `start` to `stop` are done."""

    start: int
    stop: int
    tally: Tally
    bad: list[BadSample]


class _Examined:
    """The dataset, with a few numbers in place of each sample."""

    def __init__(self, dataset: Any, twice: bool) -> None:
        self.dataset = dataset
        self.twice = twice
        self._state: Randomness | None = None  # of the worker's process

    def sample_name(self, index: int) -> str:
        name = name_of(self.dataset, index)
        if name is None:
            raise LookupError("it has no names")  # the caller then looks at the error
        return name

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Reading | None:
        if self.twice:
            return self._loaded_twice(index)
        before = time.perf_counter()
        sample = self.dataset[index]
        seconds = time.perf_counter() - before
        if sample is None:
            return None
        return Reading(index, seconds, weigh(sample), form(sample))

    def _loaded_twice(self, index: int) -> Reading | None:
        """Load it a second time from the same random state: a difference then has another cause."""
        if self._state is None:
            self._state = Randomness(lambda: [("dataset", self.dataset)])
        state = self._state
        start = state.snapshot()
        before = time.perf_counter()
        sample = self.dataset[index]
        seconds = time.perf_counter() - before
        if sample is None:
            return None
        end = state.snapshot()
        drew = not _equal(start, end)
        first, nbytes, looks = digest(sample), weigh(sample), form(sample)
        del sample  # not two of them at once
        bring_back(start)
        second = digest(self.dataset[index])
        bring_back(end)
        same = None if first is None or second is None else first == second
        return Reading(index, seconds, nbytes, looks, drew, same)


def _equal(one: Snapshot, other: Snapshot) -> bool:
    if not torch.equal(one[0], other[0]) or one[1] != other[1]:
        return False
    if repr(one[2]) != repr(other[2]):
        return False
    return [raw for _, raw in one[3]] == [raw for _, raw in other[3]]


class _Faulty(NamedTuple):
    """Takes the place of a bad sample in its batch."""

    bad: BadSample


def _in_its_place(bad: BadSample) -> _Faulty:
    return _Faulty(bad)


class _Sum(NamedTuple):
    first: int  # index of the batch's first sample, which identifies the batch
    seconds: float
    tally: Tally
    bad: list[BadSample]


def _add_up(batch: list[Reading | _Faulty]) -> _Sum:
    """The collate function."""
    readings = [one for one in batch if isinstance(one, Reading)]
    bad = [one.bad for one in batch if isinstance(one, _Faulty)]
    first = batch[0].bad.index if isinstance(batch[0], _Faulty) else batch[0].key
    seconds = sum(one.seconds for one in readings)
    return _Sum(first, seconds, Tally.of(readings), bad)


def _silence(worker_id: int) -> None:
    """Discard the output of workers: decoders may print a line for each of a million files."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)


class _Pace:
    """How large batches are."""

    def __init__(self) -> None:
        self.size = FIRST_BATCH
        self.largest = LARGEST_BATCH

    def learn(self, samples: int, seconds: float) -> None:
        fitting = math.inf if seconds <= 0 else BATCH_SECONDS * samples / seconds
        self.size = max(1, int(min(fitting, 4 * self.size, self.largest)))

    def slow_down(self) -> None:
        self.largest = max(1, self.largest // 16)
        self.size = min(self.size, self.largest)


class _Round:
    """A batch sampler for the samples left, until all are done or `BAD_IN_A_ROUND` were bad."""

    def __init__(self, indices: Sequence[int], gaps: list[tuple[int, int]], pace: _Pace) -> None:
        self.indices = indices
        self.gaps = gaps
        self.pace = pace
        self.out: dict[int, tuple[int, int]] = {}  # by first index
        self.bad = 0
        self.delivered = 0

    def __iter__(self) -> Iterator[list[int]]:
        for start, stop in self.gaps:
            while start < stop:
                if self.bad >= BAD_IN_A_ROUND:
                    return
                end = min(stop, start + self.pace.size)
                batch = list(self.indices[start:end])
                self.out[batch[0]] = (start, end)
                yield batch
                start = end

    def take_in(self, found: _Sum) -> Harvest:
        start, stop = self.out.pop(found.first)
        self.bad += len(found.bad)
        self.delivered += 1
        if found.seconds or not found.bad:
            self.pace.learn(found.tally.good, found.seconds)
        return Harvest(start, stop, found.tally, found.bad)


def scan(
    dataset: Any, indices: Sequence[int], done: Ranges, settings: Settings
) -> Iterator[Harvest]:
    """Load those of `indices`, which are distinct, that are not `done`.

    The caller adds each harvest to `done` before it asks for the next one.
    """
    examined = _Examined(dataset, settings.twice)
    pace = _Pace()
    torch.manual_seed(settings.seed)
    while gaps := list(done.gaps(len(indices))):
        now = _Round(indices, gaps, pace)
        try:
            loader: DataLoader[Any]
            with DataLoader(
                examined,  # type: ignore[arg-type]
                batch_sampler=now,
                num_workers=settings.workers,
                collate_fn=_add_up,
                worker_init_fn=None if settings.show_output else _silence,
                multiprocessing_context=settings.start_method,
                in_order=False,
                stall_timeout=settings.stall_timeout,
                on_bad_sample=_in_its_place,
                max_bad_samples=math.inf,
            ) as loader:
                for found in loader:
                    yield now.take_in(found)
        except WorkerLost:
            # Some samples end workers only together. Smaller batches may succeed.
            if pace.largest == 1 and not now.delivered:
                raise
            pace.slow_down()
