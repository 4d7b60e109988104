"""I6: bytes in flight, counted without asking the loader.

A sample is in flight from the moment when a worker begins to make it until the consumer has the
batch it is in. The dataset notes the time of the first in a file, the player notes the second; both
clocks are the machine's. When an epoch is over, the most that was in flight at any moment follows
from these times. A batch that is redone or replayed after a death is the same samples, and counts
from its first beginning.

While the consumer is inside ``next()`` a batch may just have been handed over and not noted yet, so
there one batch more is allowed. Between two calls nothing is: the player rests there for a moment.

What the loader itself says is asked again and again by a thread.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

REST = 0.002  # seconds between two calls of next()
EVERY = 0.005  # seconds between two questions to the loader
_TIME = struct.Struct("d")


_files: dict[str, int] = {}


def be_ready(file: str | None) -> None:
    """In a worker: keep the file open, since some rows leave no descriptor free."""
    if file is not None and file not in _files:
        _files[file] = os.open(file, os.O_RDWR | os.O_CLOEXEC)


def begins(file: str | None, number: int) -> None:
    """In a worker: this sample is being made from now on."""
    be_ready(file)
    if file is None:
        return
    at = number * _TIME.size
    if not any(os.pread(_files[file], _TIME.size, at)):
        os.pwrite(_files[file], _TIME.pack(time.monotonic()), at)


@dataclass
class Seen:
    """The most there was at one time, and how often something began."""

    most: int = 0
    most_inside: int = 0  # while the consumer was inside next()
    at_most: frozenset[int] = frozenset()  # which samples that was
    begun: int = 0
    asked: int = 0
    said: int = 0  # the most that the loader itself said was in flight


@dataclass
class Witness:
    """In the trainer: who has what."""

    file: Path
    sizes: Sequence[int]  # bytes of each sample
    without: frozenset[int] = frozenset()  # of a batch that becomes an error, which weighs nothing
    asked: Callable[[], int] | None = None  # what the loader says is in flight
    seen: Seen = field(default_factory=Seen)
    _calls: list[tuple[float, float, Collection[int]]] = field(default_factory=list)
    """Of next(): when it began and ended, and the samples that came of it."""
    _asks: float = 0.0
    _over: threading.Event = field(default_factory=threading.Event)
    _failed: BaseException | None = None  # what ended the asking too early

    def __post_init__(self) -> None:
        self._begin()
        self._thread = threading.Thread(target=self._watch, name="witness")

    def epoch(self) -> None:
        """A new one: nothing has begun."""
        self._add_up()
        self._begin()

    def _begin(self) -> None:
        self.file.write_bytes(bytes(_TIME.size * len(self.sizes)))
        self._calls = []

    def asks(self) -> None:
        self._asks = time.monotonic()

    def got(self, numbers: Collection[int]) -> None:
        """The consumer has these samples."""
        self._calls.append((self._asks, time.monotonic(), numbers))
        time.sleep(REST)

    def __enter__(self) -> Witness:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._add_up()
        if self._failed is not None:
            raise self._failed

    def _watch(self) -> None:
        try:
            while not self._over.wait(EVERY):
                if self.asked is not None:
                    self.seen.asked += 1
                    self.seen.said = max(self.seen.said, self.asked())
        except BaseException as error:
            self._failed = error  # a witness that fell asleep has seen nothing wrong: tell it

    def _add_up(self) -> None:
        """What was in flight in the epoch that is over, at each moment when it became more or less."""
        times = [when for (when,) in _TIME.iter_unpack(self.file.read_bytes())]
        begun = sorted((when, n) for n, when in enumerate(times) if when and n not in self.without)
        self.seen.begun += len(begun)
        # From the end of one call to the end of the next: the rest between them, and the call itself.
        ends = [(0.0, ()), *((end, numbers) for _, end, numbers in self._calls), (float("inf"), ())]
        starts = [*(start for start, _, _ in self._calls), float("inf")]
        out: set[int] = set()
        got: set[int] = set()
        for ((_, numbers), (end, _)), start in zip(pairwise(ends), starts, strict=True):
            got |= set(numbers)
            out -= got
            self._weigh(out, inside=False)
            while begun and begun[0][0] < end:
                when, number = begun.pop(0)
                if number not in got:  # one that is made again after it was delivered is no more
                    out.add(number)
                self._weigh(out, inside=when >= start)

    def _weigh(self, out: set[int], *, inside: bool) -> None:
        now = sum(self.sizes[number] for number in out)
        if inside:
            self.seen.most_inside = max(self.seen.most_inside, now)
        elif now > self.seen.most:
            self.seen.most, self.seen.at_most = now, frozenset(out)


def check_in_flight(seen: Seen, *, budget: int, batch: int) -> None:
    """Never above the budget; `batch`: the bytes of one."""
    assert seen.begun > 0, "I6: nothing has begun"
    allowed = max(budget, batch)  # one alone always passes
    assert seen.most <= allowed, (
        f"I6: {seen.most} bytes were in flight, {budget} are allowed: samples {sorted(seen.at_most)}"
    )
    assert seen.most_inside <= allowed + batch, (
        f"I6: {seen.most_inside} bytes were in flight during next(), {budget} are allowed"
    )
    assert seen.said <= allowed, f"I6: the loader says {seen.said} bytes were in flight"


def biting(batch: int, workers: int) -> int:
    """A budget for less than torch would prefetch: two batches, or one of a single worker."""
    return int(batch * (1.75 if workers == 1 else 2.75))
