"""Tells a logbook, every few seconds, how far a pool has come and where the time went.

There is one for each pool with a logbook. All figures are counted from the beginning of the pool,
so a record that is lost costs a point of a curve and nothing else. The records of a pool have its
`series` in common; the last one is written when it is closed. An iterator without workers has a
`SerialProgressLog`: all that it knows is how long loading took.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any, Final

from holdfast.autopsy.blackbox import STEPS
from holdfast.autopsy.logbook import Logbook
from holdfast.autopsy.readers import procfs
from holdfast.autopsy.tally import Named, Tally
from holdfast.engine import events as ev
from holdfast.engine.driver import Driver
from holdfast.engine.epoch import NO_BATCH, Reported
from holdfast.engine.machine import Machine
from holdfast.limits.budget import Budget

AT_FIRST: Final = 1.0  # seconds between two records in the first minute, so that short runs have a
LATER: Final = 5.0  # curve; and after it
MINUTE: Final = 60.0
DETAILED: Final = 10  # records from one with distributions to the next


class _Counts:
    """What all records have."""

    def __init__(self, logbook: Logbook, approximate: bool, now: float) -> None:
        self._logbook = logbook
        self._approximate = approximate  # unless workers report how many elements they took
        self._batches = self._samples = self._bytes = 0
        self._series = time.time()
        self._began = self._last = now

    def interval(self) -> float:
        """Seconds between two records now."""
        return AT_FIRST if self._last - self._began < MINUTE else LATER

    def _figures(self, now: float, ended: bool) -> dict[str, Any]:
        self._last = now
        size = procfs.size("self")
        return {
            "series": self._series,
            "elapsed": now - self._began,
            "batches": self._batches,
            "samples": self._samples,
            "approximate": self._approximate,
            "bytes": self._bytes,
            "trainer_bytes": None if size is None else size.resident,
            "ended": ended,
        }


class ProgressLog(_Counts):
    """The progress of one pool. Everything is called under the pool's lock."""

    def __init__(
        self,
        logbook: Logbook,
        machine: Machine,
        driver: Driver,
        budget: Budget,
        name_of: Callable[[Any], str | None],
    ) -> None:
        """`name_of` gives the user's name for an index. It is called when a record is written,
        without the lock."""
        super().__init__(logbook, machine.iterable, driver.clock())
        self._machine = machine
        self._driver = driver
        self._budget = budget
        self._name_of = functools.lru_cache(64)(name_of)
        self.waited = 0.0  # seconds in which the consumer waited for a batch,
        self.waits_since: float | None = None  # without those of a wait that goes on
        self._records = 0

    def delivered(self, delivery: ev.Delivery) -> None:
        """The consumer gets this."""
        result, samples = delivery.result, len(delivery.task.keys)
        if isinstance(result, Reported):
            if result.samples is not None:
                samples = result.samples
            samples -= sum(bad.action == "skipped" for bad in result.bad)
            result = result.result
        if type(result) not in NO_BATCH:
            self._batches += 1
            self._samples += samples
            self._bytes += result.nbytes

    def run(self, now: float) -> None:
        """Make a record, if it is time to."""
        if now - self._last >= self.interval():
            self._note(now, ended=False)

    def end(self) -> None:
        """The workers are gone: make the last record."""
        self._note(self._driver.clock(), ended=True)

    def _note(self, now: float, ended: bool) -> None:
        driver = self._driver
        waits = 0.0 if self.waits_since is None else now - self.waits_since
        tally = driver.tally()
        steps = zip(STEPS, tally.seconds, strict=True)
        figures = self._figures(now, ended) | {
            "wait_seconds": self.waited + waits,
            "seats": self._machine.workers,
            "in_flight": self._machine.in_flight,
            "budget": self._budget.limit,
            "shared_bytes": driver.shared_bytes(),
            "held_bytes": driver.kept.nbytes,
            "workers": {} if ended else driver.own_bytes(),
            "seconds": {step: round(seconds, 4) for step, seconds in steps if seconds},
        }
        if ended or self._records % DETAILED == 0:
            self._logbook.progress(functools.partial(self._detailed, figures, tally))
        else:
            self._logbook.progress(lambda: figures)
        self._records += 1

    def _detailed(self, figures: dict[str, Any], tally: Tally) -> dict[str, Any]:
        """Called without the lock: it may ask code of the user for names."""
        return figures | {
            "times": _sparse(tally.times.tolist()),
            "sizes": _sparse(tally.sizes.tolist()),
            "slowest": [self._named(one) for one in tally.slowest],
            "largest": [self._named(one) for one in tally.largest],
        }

    def _named(self, sample: Named) -> list[Any]:
        value, key = sample
        number = key.removeprefix("-").isdecimal()
        return [round(value, 7), key, self._name_of(int(key)) if number else None]


class SerialProgressLog(_Counts):
    """The progress of one iterator without workers. Everything is called in the consumer's thread,
    which writes the records itself, between two batches."""

    def __init__(self, logbook: Logbook, approximate: bool) -> None:
        super().__init__(logbook, approximate, time.monotonic())
        self._loading = 0.0
        self._ended = False
        self._pid = os.getpid()

    def delivered(self, seconds: float, samples: int) -> None:
        """The consumer gets a batch; loading it took so long."""
        self._batches += 1
        self._samples += samples
        self._loading += seconds
        now = time.monotonic()
        if now - self._last >= self.interval():
            self._note(now)

    def end(self) -> None:
        """No more batches come. A forked child of the trainer says nothing."""
        if not self._ended and self._pid == os.getpid():
            self._ended = True
            self._note(time.monotonic())

    def _note(self, now: float) -> None:
        figures = self._figures(now, self._ended) | {
            "wait_seconds": self._loading,
            "seats": 0,
            "workers": {},
            "seconds": {},
        }
        self._logbook.progress(lambda: figures)
        self._logbook.flush()


def _sparse(counts: list[int]) -> dict[str, int]:
    return {str(bucket): count for bucket, count in enumerate(counts) if count}
