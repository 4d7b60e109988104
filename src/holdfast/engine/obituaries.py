"""From a death to an incident: what is written down, examined, told and counted.

It comes in three parts, because neither the replacement nor the consumer need wait for the autopsy.
First what is left of the worker is read (`open`), before a successor writes over it; the machine
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

from holdfast.autopsy import thread_notes
from holdfast.autopsy.blackbox import BlackBoxes, Size
from holdfast.autopsy.catalogue import CATALOGUE
from holdfast.autopsy.cause import Remedy
from holdfast.autopsy.coroner import Body, Coroner
from holdfast.autopsy.evidence import signal_name
from holdfast.autopsy.incident import Incident, describe_end
from holdfast.autopsy.stack import tidy
from holdfast.engine import vocabulary as v
from holdfast.engine.continuation import Finding, Recovery
from holdfast.engine.holdings import Gone
from holdfast.engine.machine import Machine
from holdfast.engine.nursery import SHORTAGES
from holdfast.engine.transforms import in_transform
from holdfast.memory import gauge
from holdfast.origin import Origin
from holdfast.samples.record import name_of
from holdfast.samples.substitute import position_of, sample_of

__all__ = ["Ending", "Obituaries", "Obituary", "remedies", "starts"]

log = logging.getLogger("holdfast")

_NOBODYS = Origin()

IDLE = "not replaced, because it had nothing left to do"
NEARLY_ALL = 0.85  # of the memory that is left once it is gone, and a worker had used it up
REMEMBERED = 100  # incidents a pool keeps for the story it may have to tell
WAITING = 1000  # of one worker whose stream is being taken up, at most: as a loader keeps them
BEING_TAKEN_UP = "; its stream is being taken up"
PATIENCE = 2.0  # seconds to wait for somebody else's examination: the logbook's disk may be gone


@dataclass(frozen=True, slots=True)
class Ending:
    """How a worker ended: what a sample is accused of."""

    cause: str
    signal: str | None
    exitcode: int | None
    stack: str = ""
    errno: int | None = None  # of a start that failed
    outside: bool = False  # somebody may have killed it who had nothing against it
    nursery: tuple[str, str] = ("", "")  # with which it went: how that ended, and its traceback
    at: float | None = None  # monotonic, if somebody was there to see it
    grown: int | None = None  # bytes it had at most, beyond those it was born with

    def in_words(self) -> tuple[str, str, str]:
        """For a bad sample: its kind, its error and its message."""
        if self.cause in ("stalled", "unkillable"):
            return "stalled", "stalled", "made no progress"
        error = self.signal or f"exit code {self.exitcode}"
        return "killed", error, describe_end(self.signal, self.exitcode)


@dataclass(frozen=True, slots=True)
class Obituary:
    """What was read of a worker before it was replaced."""

    incident: Incident  # without its cause, and without what was done
    death: v.Death
    head: v.Task | None  # what it had to answer next
    ready: bool
    errno: int | None
    by_itself: bool  # it has sent itself the signal it died of
    stderr: str | None  # the end of what it wrote there
    size: Size | None  # as it noted it itself

    def done(self, machine: Machine, actions: Sequence[v.Action]) -> str:
        """What the machine does about it, in words. Only what is known now."""
        worker = self.incident.worker_id
        replaced = starts(actions, worker)
        if machine.failure is not None:
            return "gave up"
        if self.gives_up_sample:
            return "replaced; the sample is given up" if replaced else "the sample is given up"
        if self.death.shortage:
            return "tried again, after longer and longer pauses"
        if any(isinstance(one, v.Convict) for one in actions):
            return "replaced; the sample is left out, because it did so alone too"
        if replaced and machine.on_trial(worker):
            return "replaced; the sample is tried alone"
        renewed = any(isinstance(one, v.Renew) for one in actions)
        begun = "replaced by one forked anew" if renewed else "replaced"
        if machine.put_off(worker):
            begun = "started again after a pause"
        elif not replaced:
            return IDLE
        if machine.iterable:
            return f"{begun}{BEING_TAKEN_UP}"
        making = self.ready and self.head is not None
        return f"{begun}; its batch is made again" if making else begun

    @property
    def gives_up_sample(self) -> bool:
        """Whether the machine has given up the batch it died of."""
        return self.head is not None and isinstance(self.head.result, v.Poisoned)


def starts(actions: Sequence[v.Action], worker: int) -> bool:
    """Whether a replacement for this worker is among the actions."""
    return any(isinstance(one, v.Start) and one.worker == worker for one in actions)


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


def remedies(recovery: Recovery) -> tuple[Remedy, ...]:
    """For a stream that was not continued as it was, without what the user has set already."""
    found = CATALOGUE[_CAUSE].remedies
    return tuple(one for one in found if f'iterable_recovery="{recovery}"' not in one.command)


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
        machine: Machine,
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
        self._published: deque[tuple[v.Death, Incident]] = deque(maxlen=REMEMBERED)
        self._waiting: dict[int, deque[tuple[v.Death, Incident]]] = {}  # for what that shows
        self._machine = machine
        self._boxes = boxes
        self._coroner = coroner
        self._dataset = dataset
        self._on_incident = on_incident
        self._on_amended = on_amended
        self.origin = origin
        self._explained = set() if explained is None else explained
        self._filed: deque[tuple[Obituary, Incident, Body | None] | _TakenUp] = deque()
        # One examination at a time. Whoever has the pool's lock may take this one; we never do it
        # the other way round. A log handler of the user's may, or ask for incidents in the middle
        # of it: hence the patience, and a lock that its owner may take again.
        self._examining = threading.RLock()
        self._remedies = remedies(machine.recovery)  # of a stream
        self._of_memory: deque[float] = deque()  # when somebody died of it

    def all(self) -> list[Incident]:
        """The last ones, oldest first."""
        self.settle()
        return [incident for _, incident in list(self._published)]  # which others append to

    def of(self, deaths: Sequence[v.Death]) -> list[Incident]:
        """Those of these very deaths, as far as they are remembered."""
        self.settle()
        wanted = {id(death) for death in deaths}
        return [incident for death, incident in list(self._published) if id(death) in wanted]

    def open(self, worker: int, pid: int | None, ending: Ending, no_way: str = "") -> Obituary:
        """Read what the worker has left, before anybody takes its place; `no_way` says why nobody
        can, if its stream is not at its end."""
        machine = self._machine
        note = self._boxes.note(worker)
        stack = tidy(self._boxes.take_dump(worker))
        head = machine.head(worker)
        in_flight = head is not None and note.task == head.number and note.step == "fetch"
        step, batch = note.step, note.task
        if step in ("fetch", "collate") and note.task is None:
            step = "replay"  # batches without a number are those that were delivered before
        if step == "send" and (head is None or note.task != head.number):
            step, batch = "idle", None  # its answer has come; it had not begun the next
        sample = blamed = None
        if in_flight and head is not None:
            sample = sample_of(head.keys, head.brief, note.position)
            if ending.cause != "killed" or ending.signal is not None:
                blamed = (head.number, note.position)  # else it went with the nursery
        by_itself = ending.signal is not None and _sent_by(self._boxes, worker) == ending.signal
        outside = ending.outside and not by_itself
        # Only of a trial, which is one sample, is it noted when that was begun.
        timed = blamed is not None and ending.at is not None and machine.on_trial(worker)
        death = v.Death(
            at=time.monotonic(),
            sample=blamed,
            perhaps_from_outside=outside,
            memory=outside and blamed is not None and self._was_short(worker, ending.grown),
            after=max(0.0, (ending.at or 0.0) - note.since) if timed else None,
            inherited=ending.cause == "stalled"
            and self._coroner.stalled_on_inherited_lock(worker, stack),
            catching_up=machine.ready(worker) and step in ("start-up", "replay"),
            shortage=ending.errno in SHORTAGES,
            no_way=no_way,
            evidence=dataclasses.replace(ending, stack=thread_notes.split(stack)[1]),
        )
        incident = Incident(
            kind=ending.cause,
            worker_id=worker,
            pid=pid,
            signal=ending.signal,
            exitcode=ending.exitcode,
            batch=batch if head is None else head.number,
            sample=sample,
            position=position_of(note.position) if in_flight else None,
            step=step,
            stack=stack,
            action="",
            time=time.time(),
            loader=self.origin.loader,
            rank=self.origin.rank,
        )
        return Obituary(
            incident,
            death,
            head,
            machine.ready(worker),
            ending.errno,
            by_itself,
            self._boxes.words(worker),
            self._boxes.size(worker),
        )

    def _was_short(self, worker: int, grown: int | None) -> bool:
        """Whether memory may be why it was killed: the kernel has counted it, or while this worker
        was there nearly nothing was left."""
        if self._coroner.killed_for_memory(worker):
            return True
        left = gauge.read().free  # now that it is gone
        return grown is not None and left is not None and grown >= NEARLY_ALL * left

    def file(self, obituary: Obituary, action: str) -> None:
        """Keep for examination what will not be the same in a moment."""
        incident = dataclasses.replace(obituary.incident, action=action)
        body: Body | None = None
        with _not_worth_the_run(self.origin):
            body = self._coroner.receive(
                incident.worker_id,
                kind=incident.kind,
                signal=incident.signal,
                exitcode=incident.exitcode,
                stack=incident.stack,
                errno=obituary.errno,
                step=incident.step,
                batch=incident.batch,
                sample=incident.sample,
                ready=obituary.ready,
                sent_by_itself=obituary.by_itself,
                stderr=obituary.stderr,
                nursery_end=obituary.death.evidence.nursery[0],
                nursery_error=obituary.death.evidence.nursery[1],
                size=obituary.size,
            )
        self._filed.append((obituary, incident, body))

    def taken_up(self, worker: int, pid: int | None, finding: Finding, gone: Gone) -> None:
        """Another process has tried to go on with the stream of the one before it, which is `gone`
        for that reason."""
        self._filed.append(_TakenUp(worker, pid, finding, time.time(), gone))

    @property
    def recovery(self) -> Recovery:
        """How streams are to be continued."""
        return self._machine.recovery

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

    def _publish(self, obituary: Obituary, incident: Incident, body: Body | None) -> None:
        with _not_worth_the_run(self.origin):
            if body is not None:
                incident = self._examined(incident, body)
        with _not_worth_the_run(self.origin):
            self._on_incident(incident)
        self._published.append((obituary.death, incident))
        if incident.action.endswith(BEING_TAKEN_UP):
            waiting = self._waiting.setdefault(incident.worker_id, deque(maxlen=WAITING))
            waiting.append((obituary.death, incident))
        if incident.cause == "oom-killed":
            self._of_memory.append(obituary.death.at)
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
            to_do = old.remedies if finding.exact is not False else (*self._remedies, *old.remedies)
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
        self._published.append((v.Death(at=time.monotonic()), incident))
        self._say(f"{self.origin.prefix}{incident.who()}", taken.finding)

    def _say(self, who: str, finding: Finding) -> None:
        if finding.exact is not False:
            log.warning("%s: its stream goes on; %s", who, _told(finding))
            return
        lines = [f"{who}: its stream goes on, and not as it was: {_told(finding)}"]
        if finding.lost:
            lines = [f"{who}: its stream cannot go on: {finding.in_words()}"]
        if _CAUSE not in self._explained:
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
