"""Who minds the memory of a pool, from the main process.

It reads what is left, lets `Pressure` say how bad that is, and draws the consequences: a narrower
share of the budget, and a worker to be replaced. Everything it decides with is pure; it only reads.

When a worker was replaced because it leaks, it says that the lines are to be found, once in a run,
and how much a process may take for that (`leak_probe`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import NamedTuple

from holdfast.autopsy.logbook import Logbook
from holdfast.autopsy.machine import in_words
from holdfast.autopsy.readers import HERE, Roots
from holdfast.engine.continuation import TO_DO, Finding
from holdfast.engine.vocabulary import Rehearsed
from holdfast.memory import gauge, leaks
from holdfast.memory.budget import Share
from holdfast.memory.growth import Point, Said, classify, in_a_line
from holdfast.memory.ladder import Allowance, allowance
from holdfast.memory.pressure import AFTER_A_DEATH, CAPS, TIGHT, Level, Pace, Pressure
from holdfast.memory.shares import BASE
from holdfast.origin import Origin

__all__ = ["TRACED", "Search", "Warden"]

log = logging.getLogger("holdfast")

_NOBODYS = Origin()
GAP = 0.2  # seconds between two replacements: what one frees has to show first
SELDOM = 100  # times as long as it took to find nobody worth it, until workers are measured again
HURRY = 0.5  # seconds it takes to replace one: it finishes its batch, goes, and its memory with it
AGAIN = 1.0  # seconds until the same worker is replaced again, twice as many each time
WORTH_IT = 32 << 20  # bytes a worker must have of its own to be replaced for them,
AT_LEAST = 2 * BASE  # or these, if not even as much is left or it goes fast
REMEMBERED = 64  # measurements of a worker; even, so that thinning spares the last
TRACED = 8  # batches between two looks of a leak probe, at most
PILE = 8 << 20  # bytes that are left between two looks, and are enough to be seen
LOOKS = 7  # so often it could make that many before it is as large as the worker was, or may be
PART = 4  # of what is free, the part that it may take
ATTEMPTS = 3  # leak probes, if they do not live long enough or see nothing
_PARTS = {4: "quarter", 16: "sixteenth"}
RECOVER_AFTER = 300.0  # seconds without a death by memory until more is allowed again


@dataclass
class _Told:
    oom_group: bool = False
    raised: bool = False
    leak: bool = False


_told = _Told()  # once for each process
_AT_START = {
    True: "what worker_init_fn or iter(dataset) loads in each worker",
    False: "the dataset itself, copied into each worker by spawn or forkserver",
}


class Search(NamedTuple):
    """How to look for a leak."""

    batches: int  # between two looks
    nbytes: int  # that the process may grow by


@dataclass
class _Asked:
    """A worker that was told to go."""

    at: float
    nbytes: int  # it had of its own
    why: str
    lowest: int  # bytes that were free since then, at the least


class Warden:
    """One for each pool."""

    def __init__(
        self,
        share: Share,
        limit: int | str | None,
        workers: int,
        roots: Roots = HERE,
        logbook: Logbook | None = None,
        said: Said | None = None,
        origin: Origin = _NOBODYS,
        start_method: str = "fork",
        largest_batch: int | None = None,
    ) -> None:
        self.share = share
        self._whose = origin.prefix
        self._forked = start_method == "fork"
        self._logbook = logbook
        self.roots = roots
        self.ranks = gauge.ranks()
        reading = gauge.read(roots)
        self.reading = reading
        self.pressure = Pressure(oom_group=reading.oom_group)
        self._minds = limit is not None or share.budget.total is not None or share.budget.auto
        self._next_look = 0.0
        self._pause = self.pressure.interval(reading.fill, free=reading.free)
        self._next_recycling = 0.0
        self._next_search = 0.0  # for somebody who is worth it, also in a hurry
        self._spared: dict[int, tuple[float, float]] = {}  # workers: until when, for how long
        self._shrunk_at = 0.0
        self._tightness = Level.CALM  # when workers were last told to give back what they can,
        self._tight_at = 0.0  # and when they are told again
        self._pace = Pace()
        self._asked: dict[int, _Asked] = {}  # workers that are to go, until their successors come
        self._gone: dict[int, _Asked] = {}  # those who went since the last look
        share.budget.adapt(reading.free, self.ranks, workers)
        self.allowance: Allowance = allowance(
            limit,
            free=reading.free,
            confined=reading.confined,
            workers=workers,
            ranks=self.ranks,
            batch=largest_batch or 0,
        )
        self._may_recycle = limit is not None
        self._workers = workers
        self._points: dict[int, list[Point]] = {}
        self._said = Said() if said is None else said  # of growth, by this loader
        self._attempts = 0  # to find a leak
        if reading.oom_group and not _told.oom_group:
            _told.oom_group = True
            log.warning(
                "memory.oom.group is set here (as Kubernetes does): if memory runs out the kernel "
                "kills the trainer together with its workers, and nothing can be saved. holdfast "
                "therefore keeps further away from the limit of %s. To let workers be killed "
                "alone: singleProcessOOMKill in the kubelet's configuration (Kubernetes 1.32).",
                in_words(reading.limit or 0),
            )

    def interval(self) -> float:
        """The longest time between two looks."""
        return self._pause if self._minds else 5.0

    def look(self, now: float, pids: Mapping[int, int]) -> int | None:
        """Note how much is left and narrow or widen our share; which worker to replace, if any.
        `pids` are those of workers that can be told to go."""
        if not self._minds or now < self._next_look:
            return None
        reading = gauge.read(self.roots)
        left = self._pace.observe(reading.free, now)
        self._pause = self.pressure.interval(reading.fill, left, reading.free)
        self.reading, self._next_look = reading, now + self._pause
        budget = self.share.budget
        if budget.shrunk and now - self._shrunk_at > RECOVER_AFTER:
            self._shrunk_at = now
            budget.recover()
        before_that = self.pressure.level
        level = self.pressure.observe(reading.fill, now)
        self._note_pressure(before_that, level)
        if level is Level.CALM:
            budget.adapt(reading.free, self.ranks)
        free = None if reading.free is None else reading.free // self.ranks
        self.share.cap = self.pressure.cap(free)
        self.share.alone = self.pressure.careful(now)
        if not self._may_recycle:
            return None
        self._see_what_helped(reading.free or 0)
        if level is Level.CALM:
            self._spared.clear()
        full = reading.fill >= self.pressure.thresholds[-1]
        hurry = level > Level.CALM and self._in_a_hurry(now)
        if now < self._next_search or not (hurry or (full and now >= self._next_recycling)):
            return None
        pids = {worker: pid for worker, pid in pids.items() if not self._spares(worker, now)}
        began = time.monotonic()
        fattest = self._fattest(pids, hurry, now)
        if fattest is not None:
            # A worker that needs what it has grows again at once, and if it is the trainer that
            # needs the memory fresh workers do not help: each of them ever less often.
            _, pause = self._spared.get(fattest, (0.0, AGAIN / 2))
            pause = min(2 * pause, 300.0)
            self._spared[fattest] = now + pause, pause
            self._next_recycling = now + GAP
        elif pids:
            self._next_search = now + max(GAP, SELDOM * (time.monotonic() - began))
        return fattest

    def _see_what_helped(self, free: int) -> None:
        """Whoever has brought about as much as it had may be replaced again as soon as it is
        needed. More or less than that is somebody else's doing: a trainer's, at each step."""
        if self._gone:
            had = sum(one.nbytes for one in self._gone.values())
            if had / 2 <= free - min(one.lowest for one in self._gone.values()) <= 2 * had:
                for worker in self._gone:
                    self._spared.pop(worker, None)
            self._gone.clear()
        for asked in self._asked.values():
            asked.lowest = min(asked.lowest, free)

    def tight(self, now: float) -> bool:
        """Whether workers are to give back what they do not use; asked at every look."""
        before, self._tightness = self._tightness, self.pressure.level
        if self._tightness is Level.CALM:
            return False
        if self._tightness <= before and now < self._tight_at:
            return False
        self._tight_at = now + TIGHT[self._tightness]
        return True

    def _in_a_hurry(self, now: float) -> bool:
        """Whether memory ends before a worker could be replaced that is told to go only when there
        is next to nothing left. What those have who are going already is as good as free."""
        coming = sum(one.nbytes for one in self._asked.values() if now - one.at <= HURRY)
        left = self._pace.seconds_for((self.reading.free or 0) + coming)
        return left is not None and left < HURRY and self._pace.steady

    def _spares(self, worker: int, now: float) -> bool:
        return now < self._spared.get(worker, (0.0, 0.0))[0]

    def _fattest(self, pids: Mapping[int, int], hurry: bool, now: float) -> int | None:
        sizes = {worker: gauge.private(pid, self.roots) or 0 for worker, pid in pids.items()}
        fattest = max(sizes, key=lambda worker: sizes[worker], default=None)
        enough = min(WORTH_IT, max(AT_LEAST, 0 if hurry else self.reading.free or 0))
        if fattest is None or sizes[fattest] < enough:
            return None
        log.info(
            "%smemory is %.0f %% full; worker %d has %s of its own and is replaced by a fresh one",
            self._whose, 100 * self.reading.fill, fattest, in_words(sizes[fattest]),
        )  # fmt: skip
        full = f" while memory was {100 * self.reading.fill:.0f} % full"
        self._asked[fattest] = _Asked(now, sizes[fattest], full, self.reading.free or 0)
        return fattest

    def _note_pressure(self, before: Level, level: Level) -> None:
        full = f"memory is {100 * self.reading.fill:.0f} % full"
        if level > before:
            less = f"no more than a {_PARTS[CAPS[level]]} of what is free may be in flight"
            too = ", and the largest worker is replaced" if level is Level.RECYCLE else ""
            self._write("pressure", f"{full}: {less}{too}", level=level.name)
        elif level < before and level is Level.CALM:
            self._write("calm", f"{full}: as much as the budget allows may be in flight again")

    def _write(self, event: str, text: str, **figures: object) -> None:
        if self._logbook is not None:
            self._logbook.event(event, text, **figures)

    def retired(self, worker: int) -> Search | None:
        """A worker has gone because of its size; if it was a leak, how it is to be looked for."""
        points = self._points.get(worker, [])
        self._note_recycling(worker, points[-1].private if points else None)
        growth = classify(points)
        if growth is None or growth.kind not in ("python-leak", "native-leak"):
            return None
        if _told.leak or self._attempts >= ATTEMPTS or self.reading.free is None:
            return None
        room = self.reading.free // self.ranks // PART
        fit = int(room / growth.per_batch) // LOOKS
        seen, lived = math.ceil(PILE / growth.per_batch), points[-1].batches // LOOKS
        return Search(max(1, min(TRACED, seen, lived, fit)), room) if fit else None

    def _note_recycling(self, worker: int, private: int | None) -> None:
        limit = self.allowance.private
        asked, why = self._asked.get(worker), ""
        if asked is not None:
            private, why = asked.nbytes, asked.why
        elif limit is not None and (private or 0) >= limit:
            why = f", more than its limit of {in_words(limit)}"
        size = "an unknown amount" if private is None else in_words(private)
        text = (
            f"worker {worker} had {size} of memory of its own{why or ', and a sample needed more'}"
        )
        self._write("recycled", f"{text}; replaced", worker=worker, private=private)

    def stays(self, worker: int, size: int, outcome: Rehearsed | None = None) -> None:
        """A worker is too large and is not replaced: its stream would suffer, or nothing is won;
        or, without an outcome, nobody is."""
        self._asked.pop(worker, None)
        finding: Finding | None = None if outcome is None else outcome.finding
        if outcome is None:
            reason, why = "nobody is", "streams are not to be continued by another process"
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
            return  # nothing was shown; it is tried again
        if reason in self._said.kept or (outcome is None and self._said.kept):
            return
        self._said.kept.add(reason)
        text = (
            f"worker {worker} has {in_words(size)} of its own, more than it should, and is not "
            f"replaced: {why}. {advice}"
        )
        log.warning("%s%s", self._whose, text)
        self._write("not-recycled", text, worker=worker, private=size)

    def started(self, worker: int) -> None:
        """A fresh process is to take this worker's place."""
        self._points.pop(worker, None)
        asked = self._asked.pop(worker, None)
        if asked is not None:
            self._gone[worker] = asked

    def searched(self) -> None:
        """A leak is being looked for."""
        self._attempts += 1

    def found(self, worker: int, findings: leaks.Findings | leaks.Failed) -> None:
        """What a leak probe has to say."""
        if isinstance(findings, leaks.Failed):
            self._attempts = ATTEMPTS  # the next one would fail as this one did
            log.warning(
                "%swhat piles up in workers cannot be said: worker %d was traced, and looking at "
                "its memory failed. The worker and its batches are as they were. This is a defect "
                "of holdfast: please report it. To find the leak, try: holdfast leaks "
                "YOUR.MODULE:DATASET\n%s",
                self._whose, worker, findings.error,
            )  # fmt: skip
            return
        if _told.leak or not findings.any:
            return
        _told.leak = True
        text = (
            f"what piles up in workers (worker {worker} was traced, because the one before it had "
            f"grown too large): {leaks.in_a_line(findings)}. Workers are replaced when they have "
            "grown too large, so the run goes on; to end it, let go there of what each sample "
            "leaves behind. Outside of a run: holdfast leaks YOUR.MODULE:DATASET"
        )
        log.warning("%s%s", self._whose, text)
        if self._logbook is not None:
            self._logbook.memory({"worker": worker, "text": text, "leak": asdict(findings)})

    def measured(self, worker: int, point: Point) -> None:
        """A worker has said how large it is; if it grows and that matters, say so: once, and
        again only if it has become much worse."""
        points = self._points.setdefault(worker, [])
        points.append(point)
        if len(points) > REMEMBERED:
            del points[1::2]  # the first and the last stay
        growth = classify(points)
        if growth is None or not self._said.is_news(growth):
            return
        line = in_a_line(
            growth,
            worker,
            workers=self._workers,
            free=self.reading.free,
            bounded=self.allowance.private is not None,
        )
        if line is not None:
            self._said.note(growth)
            log.warning("%s%s", self._whose, line)
            self._write("growth", line, worker=worker, kind=growth.kind)

    def died_of_memory(self, now: float) -> None:
        """Come back smaller."""
        self.pressure.somebody_died(now)
        self.share.alone = True
        self.share.budget.shrink()
        self._shrunk_at = now
        self._next_look = now
        limit = self.share.budget.limit
        budget = "" if limit is None else f", then no more than {in_words(limit)} in flight"
        self._write(
            "smaller",
            "a worker died for lack of memory: one batch at a time for "
            f"{AFTER_A_DEATH:.0f} s{budget}",
        )

    def raised(self, worker: int, private: int, limit: int) -> None:
        """A worker was over its limit before its first batch."""
        if _told.raised:
            return
        _told.raised = True
        log.warning(
            "%sworker %d has %s of its own before its first batch, more than worker_memory_limit "
            "allows; a fresh one would have as much, so it may grow to %s. Most often that is %s.",
            self._whose, worker, in_words(private), in_words(limit), _AT_START[self._forked],
        )  # fmt: skip
