"""From a death to an incident: what is written down, examined, told and counted.

It comes in three parts, because neither the replacement nor the consumer need wait for the autopsy.
First what is left of the worker is read (`read`), before a successor writes over it; the machine
decides on that, and its decision is carried out. Then what changes from moment to moment is read
(`file`). These two are under the pool's lock. Last the death is examined, which may take a tenth of
a second, and told (`settle`): to the loader's incidents, the logbook and the log, by the watch's
clerk, or by whoever wants to read it before that has come to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.autopsy.blackbox import BlackBoxes, Size
from holdfast.autopsy.catalogue import CATALOGUE
from holdfast.autopsy.cause import Remedy
from holdfast.autopsy.coroner import Body, Coroner
from holdfast.autopsy.evidence import signal_name
from holdfast.autopsy.incident import Incident, describe_end
from holdfast.autopsy.stack import tidy
from holdfast.engine import vocabulary as v
from holdfast.engine.continuation import TRUST, Finding, Recovery
from holdfast.engine.holdings import Gone
from holdfast.engine.transforms import in_transform
from holdfast.memory import gauge
from holdfast.origin import Origin
from holdfast.samples.record import name_of
from holdfast.samples.substitute import position_of

__all__ = ["Obituaries", "Remains", "accusation", "remedies"]

log = logging.getLogger("holdfast")

_NOBODYS = Origin()

IDLE = "not replaced, because it had nothing left to do"
NEARLY_ALL = 0.85  # of the memory that is left once it is gone, and a worker had used it up
REMEMBERED = 100  # incidents a pool keeps for the story it may have to tell
WAITING = 1000  # of one worker whose stream is being taken up, at most: as a loader keeps them
BEING_TAKEN_UP = "; its stream is being taken up"
PATIENCE = 2.0  # seconds to wait for somebody else's examination: the logbook's disk may be gone


@dataclass(frozen=True, slots=True)
class Remains:
    """What was read of a worker for the autopsy alone, before it was replaced."""

    pid: int | None
    time: float  # of day
    stderr: str | None  # the end of what it wrote there
    size: Size | None  # as it noted it itself


def accusation(exit: v.Exit) -> tuple[str, str, str]:
    """For a bad sample of which a worker died: its kind, its error and its message."""
    if exit.kind in ("stalled", "unkillable"):
        return "stalled", "stalled", "made no progress"
    error = exit.signal or f"exit code {exit.exitcode}"
    return "killed", error, describe_end(exit.signal, exit.exitcode)


_BEGUN = {
    v.Restart.NOW: "replaced",
    v.Restart.ANEW: "replaced by one forked anew",
    v.Restart.LATER: "started again after a pause",
}


def done(report: v.Report) -> str:
    """What was decided about a death, in words. Only what is known now."""
    outcome, restart = report.outcome, report.restart
    if outcome is v.Outcome.GAVE_UP:
        return "gave up"
    if outcome is v.Outcome.SAMPLE_GIVEN_UP:
        given_up = "the sample is given up"
        return given_up if restart is v.Restart.NO else f"replaced; {given_up}"
    if outcome is v.Outcome.TRIED_AGAIN:
        return "tried again, after longer and longer pauses"
    if outcome is v.Outcome.LEFT_OUT:
        return "replaced; the sample is left out, because it did so alone too"
    if outcome is v.Outcome.ON_TRIAL:
        return "replaced; the sample is tried alone"
    if outcome is v.Outcome.NOTHING_LEFT:
        return IDLE
    if outcome is v.Outcome.STREAM:
        return f"{_BEGUN[restart]}{BEING_TAKEN_UP}"
    again = "; its batch is made again" if outcome is v.Outcome.BATCH_AGAIN else ""
    return f"{_BEGUN[restart]}{again}"


def _sent_by(boxes: BlackBoxes, worker: int) -> str | None:
    """The signal that a worker has sent to itself, by name."""
    number = boxes.confessed(worker)
    return signal_name(number) if number else None


@contextlib.contextmanager
def _not_worth_the_run(origin: Origin) -> Iterator[None]:
    """The worker is replaced already: if we cannot find out or write down why it died, say so."""
    try:
        yield
    except Exception:
        log.exception("%sthe examination of a death failed; the run goes on", origin.prefix)


@dataclass(frozen=True, slots=True)
class _TakenUp:
    """What another process has found when it took a worker's place in its stream."""

    worker: int
    pid: int | None
    finding: Finding
    at: float
    gone: Gone


