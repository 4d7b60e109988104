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

from holdfast.errors import WorkerLost
from holdfast.introspection.data_size import weigh
from holdfast.loader import DataLoader
from holdfast.samples.bad_sample import BadSample, name_of
from holdfast.samples.batch_outlier import form
from holdfast.scan.sample_contents import digest
from holdfast.scan.scan_progress import Ranges
from holdfast.scan.scan_statistics import SampleReading, Tally
from holdfast.worker.randomness import Randomness, restore_in_process

FIRST_BATCH: Final = 16
LARGEST_BATCH: Final = 4096
BATCH_SECONDS: Final = 0.5
BAD_IN_A_ROUND: Final = 10_000  # a loader keeps every record; after this many it is replaced


@dataclass(frozen=True, slots=True)
class ScanSettings:
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
            raise LookupError("it has no names")  # the caller then takes the name from the error
        return name

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> SampleReading | None:
        if self.twice:
            return self._loaded_twice(index)
        sample, seconds = self._timed(index)
        if sample is None:
            return None
        return SampleReading(index, seconds, weigh(sample), form(sample))

    def _timed(self, index: int) -> tuple[Any, float]:
        before = time.perf_counter()
        sample = self.dataset[index]
        return sample, time.perf_counter() - before

    def _loaded_twice(self, index: int) -> SampleReading | None:
        """Load it a second time from the same random state: a difference then has another cause."""
        if self._state is None:
            self._state = Randomness(lambda: [("dataset", self.dataset)])
        state = self._state
        start = state.snapshot()
        sample, seconds = self._timed(index)
        if sample is None:
            return None
        end = state.snapshot()
        drew = [raw for _, raw in start] != [raw for _, raw in end]
        first, nbytes, shape = digest(sample), weigh(sample), form(sample)
        del sample  # not two of them at once
        restore_in_process(start)
        second = digest(self.dataset[index])
        restore_in_process(end)
        same = None if first is None or second is None else first == second
        return SampleReading(index, seconds, nbytes, shape, drew, same)


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


def _add_up(batch: list[SampleReading | _Faulty]) -> _Sum:
    """The collate function."""
    readings = [one for one in batch if isinstance(one, SampleReading)]
    bad = [one.bad for one in batch if isinstance(one, _Faulty)]
    first = batch[0].bad.index if isinstance(batch[0], _Faulty) else batch[0].key
    seconds = sum(one.seconds for one in readings)
    return _Sum(first, seconds, Tally.of(readings), bad)


def _discard_output(worker_id: int) -> None:
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

    def harvest(self, found: _Sum) -> Harvest:
        start, stop = self.out.pop(found.first)
        self.bad += len(found.bad)
        self.delivered += 1
        if found.seconds or not found.bad:
            self.pace.learn(found.tally.good, found.seconds)
        return Harvest(start, stop, found.tally, found.bad)


def scan(
    dataset: Any, indices: Sequence[int], done: Ranges, settings: ScanSettings
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
                worker_init_fn=None if settings.show_output else _discard_output,
                multiprocessing_context=settings.start_method,
                in_order=False,
                stall_timeout=settings.stall_timeout,
                on_bad_sample=_in_its_place,
                max_bad_samples=math.inf,
            ) as loader:
                for found in loader:
                    yield now.harvest(found)
        except WorkerLost:
            # Some samples end workers only together. Smaller batches may succeed.
            if pace.largest == 1 and not now.delivered:
                raise
            pace.slow_down()
