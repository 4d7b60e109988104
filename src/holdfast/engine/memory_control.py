"""Controls the memory of a pool, from the main process.

The controller reads how much memory is free, and `Pressure` turns that into a level. From the level
follow the bytes that may be in flight (`Share.cap`), whether workers are to return memory that they
do not use (`tight`), and whether one of them is replaced (`recycling`). After a worker has died for
lack of memory, the budget is halved and one batch at a time is made for a while.

It also tells the user about memory: workers that grow (`growth_monitor`), workers that were
replaced for their size, or were not although they are too large, and which lines leak.

It sends nothing to workers. `Upkeep` carries out what it decides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from holdfast.autopsy.logbook import Logbook
from holdfast.autopsy.machine_facts import in_words
from holdfast.autopsy.readers import HERE, Roots
from holdfast.engine.continuation import TO_DO, ResumptionResult
from holdfast.engine.events import Rehearsed
from holdfast.engine.growth_monitor import GrowthMonitor, LeakSearch
from holdfast.engine.recycling import Recycler
from holdfast.limits import gauge
from holdfast.limits.budget import Share
from holdfast.limits.growth import GrowthWarnings, Point, describe_growth
from holdfast.limits.pressure import AFTER_A_DEATH, CAPS, TIGHT, Level, Pace, Pressure
from holdfast.limits.worker_limit import Allowance, allowance
from holdfast.loader_identity import LoaderIdentity

if TYPE_CHECKING:
    from holdfast.worker import leak_tracer

log = logging.getLogger("holdfast")

RECOVERY_SECONDS = 300.0  # without a death for lack of memory, until the budget is doubled again
IDLE_INTERVAL = 5.0  # seconds between two checks if nothing is limited
_NAMES_OF_PARTS = {4: "quarter", 16: "sixteenth"}
_NO_IDENTITY = LoaderIdentity()
_LARGE_AT_START = {
    True: "what worker_init_fn or iter(dataset) loads in each worker",
    False: "the dataset itself, copied into each worker by spawn or forkserver",
}
"""The usual reason for a large worker, if it was forked and otherwise."""


@dataclass
class _Warned:
    """Warnings that are given once in a process."""

    oom_group: bool = False
    raised: bool = False
    leak: bool = False


_warned = _Warned()


class MemoryController:
    """One for each pool."""

    def __init__(
        self,
        share: Share,
        limit: int | str | None,
        workers: int,
        roots: Roots = HERE,
        logbook: Logbook | None = None,
        growth_warnings: GrowthWarnings | None = None,
        origin: LoaderIdentity = _NO_IDENTITY,
        start_method: str = "fork",
        largest_batch: int | None = None,
    ) -> None:
        self.share = share
        self.roots = roots
        self.ranks = gauge.ranks()
        self.reading = reading = gauge.read(roots)
        self.pressure = Pressure(oom_group=reading.oom_group)
        share.budget.adapt(reading.free, self.ranks, workers)
        self.allowance: Allowance = allowance(
            limit,
            free=reading.free,
            confined=reading.confined,
            workers=workers,
            ranks=self.ranks,
            batch=largest_batch or 0,
        )
        self._workers = workers
        self._prefix = origin.prefix  # of log messages
        self._forked = start_method == "fork"
        self._logbook = logbook
        self._growth = GrowthMonitor(growth_warnings)
        self._pace = Pace()
        self._recycler = Recycler(self._pace, self.pressure.thresholds[-1])
        self._may_recycle = limit is not None
        self._active = limit is not None or share.budget.total is not None or share.budget.auto
        self._next_check = 0.0
        self._interval = self.pressure.interval(reading.fill, free=reading.free)
        self._shrunk_at = 0.0  # the budget
        self._tight_level = Level.CALM  # at the last call of `tight`
        self._tight_again_at = 0.0
        if reading.oom_group and not _warned.oom_group:
            _warned.oom_group = True
            log.warning(
                "memory.oom.group is set here (as Kubernetes does): if memory runs out the kernel "
                "kills the trainer together with its workers, and nothing can be saved. holdfast "
                "therefore keeps further away from the limit of %s. To let workers be killed "
                "alone: singleProcessOOMKill in the kubelet's configuration (Kubernetes 1.32).",
                in_words(reading.limit or 0),
            )

    # -- decisions ------------------------------------------------------------------------

    def interval(self) -> float:
        """The longest time between two checks, in seconds."""
        return self._interval if self._active else IDLE_INTERVAL

    def check_memory(
        self, now: float, workers: Iterable[int], size_of: Callable[[int], int | None]
    ) -> int | None:
        """Read the free memory and adjust the share of this pool. Returns the worker to replace, if
        any. `workers` can be told to exit; `size_of` measures the private bytes of one."""
        if not self._active or now < self._next_check:
            return None
        self.reading = reading = gauge.read(self.roots)
        seconds_left = self._pace.observe(reading.free, now)
        self._interval = self.pressure.interval(reading.fill, seconds_left, reading.free)
        self._next_check = now + self._interval
        before, level = self.pressure.level, self.pressure.observe(reading.fill, now)
        self._log_pressure(before, level)
        budget = self.share.budget
        if budget.shrunk and now - self._shrunk_at > RECOVERY_SECONDS:
            self._shrunk_at = now
            budget.recover()
        if level is Level.CALM:
            budget.adapt(reading.free, self.ranks)
        self.share.cap = self.pressure.cap(self._free_for_this_rank())
        self.share.alone = self.pressure.careful(now)
        if not self._may_recycle:
            return None
        largest = self._recycler.choose(reading, level, workers, size_of, now)
        request = None if largest is None else self._recycler.request(largest)
        if request is not None:
            log.info(
                "%smemory is %.0f %% full; worker %d has %s of its own and is replaced by a fresh "
                "one",
                self._prefix, 100 * request.fill, largest, in_words(request.nbytes),
            )  # fmt: skip
        return largest

    def tight(self, now: float) -> bool:
        """Whether workers are to return memory they do not use. To be called after each check."""
        before, self._tight_level = self._tight_level, self.pressure.level
        if self._tight_level is Level.CALM:
            return False
        if self._tight_level <= before and now < self._tight_again_at:
            return False
        self._tight_again_at = now + TIGHT[self._tight_level]
        return True

    def died_of_memory(self, now: float) -> None:
        """A worker died for lack of memory: use less from now on."""
        self.pressure.worker_died(now)
        self.share.alone = True
        self.share.budget.shrink()
        self._shrunk_at = self._next_check = now
        limit = self.share.budget.limit
        budget = "" if limit is None else f", then no more than {in_words(limit)} in flight"
        self._log_event(
            "smaller",
            "a worker died for lack of memory: one batch at a time for "
            f"{AFTER_A_DEATH:.0f} s{budget}",
        )

    def _free_for_this_rank(self) -> int | None:
        return None if self.reading.free is None else self.reading.free // self.ranks

    # -- workers that are replaced --------------------------------------------------------

    def retired(self, worker: int) -> LeakSearch | None:
        """A worker has exited because of its size. Returns how to search for its leak, if it has
        one and none was found yet."""
        self._log_recycling(worker)
        room = self._free_for_this_rank()
        return None if _warned.leak or room is None else self._growth.leak_search(worker, room)

    def started(self, worker: int) -> None:
        """A fresh process is about to take the place of this worker."""
        self._growth.started(worker)
        self._recycler.started(worker)

    def stays(self, worker: int, size: int, outcome: Rehearsed | None = None) -> None:
        """A worker that is too large is not replaced: its stream would change, or a successor would
        be as large. Without an outcome: workers of this pool are never replaced."""
        self._recycler.stays(worker)
        finding: ResumptionResult | None = None if outcome is None else outcome.finding
        if outcome is None:
            reason, why = "never", "streams are not to be continued by another process"
            advice = 'With iterable_recovery="auto" that is tried first'
        elif outcome.exact is False and finding is not None:
            sure = "it cannot be shown that its stream would go on as it was"
            if not finding.unseen or finding.different:
                sure = "its stream would not go on as it was"
            reason, why = "not exact", f"{sure}: {finding.in_words()}"
            advice = f"Workers of this loader are not replaced for their size. {TO_DO}"
        elif not outcome.pays:
            reason = "as large"
            why = (
                "a fresh process that draws again what was delivered would be as large, because "
                "the dataset keeps something of every sample"
            )
            advice = (
                "To end that: holdfast leaks YOUR.MODULE:DATASET names the lines; or give the "
                "dataset state_dict() and load_state_dict(), so that nothing has to be drawn again"
            )
        else:
            return  # nothing was shown, and it will be tried again
        told = self._growth.warnings.why_kept
        if reason in told or (outcome is None and told):
            return
        told.add(reason)
        text = (
            f"worker {worker} has {in_words(size)} of its own, more than it should, and is not "
            f"replaced: {why}. {advice}"
        )
        log.warning("%s%s", self._prefix, text)
        self._log_event("not-recycled", text, worker=worker, private=size)

    # -- growth and leaks -----------------------------------------------------------------

    def measured(self, worker: int, point: Point) -> None:
        """A worker has reported its sizes. Warns if it grows and that matters: once, and again only
        if it has become much worse."""
        growth = self._growth.add(worker, point)
        if growth is None:
            return
        line = describe_growth(
            growth,
            worker,
            workers=self._workers,
            free=self.reading.free,
            bounded=self.allowance.private is not None,
        )
        if line is not None:
            self._growth.warnings.told(growth)
            log.warning("%s%s", self._prefix, line)
            self._log_event("growth", line, worker=worker, kind=growth.kind)

    def searched(self) -> None:
        """A leak probe was started."""
        self._growth.probe_started()

    def found(
        self, worker: int, findings: leak_tracer.Findings | leak_tracer.TracingFailed
    ) -> None:
        """A leak probe has finished."""
        from holdfast.worker import leak_tracer  # here: only worker processes are probed

        if isinstance(findings, leak_tracer.TracingFailed):
            self._growth.probe_failed()
            log.warning(
                "%swhat piles up in workers cannot be said: worker %d was traced, and looking at "
                "its memory failed. The worker and its batches are as they were. This is a defect "
                "of holdfast: please report it. To find the leak, try: holdfast leaks "
                "YOUR.MODULE:DATASET\n%s",
                self._prefix, worker, findings.error,
            )  # fmt: skip
            return
        if _warned.leak or not findings.any:
            return
        _warned.leak = True
        text = (
            f"what piles up in workers (worker {worker} was traced, because the one before it had "
            f"grown too large): {leak_tracer.describe_findings(findings)}. Workers are replaced "
            "when they have grown too large, so the run goes on; to end it, let go there of what "
            "each sample leaves behind. Outside of a run: holdfast leaks YOUR.MODULE:DATASET"
        )
        log.warning("%s%s", self._prefix, text)
        if self._logbook is not None:
            self._logbook.memory({"worker": worker, "text": text, "leak": asdict(findings)})

    def raised(self, worker: int, private: int, limit: int) -> None:
        """A worker was over its limit before its first batch, so its limit was raised."""
        if _warned.raised:
            return
        _warned.raised = True
        log.warning(
            "%sworker %d has %s of its own before its first batch, more than worker_memory_limit "
            "allows; a fresh one would have as much, so it may grow to %s. Most often that is %s.",
            self._prefix, worker, in_words(private), in_words(limit), _LARGE_AT_START[self._forked],
        )  # fmt: skip

    # -- the logbook ----------------------------------------------------------------------

    def _log_pressure(self, before: Level, level: Level) -> None:
        full = f"memory is {100 * self.reading.fill:.0f} % full"
        if level > before:
            part = _NAMES_OF_PARTS[CAPS[level]]
            less = f"no more than a {part} of what is free may be in flight"
            too = ", and the largest worker is replaced" if level is Level.RECYCLE else ""
            self._log_event("pressure", f"{full}: {less}{too}", level=level.name)
        elif level < before and level is Level.CALM:
            self._log_event("calm", f"{full}: as much as the budget allows may be in flight again")

    def _log_recycling(self, worker: int) -> None:
        private, limit = self._growth.private(worker), self.allowance.private
        request, why = self._recycler.request(worker), ", and a sample needed more"
        if request is not None:
            private, why = request.nbytes, f" while memory was {100 * request.fill:.0f} % full"
        elif limit is not None and (private or 0) >= limit:
            why = f", more than its limit of {in_words(limit)}"
        size = "an unknown amount" if private is None else in_words(private)
        text = f"worker {worker} had {size} of memory of its own{why}; replaced"
        self._log_event("recycled", text, worker=worker, private=private)

    def _log_event(self, event: str, text: str, **figures: object) -> None:
        if self._logbook is not None:
            self._logbook.event(event, text, **figures)
