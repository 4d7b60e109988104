"""Samples loaded in real workers, measured where they are loaded.

Never in our own process: a handle that the dataset opens at its first sample would be shared with
all later workers, and a sample that crashes would end the doctor.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.utils.data

from holdfast.doctor.fingerprint import changed, fingerprint
from holdfast.loader import DataLoader
from holdfast.memory.sizes import deep_size

__all__ = ["Samples", "load_samples", "rate"]

_STALL = 60.0


@dataclass
class Samples:
    """What a worker saw of a dataset's samples."""

    method: str
    seconds: list[float] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    private: list[int] = field(
        default_factory=list
    )  # of the worker, before the first and after each
    resident: int = 0  # at the end, with what it shares
    changed: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def start(self) -> int:
        """Private bytes of a worker that has loaded nothing yet."""
        return self.private[0] if self.private else 0

    @property
    def growth(self) -> int:
        return max(self.private) - self.private[0] if self.private else 0


class _Watched(torch.utils.data.Dataset[Any]):
    """A dataset whose samples are what loading them cost."""

    def __init__(self, dataset: Any, count: int) -> None:
        self.dataset = dataset
        self.count = count
        self.before: dict[str, Any] | None = None
        self.stream: Iterator[Any] | None = None

    def __getitem__(self, number: int) -> dict[str, Any]:
        notes: dict[str, Any] = {}
        if self.before is None:
            notes["start"] = _private()
            self.before = fingerprint(self.dataset)
        begun = time.perf_counter()
        sample = self._load(number)
        notes["seconds"] = time.perf_counter() - begun
        notes["nbytes"] = deep_size(sample)
        del sample
        notes["private"], notes["resident"] = _private(), _resident()
        if number == self.count - 1:
            notes["changed"] = changed(self.before, fingerprint(self.dataset))
        return notes

    def _load(self, number: int) -> Any:
        if not isinstance(self.dataset, torch.utils.data.IterableDataset):
            return self.dataset[position(self.dataset, number, self.count)]
        if self.stream is None:
            self.stream = iter(self.dataset)
        return next(self.stream, None)


def position(dataset: Any, number: int, count: int) -> int:
    """Which sample the doctor takes: spread evenly over the dataset."""
    return number * max(1, len(dataset) // count)


def load_samples(dataset: Any, count: int, method: str) -> Samples:
    """Load some samples in one worker that is started by `method`."""
    found = Samples(method)
    mapped = not isinstance(dataset, torch.utils.data.IterableDataset)
    if mapped:
        count = min(count, len(dataset))
    loader: Any = DataLoader(
        _Watched(dataset, count),
        batch_size=None,
        sampler=range(count),
        num_workers=1,
        multiprocessing_context=method,
        max_restarts=0,
        stall_timeout=_STALL,
    )
    with loader:
        try:
            for notes in loader:
                if "start" in notes:
                    found.private.append(notes["start"])
                found.seconds.append(notes["seconds"])
                found.nbytes.append(notes["nbytes"])
                found.private.append(notes["private"])
                found.resident = notes["resident"]
                found.changed = notes.get("changed", [])
        except Exception as error:  # whatever the dataset, or the death of its worker, is
            index = position(dataset, len(found.seconds), count) if mapped else len(found.seconds)
            found.error = f"sample {index}: {_last_words(error)}"
    return found


def _last_words(error: Exception) -> str:
    """An error's own line, out of the traceback of a worker that it came with."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if "Traceback" not in str(error):
        return f"{type(error).__name__}: {lines[0] if lines else ''}"
    return next((line for line in reversed(lines) if not line.startswith("holdfast:")), "")


def rate(dataset: Any, batch_size: int, workers: int, seconds: float, collate: Any) -> float:
    """Samples per second that so many workers deliver, measured over `seconds`."""
    endless = not isinstance(dataset, torch.utils.data.IterableDataset)
    options = {
        "batch_size": batch_size,
        "sampler": _Again(len(dataset)) if endless else None,
        "num_workers": workers,
        "collate_fn": collate,
        "max_restarts": 0,
        "stall_timeout": _STALL,
    }
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="This DataLoader will create"
        )  # that is the point
        return _measure(DataLoader(dataset, **options), batch_size, workers, seconds)


def _measure(loader: Any, batch_size: int, workers: int, seconds: float) -> float:
    with loader:
        stream = iter(loader)
        for _ in range(workers):  # until all have started
            next(stream, None)
        begun = time.perf_counter()
        batches = 0
        while not batches or time.perf_counter() - begun < seconds:
            if next(stream, None) is None:
                break
            batches += 1
        return batches * batch_size / (time.perf_counter() - begun)


class _Again(torch.utils.data.Sampler[int]):
    """All positions, over and over."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from range(self.count)


def _private() -> int:
    return _rollup(r"Private_\w+")


def _resident() -> int:
    return _rollup("Rss")


def _rollup(names: str) -> int:
    written = Path("/proc/self/smaps_rollup").read_text()
    return sum(map(int, re.findall(rf"^{names}:\s+(\d+) kB", written, re.MULTILINE))) << 10
