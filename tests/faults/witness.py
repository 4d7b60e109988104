"""I6: bytes in flight, counted without asking the loader.

A sample is in flight from the moment when a worker begins to make it until the consumer has the
batch it is in. The dataset notes the first in a file, the player notes the second; the difference,
in bytes the dataset knows, is looked at all the time by a thread, while the row runs. A batch that
is redone or replayed after a death is the same samples, and counts once.

While the consumer is inside ``next()`` a batch may just have been handed over and not noted yet, so
there one batch more is allowed. Between two calls nothing is: the player rests there for a moment.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

REST = 0.002  # seconds between two calls of next()
EVERY = 0.0002  # seconds between two looks


_files: dict[str, int] = {}


def be_ready(file: str | None) -> None:
    """In a worker: keep the file open, since some rows leave no descriptor free."""
    if file is not None and file not in _files:
        _files[file] = os.open(file, os.O_WRONLY | os.O_CLOEXEC)


def begins(file: str | None, number: int) -> None:
    """In a worker: this sample is being made from now on."""
    be_ready(file)
    if file is not None:
        os.pwrite(_files[file], b"\1", number)


@dataclass
class Seen:
    """The most there was at one time, and how often it was looked."""

    most: int = 0
    most_inside: int = 0  # while the consumer was inside next(), or just came or went
    at_most: frozenset[int] = frozenset()  # which samples that was
    looks: int = 0
    said: int = 0  # the most that the loader itself said was in flight


@dataclass
class Witness:
    """In the trainer: who has what."""

    file: Path
    sizes: Sequence[int]  # bytes of each sample
    without: frozenset[int] = frozenset()  # of a batch that becomes an error, which weighs nothing
    asked: Callable[[], int] | None = None  # what the loader says is in flight
    seen: Seen = field(default_factory=Seen)
    _got: set[int] = field(default_factory=set)
    _turn: int = 0  # even between two calls of next()
    _epoch: int = 0  # odd while one takes over from another
    _over: threading.Event = field(default_factory=threading.Event)
    _failed: BaseException | None = None  # what ended the looking too early
    # What the last look was at, and what there was: mostly nothing has changed since.
    _last: tuple[int, int, bytes] | None = None
    _out: frozenset[int] = frozenset()
    _now: int = 0

    def __post_init__(self) -> None:
        self.epoch()
        self._thread = threading.Thread(target=self._watch, name="witness")

    def epoch(self) -> None:
        """A new one: nothing has begun."""
        self._epoch += 1
        self.file.write_bytes(bytes(len(self.sizes)))
        self._got = set()
        self._epoch += 1

    def asks(self) -> None:
        self._turn += 1

    def got(self, numbers: Collection[int]) -> None:
        """The consumer has these samples."""
        self._got.update(numbers)
        self._turn += 1
        time.sleep(REST)

    def __enter__(self) -> Witness:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._failed is not None:
            raise self._failed

    def _watch(self) -> None:
        try:
            with open(self.file, "rb", buffering=0) as file:
                while not self._over.wait(EVERY):
                    self._look(file.fileno())
        except BaseException as error:
            self._failed = error  # a witness that fell asleep has seen nothing wrong: tell it

    def _look(self, file: int) -> None:
        turn, epoch = self._turn, self._epoch
        begun = os.pread(file, len(self.sizes), 0)
        looked_at = (epoch, len(self._got), begun)
        if looked_at != self._last:
            out = frozenset(number for number, one in enumerate(begun) if one)
            out -= self._got | self.without
            if epoch % 2 or epoch != self._epoch:
                return  # what has begun and who has it were of different epochs
            self._out, self._now = out, sum(self.sizes[number] for number in out)
            self._last = looked_at
        out, now = self._out, self._now
        seen = self.seen
        seen.looks += 1
        if turn % 2 or turn != self._turn:
            seen.most_inside = max(seen.most_inside, now)
        elif now > seen.most:
            seen.most, seen.at_most = now, out
        if self.asked is not None:
            seen.said = max(seen.said, self.asked())


def check_in_flight(seen: Seen, *, budget: int, batch: int) -> None:
    """Never above the budget; `batch`: the bytes of one."""
    assert seen.looks > 0, "I6: nobody looked"
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
