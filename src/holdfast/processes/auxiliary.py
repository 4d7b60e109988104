"""Processes beside the workers: they try something, say what they found, and exit.

A *rehearsal* tries to continue a stream. A worker of an iterable dataset that has grown too large
may only exit if another process can continue its stream exactly, and after its exit it is too late
to find out. So a process from the same nursery tries it first (see `continuation`), while the
worker goes on. If the dataset keeps something of every sample, the process grows as the worker did:
it gives up when it is nearly as large, because a replacement would free nothing. A rehearsal that
takes too long is ended, because the worker may have to wait for it.

A *leak probe* finds out which lines leak, after a worker was replaced for that (`leak_probe`).

Each has its own black box, behind those of the workers, and its own arena. When memory runs out,
the kernel ends these processes first. The end of one is no incident; it has found nothing then.

Like everything that the driver does, this runs under the pool's lock.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
from dataclasses import dataclass, replace
from typing import Any

from holdfast.autopsy.blackbox import Note
from holdfast.engine import events as ev
from holdfast.engine.stall import BOOT_ALLOWANCE
from holdfast.processes.channel import Channel, pair
from holdfast.processes.nursery_reports import Died, ForkFailed, Report
from holdfast.processes.protocol import FOUND, TAKEN_UP, Setup
from holdfast.processes.resources import ProcessResources
from holdfast.transport.mapping import create
from holdfast.worker import leak_probe

LONGEST = 600.0  # seconds that one may take, with or without progress
PAYS = 0.75  # of the worker's size, at most, for a fresh process to be worth the change


@dataclass(slots=True)
class AuxiliaryResult:
    """One such process, and at its end what it has found."""

    setup: Setup  # the generation is that of the worker
    number: int  # its generation for the nursery: below 0, unlike that of any worker
    channel: Channel
    begun: float
    since: float  # its note has not changed since
    note: Note | None = None
    finding: Any = None  # None if it has found nothing


class AuxiliaryProcesses:
    """For one pool: one rehearsal for each worker at a time, and one leak probe."""

    def __init__(
        self, resources: ProcessResources, workers: int, stall_timeout: float | None
    ) -> None:
        self._resources = resources
        self._workers = workers
        self._timeout = stall_timeout
        self._running: dict[int, AuxiliaryResult] = {}  # by region
        self._count = 0

    def owns(self, region: int) -> bool:
        """Whether this number, in a report or of a channel, is of such a process."""
        return region >= self._workers

    def begin(self, setup: Setup) -> bool:
        """Start one. False if there is no room for it, or if it is being tried already."""
        region = self._workers + setup.worker
        if setup.probe is not None:
            region = setup.regions - 1
        if region in self._running or self._resources.nursery.closed:
            return False
        self._count += 1
        number, now = -self._count, time.monotonic()
        self._resources.boxes.clear(region)
        try:
            channel = self._start(replace(setup, generation=number, held=(), region=region))
        except OSError:
            return False
        self._running[region] = AuxiliaryResult(setup, number, channel, now, now)
        self._resources.add_auxiliary(channel, region)
        return True

    def _start(self, setup: Setup) -> Channel:
        channel, theirs = pair()
        try:
            with theirs:
                arena = create("holdfast-beside")
                try:
                    self._resources.nursery.start(
                        setup.region,
                        setup.generation,
                        pickle.dumps(setup, 5),
                        theirs.fileno(),
                        arena,
                        known_as=setup.worker,
                    )
                finally:
                    os.close(arena)
        except OSError:
            channel.close()
            raise
        return channel

    def hear(self, region: int) -> None:
        """Its channel is ready, or has ended."""
        one = self._running.get(region)
        if one is None:
            return
        while (message := one.channel.poll()) is not None:
            if message[:1] in (TAKEN_UP, FOUND):
                one.finding = pickle.loads(message[1:])
        if not one.channel.open:
            self._forget(one.channel)

    def report(self, report: Report) -> AuxiliaryResult | None:
        """Handle a report of the nursery. Returns the process, if that is its end."""
        one = self._running.get(report.worker)
        if one is None or report.generation != one.number:
            return None
        return self._over(report.worker) if isinstance(report, (Died, ForkFailed)) else None

    def _over(self, region: int) -> AuxiliaryResult:
        self.hear(region)
        one = self._running.pop(region)
        self._forget(one.channel)
        return one

    def _forget(self, channel: Channel) -> None:
        if channel.fileno() >= 0:
            self._resources.drop_auxiliary(channel)

    def end_stalled(self, now: float) -> None:
        """End those without progress, and those that take too long. Their end is reported."""
        for region, one in self._running.items():
            note = self._resources.boxes.note(region)
            if note != one.note:
                one.note, one.since = note, now
            if self._is_stuck(one, now):
                self._kill(region, one)
                one.begun = one.since = now

    def _is_stuck(self, one: AuxiliaryResult, now: float) -> bool:
        if one.setup.probe is not None:  # it runs only when the processor is idle
            return now - one.begun > 2 * leak_probe.LONGEST
        if now - one.begun > LONGEST:
            return True
        if self._timeout is None:
            return False
        booting = one.note is not None and one.note.step == "boot"
        return now - one.since > max(self._timeout, BOOT_ALLOWANCE if booting else 0.0)

    def _kill(self, region: int, one: AuxiliaryResult) -> None:
        self._resources.nursery.signal(region, one.number, signal.SIGKILL)

    def lost(self) -> list[AuxiliaryResult]:
        """The nursery is dead, and so are all of these."""
        return [self._over(region) for region in list(self._running)]

    def stop(self) -> None:
        """The pool is closed: end them all."""
        for region, one in self._running.items():
            if not self._resources.nursery.closed:
                self._kill(region, one)
            self._forget(one.channel)
        self._running.clear()


def outcome(tried: AuxiliaryResult) -> ev.Rehearsed:
    """What the machine is told of a rehearsal."""
    setup, finding = tried.setup, tried.finding
    worker, generation, bound = setup.worker, setup.generation, setup.rehearsal
    if finding is None:
        return ev.Rehearsed(worker, generation, None)
    if finding.leaves:
        return ev.Rehearsed(worker, generation, None, unfit=finding.unfit, finding=finding)
    exact = False if finding.lost or finding.unseen else finding.exact
    pays = not finding.too_large and (finding.private or 0) <= (bound or 0)
    return ev.Rehearsed(worker, generation, exact, pays, finding=finding)
