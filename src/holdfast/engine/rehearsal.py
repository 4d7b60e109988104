"""Trying to take up a stream, before the worker that is at it is let go.

A worker of an iterable dataset that has grown too large may only go if another process can continue
its stream exactly; once it is gone it is too late to find out. So a process from the same nursery
tries it first (see `continuation`), says what it found and exits, while the worker goes on.

It is no worker: it has a black box of its own, behind those of the workers, an arena of its own
that goes with it, and the kernel takes it first when memory runs out. Whatever ends it is no
incident; it has shown nothing then, and the worker stays. A stream that leaves something behind for
each sample does so when it is drawn again too: the process gives up when it is nearly as large as
the worker, since to replace that would free nothing.

Like all that the driver does it runs under the pool's lock.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
from dataclasses import dataclass, replace

from holdfast.autopsy.blackbox import Note
from holdfast.engine import vocabulary as v
from holdfast.engine.channel import Channel, pair
from holdfast.engine.continuation import Finding
from holdfast.engine.holdings import Holdings
from holdfast.engine.nurse import Died, NotBorn, Report
from holdfast.engine.protocol import TAKEN_UP, Setup
from holdfast.engine.silence import BOOT_ALLOWANCE
from holdfast.memory import arena as arenas

__all__ = ["PAYS", "Rehearsals"]

PAYS = 0.75  # of the worker's size, at most, for a fresh process to be worth the change


@dataclass(slots=True)
class _Rehearsal:
    worker: int
    generation: int  # of the worker
    number: int  # of its own, as the nursery knows it: below 0, where no worker's generation is
    bound: int  # bytes; a larger process would not be worth the change
    channel: Channel
    finding: Finding | None = None
    note: Note | None = None
    since: float = 0.0  # it has been so


class Rehearsals:
    """Those of one pool: one for each worker at a time."""

    def __init__(self, holdings: Holdings, workers: int, stall_timeout: float | None) -> None:
        self._holdings = holdings
        self._workers = workers
        self._timeout = stall_timeout
        self._running: dict[int, _Rehearsal] = {}  # by region
        self._count = 0

    def owns(self, region: int) -> bool:
        """Whether it is one of ours that the nursery or a channel speaks of."""
        return region >= self._workers

    def begin(self, setup: Setup, size: int) -> bool:
        """For a worker that has `size` bytes of its own; False if there is no room to try."""
        region = self._workers + setup.worker
        if region in self._running or self._holdings.nursery.closed:
            return False
        self._count += 1
        generation = setup.generation
        bound = int(PAYS * size)
        setup = replace(
            setup, generation=-self._count, held=(), region=region, rehearsal=bound, trace=0
        )
        self._holdings.boxes.clear(region)
        try:
            channel = self._start(setup)
        except OSError:
            return False
        self._running[region] = _Rehearsal(
            setup.worker, generation, -self._count, bound, channel, since=time.monotonic()
        )
        self._holdings.add_rehearsal(channel, region)
        return True

    def _start(self, setup: Setup) -> Channel:
        channel, theirs = pair()
        try:
            with theirs:
                arena = arenas.create("holdfast-rehearsal")
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
            if message[:1] == TAKEN_UP:
                one.finding = pickle.loads(message[1:])
        if not one.channel.open:
            self._forget(one.channel)

    def report(self, report: Report) -> v.Rehearsed | None:
        """What the nursery says of one: at its end, what came of it."""
        one = self._running.get(report.worker)
        if one is None or report.generation != one.number:
            return None
        if not isinstance(report, (Died, NotBorn)):
            return None
        return self._over(report.worker)

    def _over(self, region: int) -> v.Rehearsed:
        self.hear(region)
        one = self._running.pop(region)
        self._forget(one.channel)
        return _outcome(one)

    def _forget(self, channel: Channel) -> None:
        if channel.fileno() >= 0:
            self._holdings.drop_rehearsal(channel)

    def look(self, now: float) -> None:
        """End what makes no progress; its end is reported as any other."""
        if self._timeout is None:
            return
        for region, one in self._running.items():
            note = self._holdings.boxes.note(region)
            if note != one.note:
                one.note, one.since = note, now
            patience = max(self._timeout, BOOT_ALLOWANCE if note.step == "boot" else 0.0)
            if now - one.since > patience:
                self._kill(region, one)
                one.since = now

    def _kill(self, region: int, one: _Rehearsal) -> None:
        self._holdings.nursery.signal(region, one.number, signal.SIGKILL)

    def lost(self) -> list[v.Rehearsed]:
        """The nursery is dead, and all that it had forked."""
        return [self._over(region) for region in list(self._running)]

    def stop(self) -> None:
        """The pool is closed: nobody waits for what they find."""
        for region, one in self._running.items():
            if not self._holdings.nursery.closed:
                self._kill(region, one)
            self._forget(one.channel)
        self._running.clear()


def _outcome(one: _Rehearsal) -> v.Rehearsed:
    """What the machine is told of it."""
    worker, generation, finding = one.worker, one.generation, one.finding
    if finding is None:
        return v.Rehearsed(worker, generation, None)
    if finding.leaves:
        return v.Rehearsed(worker, generation, None, unfit=finding.unfit, finding=finding)
    exact = False if finding.lost or finding.unseen else finding.exact
    pays = not finding.too_large and (finding.private or 0) <= one.bound
    return v.Rehearsed(worker, generation, exact, pays, finding=finding)
