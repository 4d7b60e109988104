"""What is measured when a setting is tried, and the rate that follows from it. Pure.

A machine that other programs use as well is the usual one, and there a rate by the clock says
little: workers wait for a processor, and with more workers they only get a larger part of it. The
kernel counts how long each thread was ready to run and did not. So a rate is computed without that
time, and it is never more than the available processors could do with the processor time that a
batch takes. On a machine that is otherwise idle that is the rate by the clock.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field
from typing import Final

MAIN_BUSY: Final = 0.85  # of the time, from which on the main process is what batches wait for
MOST_CORRECTED: Final = 10.0  # times the rate by the clock
NEARLY: Final = 1.10  # times a rate: so much more is not worth more workers
LOCKED: Final = 0.2
"""Of what a thread waits for Python's lock if it is always taken, from which on threads take turns.
On a busy machine it waits for a processor as well, which does not count."""


@dataclass(frozen=True)
class Setting:
    """What is tried."""

    workers: int
    method: str = "multiprocessing"
    start: str = "fork"  # how processes are started; empty without processes
    prefetch: int = 2
    step: float = 0.0  # seconds that the consumer spends on each batch

    @classmethod
    def main(cls, step: float = 0.0) -> Setting:
        """No workers: the main process loads."""
        return cls(0, start="", step=step)

    @classmethod
    def threads(cls, workers: int) -> Setting:
        return cls(workers, "thread", "")

    @property
    def kind(self) -> str:
        if not self.workers:
            return "main"
        return "threads" if self.method == "thread" else "processes"

    @property
    def words(self) -> str:
        if not self.workers:
            found = "no workers"
        else:
            one = "thread" if self.kind == "threads" else "process"
            many = "threads" if self.kind == "threads" else "processes"
            found = f"{self.workers} {one if self.workers == 1 else many}"
        if self.start not in ("", "fork"):
            found += f", {self.start}"
        if self.prefetch != 2:
            found += f", prefetch_factor={self.prefetch}"
        return found + (f", a step of {1000 * self.step:g} ms" if self.step else "")


@dataclass(frozen=True)
class Slice:
    """A part of the time in which a setting was tried. Seconds are summed over threads."""

    seconds: float  # by the clock
    batches: int
    cpu: float = 0.0  # processor time of workers and main process
    queued: float = 0.0  # in which workers were ready to run and had no processor
    main_cpu: float = 0.0  # of the main process's main thread
    main_queued: float = 0.0
    waited: float = 0.0  # by the consumer, for batches


@dataclass(frozen=True)
class Trouble:
    """Why a trial has no result."""

    kind: str  # "raised", "died", "hung", "memory"
    words: str
    details: str = ""


@dataclass(frozen=True)
class Trial:
    """A setting that was tried once."""

    setting: Setting
    slices: tuple[Slice, ...] = ()
    first_batch: float = 0.0  # seconds from the start of the loader
    worker_bytes: int = 0  # private memory of the largest worker; of all threads together
    shared_bytes: int = 0  # in which batches are handed over
    batch_bytes: int = 0  # of the largest
    budget_bytes: int | None = None
    disk: float = 0.0  # the part of the time in which workers waited for a disk
    read_bytes: float = 0.0  # from disks, per second
    lock: float = 0.0  # how often Python's lock was taken when another thread asked for it
    bad_samples: int = 0
    bad_sample: str = ""  # one of them
    trouble: Trouble | None = None


@dataclass(frozen=True)
class Estimate:
    """What all trials of a setting say together."""

    setting: Setting
    rate: float  # batches per second, without the time in which there was no processor
    error: float  # of the rate: a standard error, as a part of it
    clock_rate: float  # batches per second by the clock
    limit: float  # batches per second that the processors could do
    wanted: float  # processors that were used or waited for, on average
    cpu: float  # processors that were used
    busy: float  # the part of the workers' time in which they ran or had no processor
    asleep: float  # the part of the rest of the workers' time in which they did not run
    crowded: float  # the part of the workers' time in which they had no processor
    main_busy: float  # the part of the time in which the main process's main thread had work
    waiting: float  # the part of the time in which the consumer waited
    visits: int
    trials: Sequence[Trial] = field(repr=False, default=())

    @property
    def uses_all_processors(self) -> bool:
        """Whether this is nearly as much as the processors can do."""
        return self.rate * NEARLY >= self.limit

    @property
    def takes_turns(self) -> bool:
        """Whether its threads run one at a time, because Python's lock is taken."""
        return any(map(_takes_turns, self.trials))

    @property
    def disk(self) -> float:
        """The part of the workers' time in which they waited for a disk; without the time in which
        they had no processor."""
        seen = statistics.median(one.disk for one in self.trials)
        return min(1.0, seen / max(0.05, 1 - self.crowded))


