"""Load samples in real workers, and measure there.

Never in our own process: a handle that the dataset opens at its first sample would be shared with
all later workers, and a sample that crashes would end the doctor.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.data

from holdfast.autopsy.catalogue import UNKNOWN
from holdfast.autopsy.incident import Incident
from holdfast.autopsy.readers import procfs
from holdfast.doctor.dataset_changes import changed, fingerprint
from holdfast.loader import DataLoader
from holdfast.packed.object_sizes import deep_size

_STALL_TIMEOUT = 60.0
ROUNDS = 3  # with one thread and with two, in turns
THREADS_GAIN = 1.5  # of two threads over one, from which on Python's lock is mostly free
BUSY = 1.5  # programs for each processor, from which on a measurement shows little


@dataclass
class Samples:
    """What a worker measured while it loaded samples."""

    method: str
    seconds: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)  # seconds of these on a processor
    nbytes: list[int] = field(default_factory=list)
    private: list[int] = field(
        default_factory=list
    )  # of the worker, before the first sample and after each
    resident: int = 0  # at the end, with shared memory
    changed: list[str] = field(default_factory=list)
    error: str = ""
    remedy: str = ""
    crashed: bool = False  # a sample ended the worker

    @property
    def start(self) -> int:
        """Private bytes of a worker that has loaded nothing yet."""
        return self.private[0] if self.private else 0


class Troubled(Exception):
    """A dataset's error or the death of its worker: in one line, in full, and what to do."""

    def __init__(
        self, words: str, details: str, remedy: str, incident: Incident | None = None
    ) -> None:
        super().__init__(words)
        self.details = details
        self.remedy = remedy
        self.incident = incident  # the death of its worker


class _Watched(torch.utils.data.Dataset[Any]):
    """A dataset that loads another one's samples and returns what each took."""

    def __init__(self, dataset: Any, positions: list[int]) -> None:
        self.dataset = dataset
        self.positions = positions
        self.before: dict[str, Any] = {}
        self.first: dict[str, Any] = {}
        self.stream: Iterator[Any] | None = None

    def __getitem__(self, number: int) -> dict[str, Any] | None:
        notes: dict[str, Any] = {}
        if number == 0:
            notes["start"], _ = _private_and_resident()
            self.before = fingerprint(self.dataset, self.positions)
        begun, used = time.perf_counter(), time.process_time()
        try:
            sample = self._load(number)
        except _Ended:
            return None
        notes["seconds"] = time.perf_counter() - begun
        notes["busy"] = time.process_time() - used
        notes["nbytes"] = deep_size(sample)
        del sample
        notes["private"], notes["resident"] = _private_and_resident()
        if number == 0:
            self.first = fingerprint(self.dataset, self.positions)
        if number == len(self.positions) - 1:
            after = fingerprint(self.dataset, self.positions)
            notes["changed"] = changed(self.before, after, self.first)
        return notes

    def _load(self, number: int) -> Any:
        if not isinstance(self.dataset, torch.utils.data.IterableDataset):
            return self.dataset[self.positions[number]]
        if self.stream is None:
            self.stream = iter(self.dataset)
        try:
            return next(self.stream)
        except StopIteration:
            raise _Ended from None


class _Ended(Exception):
    """The dataset has no more samples."""


