"""What is done for a pool beside its batches: deaths, memory, stalls, remarks.

A driver tells here what the machine does not decide on. The rest comes with the clock: `run` is
called whenever something has happened or `interval` has passed. It looks for stalled workers,
controls memory and tells the machine that a deadline has passed.

Everything here runs under the pool's lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from holdfast.autopsy.machine_facts import in_words
from holdfast.engine import events as ev
from holdfast.engine.continuation import ResumptionResult
from holdfast.engine.deaths import Deaths, WhyReplaced, tell_resumed
from holdfast.engine.driver import Driver
from holdfast.engine.growth_monitor import LeakSearch
from holdfast.engine.loader_records import LoaderRecords
from holdfast.engine.machine import Machine
from holdfast.engine.memory_control import MemoryController
from holdfast.engine.progress_log import ProgressLog
from holdfast.engine.stall import StallDetector

log = logging.getLogger("holdfast")

IDLE_SECONDS = 5.0  # seconds without work after which a worker returns memory that it does not use


class Upkeep:
    """The upkeep of one pool."""

    def __init__(
        self,
        machine: Machine,
        driver: Driver,
        records: LoaderRecords,
        *,
        deaths: Deaths,
        memory: MemoryController,
        stall_timeout: float | None,
        progress: ProgressLog | None,
        resumes: bool,
    ) -> None:
        """`resumes`: the first workers continue the streams of an earlier run."""
        self._machine = machine
        self._driver = driver
        self._deaths = deaths
        self.memory = memory
        """A driver tells it the sizes of workers, and what a search for a leak has found."""
        self.stalls = StallDetector(machine.workers, stall_timeout, driver.clock())
        self._origin = records.origin
        self._stats = records.stats
        self._growth_warnings = records.growth_warnings
        self._logbook = records.logbook
        self._progress = progress
        self._replaced: dict[int, WhyReplaced] = {}  # why there is another worker in this seat
        self._grown: dict[int, int] = {}  # sizes of workers that said they are too large
        self._next_shrinking = 0.0
        self._resuming = set(range(machine.workers)) if resumes else set()
        self._resumed: list[tuple[int, ResumptionResult]] = []
        self._began = driver.clock()
        self._held_back = False  # batches had to wait for memory, and that was noted

    # -- by the clock ---------------------------------------------------------------------

    def interval(self) -> float:
        """Seconds until the next `run`, at most."""
        interval = self._longest_interval()
        deadline = self._machine.deadline()
        if deadline is not None:
            interval = min(interval, max(0.01, deadline - self._driver.clock()))
        return interval

    def _longest_interval(self) -> float:
        longest = min(self._driver.limits.check_interval, self.memory.interval())
        if self._progress is not None:
            longest = min(longest, self._progress.interval())
        return self.stalls.interval(longest)

    def run(self, tell: Callable[[ev.Event], None]) -> None:
        """Do what is due."""
        machine, stalls, now = self._machine, self.stalls, self._driver.clock()
        longest = self._longest_interval()
        stalls.awake(now, longest)
        self._driver.tick(now)
        if self._progress is not None:
            self._progress.run(now)
        self._control_memory(now)
        deadline = machine.deadline()
        if deadline is not None and now >= deadline:
            tell(ev.Ticked(now))
        if stalls.timeout is None or not stalls.due(now, longest):
            return
        for seat in machine.seats:
            if not seat.busy:
                continue
            patience = stalls.timeout * (1 << seat.stalls)  # longer after a stall at this batch
            if stalls.has_stalled(seat.id, self._driver.progress(seat.id), patience, now):
                tell(ev.WorkerStalled(seat.id, seat.generation, now))

    def _control_memory(self, now: float) -> None:
        machine, memory, driver = self._machine, self.memory, self._driver
        for at in self._deaths.deaths_of_memory():
            memory.died_of_memory(at)
        self._note_held_back()
        ready = [seat.id for seat in machine.seats if seat.ready] if machine.recycles else ()
        largest = memory.check_memory(now, ready, driver.size)
        if largest is not None:
            driver.urge(largest, "ask" if machine.iterable else "retire")
        if memory.tight(now):
            self._shrink(range(machine.workers))
        elif now >= self._next_shrinking:
            # A worker that is idle needs no memory for batches.
            self._next_shrinking = now + IDLE_SECONDS / 2
            self._shrink(
                seat.id
                for seat in machine.seats
                if not seat.busy and now - driver.progress(seat.id).active >= IDLE_SECONDS
            )

    def _shrink(self, workers: Iterable[int]) -> None:
        for worker in workers:
            self._driver.urge(worker, "shrink")

    def _note_held_back(self) -> None:
        share = self.memory.share
        limit, largest = share.budget.limit, self._machine.largest
        if self._held_back or limit is None or largest is None or not self._machine.held_back:
            return
        if share.alone or share.cap is not None:
            return  # that is for another reason, which is told
        self._held_back = True
        if self._logbook is not None:
            self._logbook.event(
                "held-back",
                f"batches have up to {in_words(largest)}: fewer are made ahead than "
                f"prefetch_factor asks for, so that no more than {in_words(limit)} are in flight",
                largest=largest,
                limit=limit,
            )

    # -- decisions of the machine ---------------------------------------------------------

    def reported(
        self, report: ev.Report, sample: Any, after: Callable[[Callable[[], None]], None]
    ) -> None:
        """A death was decided on. Its evidence is gathered when the replacement is ordered."""
        self._replaced[report.worker] = "died"
        if report.restart is not ev.Restart.NO:
            self._stats.restarts += 1
        self._driver.settle(report)
        after(partial(self._deaths.submit, report, sample))

    def forgotten(self, action: ev.Forget, after: Callable[[Callable[[], None]], None]) -> None:
        """A worker has exited as it was told to."""
        worker = action.worker
        if action.recycled:
            self._stats.recycled += 1
            self._replaced[worker] = "recycled"
            search = self.memory.retired(worker)
            if search is not None:  # when its successor is ordered, which comes first
                after(partial(self._find_leak, worker, search))
        elif action.renewed:
            self._replaced[worker] = "renewed"

    def _find_leak(self, worker: int, search: LeakSearch) -> None:
        if self._driver.find_leak(worker, search.batches, search.nbytes):
            self.memory.searched()

    def started(self, order: ev.Start) -> None:
        """A worker is about to be started."""
        self.memory.started(order.worker)

    def stays(self, action: ev.Stay) -> None:
        """A worker is too large and is not replaced."""
        self.memory.stays(action.worker, self._grown.get(action.worker, 0), action.because)

    # -- told by the driver ---------------------------------------------------------------

    def ready(self, worker: int) -> None:
        """A worker has started."""
        tries = self._machine.seats[worker].tries
        if tries and self._logbook is not None:
            times = "once" if tries == 1 else f"{tries} times"
            text = f"worker {worker} has started, after there had been no room for it {times}"
            self._logbook.event("started-late", text, worker=worker, tries=tries)

    def remark(self, worker: int, about: str, text: str) -> None:
        """Log what the user should know: once for all workers and epochs."""
        if self._growth_warnings.first(about):
            log.warning("%sworker %d: %s", self._origin.prefix, worker, text)
            if self._logbook is not None:
                self._logbook.event(about, text, worker=worker)

    def taken_up(self, worker: int, finding: ResumptionResult) -> None:
        """A worker has tried to continue the stream of its predecessor."""
        if worker in self._resuming:
            self._resuming.discard(worker)
            self._resumed.append((worker, finding))
            if not self._resuming:
                seconds = self._driver.clock() - self._began
                tell_resumed(self._resumed, seconds, self._origin)
            return
        pid = self._driver.handle(worker).pid
        self._deaths.taken_up(worker, pid, finding, self._replaced.get(worker, "died"))

    def grown(self, worker: int, size: int) -> None:
        """A worker of an iterable dataset is too large, with so many bytes of its own."""
        self._grown[worker] = size
