"""Processes beside the workers: they try something, say what they found, and exit.

A *rehearsal* tries to take up a stream, before the worker that is at it is let go. A worker of an
iterable dataset that has grown too large may only go if another process can continue its stream
exactly; once it is gone it is too late to find out. So a process from the same nursery tries it
first (see `continuation`), while the worker goes on. A stream that leaves something behind for each
sample does so when it is drawn again too: the process gives up when it is nearly as large as the
worker, since to replace that would free nothing. It is ended if it takes too long: the worker may
have to wait for it.

A *leak probe* finds out which lines leak, after a worker was replaced for that (`leak_probe`).

They are no workers: they have black boxes of their own, behind those of the workers, an arena of
their own that goes with them, and the kernel takes them first when memory runs out. Whatever ends
one is no incident; it has shown nothing then.

Like all that the driver does this runs under the pool's lock.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
from dataclasses import dataclass, replace
from typing import Any

from holdfast.autopsy.blackbox import Note
from holdfast.engine import leak_probe
from holdfast.engine import vocabulary as v
from holdfast.engine.channel import Channel, pair
from holdfast.engine.holdings import Holdings
from holdfast.engine.nurse import Died, NotBorn, Report
from holdfast.engine.protocol import FOUND, TAKEN_UP, Setup
from holdfast.engine.silence import BOOT_ALLOWANCE
from holdfast.memory import arena as arenas

__all__ = ["LONGEST", "PAYS", "Beside", "Tried", "outcome"]

LONGEST = 600.0  # seconds that one may take, with or without progress
PAYS = 0.75  # of the worker's size, at most, for a fresh process to be worth the change


@dataclass(slots=True)
class Tried:
    """One of them, and at its end what it has found."""

    setup: Setup  # the generation is that of the worker
    number: int  # of its own, as the nursery knows it: below 0, where no worker's generation is
    channel: Channel
    begun: float
    since: float  # its note has been so
    note: Note | None = None
    finding: Any = None  # None if it has not said any


class Beside:
    """Those of one pool: one rehearsal for each worker at a time, and one leak probe."""

    def __init__(self, holdings: Holdings, workers: int, stall_timeout: float | None) -> None:
        self._holdings = holdings
        self._workers = workers
        self._timeout = stall_timeout
        self._running: dict[int, Tried] = {}  # by region
        self._count = 0

    def owns(self, region: int) -> bool:
        """Whether it is one of ours that the nursery or a channel speaks of."""
        return region >= self._workers

    def begin(self, setup: Setup) -> bool:
        """False if there is no room to try, or if it is being tried already."""
        region = self._workers + setup.worker
        if setup.probe is not None:
            region = setup.regions - 1
        if region in self._running or self._holdings.nursery.closed:
            return False
        self._count += 1
        number, now = -self._count, time.monotonic()
        self._holdings.boxes.clear(region)
        try:
            channel = self._start(replace(setup, generation=number, held=(), region=region))
        except OSError:
            return False
        self._running[region] = Tried(setup, number, channel, now, now)
        self._holdings.add_beside(channel, region)
        return True

    def _start(self, setup: Setup) -> Channel:
        channel, theirs = pair()
        try:
            with theirs:
                arena = arenas.create("holdfast-beside")
                try:
                    self._holdings.nursery.start(
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
        """It has said something, or its channel has ended."""
        one = self._running.get(region)
        if one is None:
            return
        while (message := one.channel.poll()) is not None:
            if message[:1] in (TAKEN_UP, FOUND):
                one.finding = pickle.loads(message[1:])
        if not one.channel.open:
            self._forget(one.channel)

    def report(self, report: Report) -> Tried | None:
        """What the nursery says of one; itself, if that is its end."""
        one = self._running.get(report.worker)
        if one is None or report.generation != one.number:
            return None
        return self._over(report.worker) if isinstance(report, (Died, NotBorn)) else None

    def _over(self, region: int) -> Tried:
        self.hear(region)
        one = self._running.pop(region)
        self._forget(one.channel)
        return one

    def _forget(self, channel: Channel) -> None:
        if channel.fileno() >= 0:
            self._holdings.drop_beside(channel)

    def look(self, now: float) -> None:
        """End what makes no progress, or takes too long; its end is reported as any other."""
        for region, one in self._running.items():
            note = self._holdings.boxes.note(region)
            if note != one.note:
                one.note, one.since = note, now
            if self._is_stuck(one, now):
                self._kill(region, one)
                one.begun = one.since = now

    def _is_stuck(self, one: Tried, now: float) -> bool:
        if one.setup.probe is not None:  # it runs when nothing else does, so it may take its time
            return now - one.begun > 2 * leak_probe.LONGEST
        if now - one.begun > LONGEST:
            return True
        if self._timeout is None:
            return False
        booting = one.note is not None and one.note.step == "boot"
        return now - one.since > max(self._timeout, BOOT_ALLOWANCE if booting else 0.0)

    def _kill(self, region: int, one: Tried) -> None:
        self._holdings.nursery.signal(region, one.number, signal.SIGKILL)

    def lost(self) -> list[Tried]:
        """The nursery is dead, and all that it had forked."""
        return [self._over(region) for region in list(self._running)]

    def stop(self) -> None:
        """The pool is closed: what they find is not needed any more."""
        for region, one in self._running.items():
            if not self._holdings.nursery.closed:
                self._kill(region, one)
            self._forget(one.channel)
        self._running.clear()


def outcome(tried: Tried) -> v.Rehearsed:
    """What the machine is told of a rehearsal."""
    setup, finding = tried.setup, tried.finding
    worker, generation, bound = setup.worker, setup.generation, setup.rehearsal
    if finding is None:
        return v.Rehearsed(worker, generation, None)
    if finding.leaves:
        return v.Rehearsed(worker, generation, None, unfit=finding.unfit, finding=finding)
    exact = False if finding.lost or finding.unseen else finding.exact
    pays = not finding.too_large and (finding.private or 0) <= (bound or 0)
    return v.Rehearsed(worker, generation, exact, pays, finding=finding)