def spread(dataset: Any, count: int) -> list[int]:
    """Which samples the doctor takes: spread evenly over the dataset."""
    if isinstance(dataset, torch.utils.data.IterableDataset):
        return list(range(count))
    count = min(count, len(dataset))
    return [number * len(dataset) // count for number in range(count)]


def load_samples(dataset: Any, count: int, method: str) -> Samples:
    """Load some samples in one worker that is started by `method`."""
    found = Samples(method)
    positions = spread(dataset, count)
    loader: Any = DataLoader(
        _Watched(dataset, positions),
        batch_size=None,
        sampler=range(len(positions)),
        num_workers=1,
        worker_method="multiprocessing",  # whatever the environment says: it may crash
        multiprocessing_context=method,
        max_restarts=0,
        stall_timeout=_STALL_TIMEOUT,
    )
    try:
        with loader, trouble_of(loader):
            for notes in loader:
                if notes is None:
                    break
                if "start" in notes:
                    found.private.append(notes["start"])
                found.seconds.append(notes["seconds"])
                found.busy.append(notes["busy"])
                found.nbytes.append(notes["nbytes"])
                found.private.append(notes["private"])
                found.resident = notes["resident"]
                found.changed = notes.get("changed", [])
    except Troubled as trouble:
        found.error = f"sample {positions[len(found.seconds)]}: {trouble}"
        found.remedy = trouble.remedy
        found.crashed = trouble.incident is not None and trouble.incident.kind != "stalled"
    return found


@dataclass(frozen=True)
class ThreadGains:
    """How many times as much two threads do as one: about 1 for Python code, up to 2 for code that
    releases Python's lock."""

    samples: float  # of the dataset
    possible: float  # of a calculation that releases the lock, measured in turns with the samples
    load: float = 0.0  # programs that wanted a processor meanwhile, for each processor

    @property
    def reliable(self) -> bool:
        """Whether two processors were free, so that threads could gain something."""
        return self.possible >= THREADS_GAIN and self.load <= BUSY


class _InTwoThreads(torch.utils.data.Dataset[tuple[float, float]]):
    """Its only sample: the two figures of `ThreadGains`."""

    def __init__(self, dataset: Any, positions: list[int]) -> None:
        self.dataset = dataset
        self.positions = positions

    def __getitem__(self, _: int) -> tuple[float, float]:
        self._load()  # what is opened or cached with the first sample
        works = (self._load, _calculate)
        one, two = [math.inf, math.inf], [math.inf, math.inf]
        with ThreadPoolExecutor(2) as threads:
            for _ in range(ROUNDS):  # the quickest counts: other programs may run too
                for number, work in enumerate(works):
                    one[number] = min(one[number], _seconds(threads, work, 1))
                    two[number] = min(two[number], _seconds(threads, work, 2))
        samples, possible = (2 * a / max(1e-9, b) for a, b in zip(one, two, strict=True))
        return samples, possible

    def _load(self) -> None:
        for position in self.positions:
            self.dataset[position]


def _seconds(threads: ThreadPoolExecutor, work: Callable[[], object], count: int) -> float:
    began = time.perf_counter()
    for one in [threads.submit(work) for _ in range(count)]:
        one.result()
    return time.perf_counter() - began


def _calculate() -> None:
    """Some ten milliseconds on a processor, without Python's lock."""
    block = bytes(1 << 20)
    for _ in range(16):
        hashlib.sha256(block)


def gain_of_two_threads(dataset: Any, count: int) -> ThreadGains:
    """What two threads gain in a forked worker. Raises `Troubled`."""
    measured = _InTwoThreads(dataset, spread(dataset, count))
    loader: Any = DataLoader(
        measured,
        batch_size=None,
        sampler=range(1),
        num_workers=1,
        multiprocessing_context="fork",
        worker_method="multiprocessing",
        max_restarts=0,
        stall_timeout=_STALL_TIMEOUT,
    )
    with loader, trouble_of(loader):
        samples, possible = next(iter(loader))
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
        return ThreadGains(float(samples), float(possible), load)


@contextmanager
def trouble_of(loader: Any) -> Iterator[None]:
    """Turn an error of the dataset, or the death of its worker, into `Troubled`; log nothing."""
    log = logging.getLogger("holdfast")
    before, log.disabled = log.disabled, True
    try:
        yield
    except Exception as error:
        if loader.incidents:
            incident = loader.incidents[-1]
            remedy = f"holdfast explain {incident.cause}" if incident.cause != UNKNOWN else ""
            words = f"the worker {incident.what()}"
            raise Troubled(words, incident.report(), remedy, incident) from error
        raise Troubled(_last_line(error), str(error), _SKIP) from error
    finally:
        log.disabled = before


_SKIP = "DataLoader(…, on_bad_sample='skip')   # holdfast's: costs one sample, not the run"


def _last_line(error: Exception) -> str:
    """The line of the error itself, without the worker's traceback."""
    text = str(error).partition("\nholdfast: ")[0]  # what we have added to it
    lines = [line for line in text.splitlines() if line.strip()]
    if "Traceback" not in text:
        return f"{type(error).__name__}: {lines[0] if lines else ''}"
    return lines[-1]


def rate(dataset: Any, batch_size: int, workers: int, seconds: float, collate: Any) -> float:
    """Samples per second that this many workers deliver, measured over `seconds`."""
    mapped = not isinstance(dataset, torch.utils.data.IterableDataset)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # more workers than cores are intended here
        loader: Any = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=_Again(len(dataset)) if mapped else None,
            num_workers=workers,
            collate_fn=collate,
            max_restarts=0,
            stall_timeout=_STALL_TIMEOUT,
        )
        with trouble_of(loader):
            return _measure(loader, batch_size, workers, seconds)


def _measure(loader: Any, batch_size: int, workers: int, seconds: float) -> float:
    with loader:
        stream = iter(loader)
        for _ in range(workers):  # until all workers have started
            next(stream, None)
        begun = time.perf_counter()
        batches = 0
        while not batches or time.perf_counter() - begun < seconds:
            if next(stream, None) is None:
                break
            batches += 1
        return batches * batch_size / (time.perf_counter() - begun)


def as_they_are(samples: list[Any]) -> int:
    """A collate_fn for samples that cannot be collated: they are loaded, and not sent."""
    return len(samples)


class _Again(torch.utils.data.Sampler[int]):
    """All positions, over and over."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from range(self.count)


def _private_and_resident() -> tuple[int, int]:
    """Bytes of this process; zeros if they cannot be read."""
    sizes = procfs.rollup("self") or {}
    private = sum(size for name, size in sizes.items() if name.startswith("Private_"))
    return private, sizes.get("Rss", 0)