def estimate(trials: Iterable[Trial], cores: float) -> Estimate | None:
    """Of trials of one setting; None if none of them has a result. `cores`: for each rank."""
    found = [one for one in trials if one.slices]
    if not found:
        return None
    setting = found[0].setting
    if any(map(_takes_turns, found)):
        cores = min(cores, 1.0)
    slices = [one for trial in found for one in trial.slices]
    whole = _sum(slices)
    rates = [_rate(_sum(trial.slices), setting, cores) for trial in found]
    limit = cores * whole.batches / whole.cpu if whole.cpu > 0 else math.inf
    computing, available = whole.cpu - whole.main_cpu, whole.seconds * max(1, setting.workers)
    if not setting.workers:
        computing = whole.main_cpu
    queued = whole.queued + whole.main_queued
    seconds = whole.seconds
    return Estimate(
        setting=setting,
        rate=min(limit, statistics.median(rates)),
        error=_error(slices, rates, setting, cores),
        clock_rate=whole.batches / seconds,
        limit=limit,
        wanted=(whole.cpu + queued) / seconds,
        cpu=whole.cpu / seconds,
        busy=(computing + _queued(whole, setting)) / available,
        asleep=1 - computing / max(1e-9, available - _queued(whole, setting)),
        crowded=min(1.0, _queued(whole, setting) / available),
        main_busy=(whole.main_cpu + whole.main_queued) / seconds,
        waiting=whole.waited / seconds,
        visits=len(found),
        trials=tuple(found),
    )


def _rate(one: Slice, setting: Setting, cores: float) -> float:
    """Batches per second, without the time in which there was no processor for them."""
    seconds = one.seconds
    if not setting.workers:
        lost = one.main_queued + one.queued
    else:
        lost = one.queued / setting.workers
        if (one.main_cpu + one.main_queued) / seconds >= MAIN_BUSY:
            lost = max(lost, one.main_queued)
    # The kernel adds the time of a wait when it ends: some of it may be from before.
    rate = one.batches / max(seconds - lost, seconds / MOST_CORRECTED)
    return min(rate, cores * one.batches / one.cpu) if one.cpu > 0 else rate


def _queued(one: Slice, setting: Setting) -> float:
    return one.queued if setting.workers else one.main_queued


def _takes_turns(trial: Trial) -> bool:
    return trial.setting.workers > 1 and trial.lock >= LOCKED


def _sum(slices: Sequence[Slice]) -> Slice:
    """Slices that follow each other, as one. A rate of many batches is better than the middle of
    rates of a few: at the end of a slice some batches are half done."""
    return Slice(*(sum(parts) for parts in zip(*map(astuple, slices), strict=True)))


def _error(
    slices: Sequence[Slice], rates: Sequence[float], setting: Setting, cores: float
) -> float:
    """How much the rate depends on single slices, and on when it was measured."""
    count = len(slices)
    if count < 3:
        return 0.25
    without = [
        _rate(_sum([*slices[:one], *slices[one + 1 :]]), setting, cores) for one in range(count)
    ]
    middle = statistics.fmean(without)
    spread = (count - 1) / count * sum((one - middle) ** 2 for one in without)
    found = math.sqrt(spread) / middle
    if len(rates) > 1:
        apart = statistics.stdev(rates) / statistics.fmean(rates) / len(rates) ** 0.5
        found = max(found, apart)
    return found
