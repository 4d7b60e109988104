"""Where the time of workers went, and how long samples take: counted in their black boxes.

Only with a logbook. The worker counts into the first page of its region, and the trainer reads that
whenever it likes. So counting needs no message, and what a killed worker had counted is not lost:
its replacement continues from there.

- Seconds in each step. The time is read for every note anyway.
- Histograms of the seconds and bytes of samples, and the slowest and largest of them. Two readings
  of the clock may take as long as a small sample, so a worker measures a whole batch and then none
  for `PAUSE` seconds: nearly all samples if they are slow, and some of them if they are quick.

Bytes are those of the plain parts of a sample. An object of another class may run code of the user
when it is looked at, so the size of a sample that contains one is not known.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

START: Final = 256  # in a region of the black boxes, behind the notes
PAUSE: Final = 0.05  # seconds after a measured batch in which none is measured
BUCKETS: Final = 64
_PER_OCTAVE: Final = 2  # buckets for each doubling
_SMALLEST: Final = {"seconds": 1e-6, "bytes": 1.0}  # the upper bound of the first bucket
_STEPS: Final = 9
_SECONDS: Final = START + 8 * _STEPS
_BYTES: Final = _SECONDS + 8 * BUCKETS
_SLOWEST: Final = _BYTES + 8 * BUCKETS
_ENTRY: Final = struct.Struct("<dq64s")  # the value, the length of the text, the text
_ENTRIES: Final = 8
_LARGEST: Final = _SLOWEST + _ENTRIES * _ENTRY.size
END: Final = _LARGEST + _ENTRIES * _ENTRY.size

Memory = mmap.mmap | bytearray
Named = tuple[float, str]
"""The seconds or bytes of a sample, and which one it is: its index, or its place in a stream."""


def step_seconds(memory: Memory, region: int) -> memoryview[float]:
    """The seconds in each step, as a view to add to."""
    return memoryview(memory)[region + START : region + _SECONDS].cast("d")


def lower_bound(bucket: int, unit: str) -> float:
    """Where a bucket of a histogram begins; `unit` is "seconds" or "bytes"."""
    return _SMALLEST[unit] * 2.0 ** ((bucket - 1) / _PER_OCTAVE) if bucket else 0.0


def _bucket(value: float, unit: str) -> int:
    smallest = _SMALLEST[unit]
    if value < smallest:
        return 0
    return min(BUCKETS - 1, 1 + int(_PER_OCTAVE * math.log2(value / smallest)))


@dataclass
class Tally:
    """What the workers of a pool have counted."""

    seconds: list[float] = field(default_factory=lambda: [0.0] * _STEPS)  # by step
    times: NDArray[np.int64] = field(default_factory=lambda: np.zeros(BUCKETS, np.int64))
    sizes: NDArray[np.int64] = field(default_factory=lambda: np.zeros(BUCKETS, np.int64))
    slowest: list[Named] = field(default_factory=list)
    largest: list[Named] = field(default_factory=list)

    def add(self, memory: Memory, region: int) -> None:
        """Add what is in this region."""
        for step, seconds in enumerate(step_seconds(memory, region)):
            self.seconds[step] += seconds
        self.times += np.frombuffer(memory, np.int64, BUCKETS, region + _SECONDS)
        self.sizes += np.frombuffer(memory, np.int64, BUCKETS, region + _BYTES)
        self.slowest = _top([*self.slowest, *_entries(memory, region + _SLOWEST)])
        self.largest = _top([*self.largest, *_entries(memory, region + _LARGEST)])


def _top(entries: list[Named]) -> list[Named]:
    best: dict[str, float] = {}
    for value, name in entries:  # a sample that is loaded in every epoch is one
        best[name] = max(value, best.get(name, 0.0))
    ranked = sorted(((value, name) for name, value in best.items()), reverse=True)
    return ranked[:_ENTRIES]


def _entries(memory: Memory, at: int) -> Iterator[Named]:
    for number in range(_ENTRIES):
        value, length, text = _ENTRY.unpack_from(memory, at + number * _ENTRY.size)
        if value > 0:
            yield value, text[: max(0, length)].decode(errors="replace")


class SampleWatch:
    """The worker's side: measures samples."""

    def __init__(self, memory: Memory, region: int, worker: int) -> None:
        self._worker = worker
        view = memoryview(memory)
        self._times = view[region + _SECONDS : region + _BYTES].cast("q")
        self._sizes = view[region + _BYTES : region + _SLOWEST].cast("q")
        self._slowest = _Table(memory, region + _SLOWEST)
        self._largest = _Table(memory, region + _LARGEST)
        self._next = 0.0

    def due(self) -> bool:
        """Whether to measure the batch that begins now."""
        now = monotonic()
        if now < self._next:
            return False
        self._next = now + PAUSE  # and later, if the batch itself takes long
        return True

    def add(self, key: Any, seconds: float, sample: Any) -> None:
        """A sample was loaded."""
        self._times[_bucket(seconds, "seconds")] += 1
        if seconds > self._slowest.least:
            self._slowest.add(seconds, _text(key))
        size = _plain_bytes(sample, 4)
        if size is not None:
            self._sizes[_bucket(size, "bytes")] += 1
            if size > self._largest.least:
                self._largest.add(size, _text(key))
        self._next = monotonic() + PAUSE

    def draw(self, plain: Callable[[], Any], batch: int, position: int) -> Any:
        """The next element of a stream, which `plain` draws."""
        began = monotonic()
        sample = plain()
        place = f"element {position} of batch {batch} of worker {self._worker}"
        self.add(place, monotonic() - began, sample)
        return sample


class _Table:
    """The samples with the highest values."""

    def __init__(self, memory: Memory, at: int) -> None:
        self._memory = memory
        self._at = at
        self._entries = _top(list(_entries(memory, at)))  # of a predecessor
        self.least = self._limit()

    def add(self, value: float, text: str) -> None:
        self._entries = _top([*self._entries, (value, text)])
        self.least = self._limit()
        for number, (one, name) in enumerate(self._entries):
            encoded = name.encode(errors="replace")[:64]
            at = self._at + number * _ENTRY.size
            _ENTRY.pack_into(self._memory, at, one, len(encoded), encoded)

    def _limit(self) -> float:
        """What a value must exceed to be among them."""
        return self._entries[-1][0] if len(self._entries) == _ENTRIES else 0.0


def _text(key: Any) -> str:
    """A key of plain types; the class of any other, whose repr may be code of the user."""
    if type(key) in (int, str, float, bool, bytes):
        return str(key)
    if type(key) is tuple:
        return f"({', '.join(map(_text, key))})"
    return str(int(key)) if issubclass(type(key), np.integer) else f"a {type(key).__name__}"


def _plain_bytes(sample: Any, depth: int) -> int | None:
    kind = type(sample)
    if kind in (int, float, bool, complex, type(None)):
        return 8
    if kind in (str, bytes, bytearray):
        return len(sample)
    if kind is np.ndarray or issubclass(kind, np.generic):
        return int(sample.nbytes)
    if kind.__module__ == "torch" and kind.__name__ == "Tensor":  # which costs no import here
        return int(sample.nbytes) if str(sample.layout) == "torch.strided" else None
    if depth and (kind in (list, tuple, dict) or (issubclass(kind, tuple) and _named(kind))):
        total = 0
        for part in sample.values() if kind is dict else sample:
            size = _plain_bytes(part, depth - 1)
            if size is None:
                return None
            total += size
        return total
    return None


def _named(kind: type) -> bool:
    return hasattr(kind, "_fields") and getattr(kind, "__iter__", None) is tuple.__iter__