_CAUSE = "stream-not-repeatable"


_AGAIN = Remedy(
    "Have what was delivered drawn again and compared where the state does not lead there",
    'DataLoader(..., iterable_recovery="auto")   # or "replay", to use no state at all',
)


def remedies(recovery: Recovery) -> tuple[Remedy, ...]:
    """For a stream that was not continued as it was, without what the user has set already."""
    found = CATALOGUE[_CAUSE].remedies
    kept = tuple(one for one in found if f'iterable_recovery="{recovery}"' not in one.command)
    return (_AGAIN, *kept) if recovery == "state" else kept


def _told(finding: Finding) -> str:
    """What it has shown, and no more, in words for an incident."""
    words = finding.in_words()
    if finding.lost:
        return f"not continued: {words}"
    if finding.exact is False:
        return f"samples may be missing or come twice: {words}"
    return words


class Obituaries:
    """Those of one pool."""

    def __init__(
        self,
        recovery: Recovery,
        boxes: BlackBoxes,
        coroner: Coroner,
        dataset: Any,
        on_incident: Callable[[Incident], None],
        origin: Origin = _NOBODYS,
        explained: set[Hashable] | None = None,
        on_amended: Callable[[Incident, Incident, str], None] = lambda old, new, text: None,
    ) -> None:
        """`explained`: the kinds of death that this loader has explained so far; kept by it, and
        added to here. `on_amended` is told when more is known of an incident: what it was, what it
        is, and that in words."""
        self._published: deque[tuple[v.Exit | None, Incident]] = deque(maxlen=REMEMBERED)
        self._waiting: dict[int, deque[tuple[v.Exit, Incident]]] = {}  # for what that shows
        self.recovery = recovery
        """How streams are to be continued."""
        self._boxes = boxes
        self._coroner = coroner
        self._dataset = dataset
        self._on_incident = on_incident
        self._on_amended = on_amended
        self.origin = origin
        self._explained = set() if explained is None else explained
        self._filed: deque[tuple[v.Exit, Incident, Body | None] | _TakenUp] = deque()
        # One examination at a time. Whoever has the pool's lock may take this one; we never do it
        # the other way round. A log handler of the user's may, or ask for incidents in the middle
        # of it: hence the patience, and a lock that its owner may take again.
        self._examining = threading.RLock()
        self._remedies = remedies(recovery)  # of a stream
        self._of_memory: deque[float] = deque()  # when somebody died of it

    def all(self) -> list[Incident]:
        """The last ones, oldest first."""
        self.settle()
        return [incident for _, incident in list(self._published)]  # which others append to

    def of(self, deaths: Sequence[v.Exit]) -> list[Incident]:
        """Those of these very deaths, as far as they are remembered."""
        self.settle()
        wanted = {id(death) for death in deaths}
        return [incident for death, incident in list(self._published) if id(death) in wanted]

    def read(
        self, worker: int, pid: int | None, exit: v.Exit, reaped: float | None = None
    ) -> tuple[v.Exit, Remains]:
        """Read what the worker has left, before another takes its place: the exit with all that the
        machine decides on, and the rest. `reaped` is when its end was seen."""
        note = self._boxes.note(worker)
        stack = tidy(self._boxes.take_dump(worker))
        step = note.step
        if step in ("fetch", "collate") and note.task is None:
            step = "replay"  # batches without a number are those that were delivered before
        by_itself = exit.signal is not None and _sent_by(self._boxes, worker) == exit.signal
        exit = dataclasses.replace(
            exit,
            by_itself=by_itself,
            inherited=exit.kind == "stalled"
            and self._coroner.stalled_on_inherited_lock(worker, stack),
            task=note.task,
            position=note.position,
            step=step,
            seconds=None if reaped is None else max(0.0, reaped - note.since),
            stack=stack,
        )
        if exit.from_outside and step == "fetch" and self._was_short(worker, exit.grown):
            exit = dataclasses.replace(exit, memory=True)
        remains = Remains(pid, time.time(), self._boxes.words(worker), self._boxes.size(worker))
        return exit, remains

    def _was_short(self, worker: int, grown: int | None) -> bool:
        """Whether memory may be why it was killed: the kernel has counted it, or while this worker
        was there nearly nothing was left."""
        if self._coroner.killed_for_memory(worker):
            return True
        left = gauge.read().free  # now that it is gone
        return grown is not None and left is not None and grown >= NEARLY_ALL * left

    def file(self, report: v.Report, sample: Any) -> None:
        """Keep for examination what will not be the same in a moment; `sample` is what the sampler
        calls the one that was being loaded."""
        exit, remains, task = report.exit, report.remains, report.task
        step, batch = exit.step, exit.task
        if step == "send" and (task is None or exit.task != task.number):
            step, batch = "idle", None  # its answer has come; it had not begun the next
        incident = Incident(
            kind=exit.kind,
            worker_id=report.worker,
            pid=remains.pid,
            signal=exit.signal,
            exitcode=exit.exitcode,
            batch=batch if task is None else task.number,
            sample=sample,
            position=position_of(exit.position) if report.loading else None,
            step=step,
            stack=exit.stack,
            action=done(report),
            time=remains.time,
            loader=self.origin.loader,
            rank=self.origin.rank,
        )
        body: Body | None = None
        with _not_worth_the_run(self.origin):
            body = self._coroner.receive(
                incident.worker_id,
                kind=incident.kind,
                signal=incident.signal,
                exitcode=incident.exitcode,
                stack=incident.stack,
                errno=exit.errno,
                step=incident.step,
                batch=incident.batch,
                sample=incident.sample,
                ready=report.ready,
                sent_by_itself=exit.by_itself,
                stderr=remains.stderr,
                nursery_end=exit.nursery[0],
                nursery_error=exit.nursery[1],
                size=remains.size,
            )
        self._filed.append((exit, incident, body))

    def taken_up(self, worker: int, pid: int | None, finding: Finding, gone: Gone) -> None:
        """Another process has tried to go on with the stream of the one before it, which is `gone`
        for that reason."""
        self._filed.append(_TakenUp(worker, pid, finding, time.time(), gone))

    @property
    def pending(self) -> bool:
        """Whether somebody waits to be examined."""
        return bool(self._filed)

    def settle(self) -> None:
        """Find the causes of what is filed, and tell everybody who has to know. When it returns,
        all that was filed before has been told, unless somebody else is at it and does not come to
        an end."""
        if not self._examining.acquire(timeout=PATIENCE):
            return
        try:
            while self._filed:
                filed = self._filed.popleft()
                if isinstance(filed, _TakenUp):
                    self._amend(filed)
                else:
                    self._publish(*filed)
        finally:
            self._examining.release()

    def deaths_of_memory(self) -> list[float]:
        """When somebody died of it, since we were last asked."""
        return [self._of_memory.popleft() for _ in range(len(self._of_memory))]

    def _publish(self, exit: v.Exit, incident: Incident, body: Body | None) -> None:
        with _not_worth_the_run(self.origin):
            if body is not None:
                incident = self._examined(incident, body)
        with _not_worth_the_run(self.origin):
            self._on_incident(incident)
        self._published.append((exit, incident))
        if incident.action.endswith(BEING_TAKEN_UP):
            waiting = self._waiting.setdefault(incident.worker_id, deque(maxlen=WAITING))
            waiting.append((exit, incident))
        if incident.cause == "oom-killed":
            self._of_memory.append(exit.at)
        # Why, and what to do, once for deaths that are alike: what happens again is a line.
        kind = incident.kind_of_death()
        known = kind in self._explained
        self._explained.add(kind)
        log.warning("%s", incident if known else incident.report())

    def _amend(self, taken: _TakenUp) -> None:
        """Say of the deaths before it what it has shown."""
        finding = taken.finding
        waiting = self._waiting.pop(taken.worker, None)
        if waiting is None:
            if finding.exact is False:  # else it was replaced while it lived, and all is well
                self._replaced_alive(taken)
            return
        numbers = {id(death): number for number, (death, _) in enumerate(self._published)}
        for death, old in waiting:
            action = old.action.removesuffix(BEING_TAKEN_UP) + "; " + _told(finding)
            to_do = old.remedies
            if finding.exact is False and finding.error is None:
                to_do = (*self._remedies, *to_do)
            new = dataclasses.replace(old, action=action, exact=finding.exact, remedies=to_do)
            if id(death) in numbers:
                self._published[numbers[id(death)]] = (death, new)
            with _not_worth_the_run(self.origin):
                self._on_amended(old, new, f"{old.who()}: {_told(finding)}")
        _, last = waiting[-1]
        self._say(f"{self.origin.prefix}{last.who()}", finding)

    def _replaced_alive(self, taken: _TakenUp) -> None:
        """Nothing was wrong with it, and its stream is not as it was. One that was too large had
        been tried before, and this time it was otherwise."""
        incident = Incident(
            kind="renewed" if taken.gone == "renewed" else "recycled",
            worker_id=taken.worker,
            pid=taken.pid,
            signal=None,
            exitcode=None,
            batch=None,
            sample=None,
            position=None,
            step="idle",
            stack="",
            action=f"replaced; {_told(taken.finding)}",
            time=taken.at,
            cause=_CAUSE,
            confidence="high",
            because=(taken.finding.in_words(),),
            remedies=self._remedies,
            loader=self.origin.loader,
            rank=self.origin.rank,
            exact=False,
        )
        with _not_worth_the_run(self.origin):
            self._on_incident(incident)
        self._published.append((None, incident))
        self._say(f"{self.origin.prefix}{incident.who()}", taken.finding)

    def _say(self, who: str, finding: Finding) -> None:
        if finding.exact is not False:
            log.warning("%s: its stream goes on; %s", who, _told(finding))
            return
        lines = [f"{who}: its stream goes on, and not as it was: {_told(finding)}"]
        if finding.way == TRUST:  # it may even raise, with what was loaded
            lines = [f"{who}: whether its stream can go on is not known: {_told(finding)}"]
        if finding.lost:
            lines = [f"{who}: its stream cannot go on: {finding.in_words()}"]
        if finding.error is None and _CAUSE not in self._explained:
            self._explained.add(_CAUSE)
            for remedy in self._remedies:
                lines.append(f"    to do: {remedy.text}")
                lines += [f"        {line}" for line in remedy.command.splitlines()]
            lines.append(f"    more: holdfast explain {_CAUSE}")
        log.warning("%s", "\n".join(lines))

    def _examined(self, incident: Incident, body: Body) -> Incident:
        """The incident, with its cause."""
        found = self._coroner.examine(body)
        sample, dataset, evidence = incident.sample, self._dataset, found.evidence
        if incident.step == "fetch" and in_transform(dataset, evidence.stack):
            incident = dataclasses.replace(incident, step="transform")
            evidence = dataclasses.replace(evidence, step="transform")
        return dataclasses.replace(
            incident,
            stack=evidence.stack,
            cause=found.verdict.cause,
            confidence=found.verdict.confidence,
            because=found.verdict.because,
            evidence=evidence.to_json(),
            remedies=found.verdict.remedies,
            sample_name=None if sample is None else name_of(dataset, sample),
        )
