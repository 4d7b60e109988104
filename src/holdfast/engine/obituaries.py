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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.autopsy import thread_notes
from holdfast.autopsy.blackbox import BlackBoxes, Size
from holdfast.autopsy.coroner import Body, Coroner
from holdfast.autopsy.incident import Incident, describe_end
from holdfast.autopsy.stack import tidy
from holdfast.engine import vocabulary as v
from holdfast.engine.machine import Machine
from holdfast.engine.nursery import SHORTAGES
from holdfast.engine.transforms import in_transform
from holdfast.samples.record import name_of
from holdfast.samples.substitute import position_of, sample_of

__all__ = ["Ending", "Obituaries", "Obituary"]

log = logging.getLogger("holdfast")

REMEMBERED = 100  # incidents a pool keeps for the story it may have to tell
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
    stderr: str | None  # the end of what it wrote there
    size: Size | None  # as it noted it itself

    def done(self, machine: Machine, actions: Sequence[v.Action]) -> str:
        """What the machine does about it, in words."""
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
        if machine.put_off(worker):
            return "started again after a pause, nothing lost"
        return "replaced, nothing lost" if replaced else "none needed"

    @property
    def gives_up_sample(self) -> bool:
        """Whether the machine has given up the batch it died of."""
        return self.head is not None and isinstance(self.head.result, v.Poisoned)


def starts(actions: Sequence[v.Action], worker: int) -> bool:
    """Whether a replacement for this worker is among the actions."""
    return any(isinstance(one, v.Start) and one.worker == worker for one in actions)


@contextlib.contextmanager
def _not_worth_the_run() -> Iterator[None]:
    """The worker is replaced already: if we cannot find out or write down why it died, say so."""
    try:
        yield
    except Exception:
        log.exception("the examination of a death failed; the run goes on")


class Obituaries:
    """Those of one pool."""

    def __init__(
        self,
        machine: Machine,
        boxes: BlackBoxes,
        coroner: Coroner,
        dataset: Any,
        on_incident: Callable[[Incident], None],
    ) -> None:
        self._published: deque[tuple[v.Death, Incident]] = deque(maxlen=REMEMBERED)
        self._machine = machine
        self._boxes = boxes
        self._coroner = coroner
        self._dataset = dataset
        self._on_incident = on_incident
        self._explained: set[str] = set()
        self._filed: deque[tuple[Obituary, Incident, Body | None]] = deque()
        # One examination at a time. Whoever has the pool's lock may take this one; we never do it
        # the other way round. A log handler of the user's may, or ask for incidents in the middle
        # of it: hence the patience, and a lock that its owner may take again.
        self._examining = threading.RLock()
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

    def open(self, worker: int, pid: int | None, ending: Ending) -> Obituary:
        """Read what the worker has left, before anybody takes its place."""
        machine = self._machine
        note = self._boxes.note(worker)
        stack = tidy(self._boxes.take_dump(worker))
        head = machine.head(worker)
        in_flight = head is not None and note.task == head.number and note.step == "fetch"
        sample = blamed = None
        if in_flight and head is not None:
            sample = sample_of(head.keys, head.brief, note.position)
            if ending.cause != "killed" or ending.signal is not None:
                blamed = (head.number, note.position)  # else it went with the nursery
        death = v.Death(
            at=time.monotonic(),
            sample=blamed,
            perhaps_from_outside=ending.outside,
            shortage=ending.errno in SHORTAGES,
            evidence=dataclasses.replace(ending, stack=thread_notes.split(stack)[1]),
        )
        incident = Incident(
            kind=ending.cause,
            worker_id=worker,
            pid=pid,
            signal=ending.signal,
            exitcode=ending.exitcode,
            batch=head.number if head is not None else note.task,
            sample=sample,
            position=position_of(note.position) if in_flight else None,
            step=note.step,
            stack=stack,
            action="",
            time=time.time(),
        )
        return Obituary(
            incident,
            death,
            head,
            machine.ready(worker),
            ending.errno,
            self._boxes.words(worker),
            self._boxes.size(worker),
        )

    def file(self, obituary: Obituary, action: str) -> None:
        """Keep for examination what will not be the same in a moment."""
        incident = dataclasses.replace(obituary.incident, action=action)
        body: Body | None = None
        with _not_worth_the_run():
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
                stderr=obituary.stderr,
                size=obituary.size,
            )
        self._filed.append((obituary, incident, body))

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
                self._publish(*self._filed.popleft())
        finally:
            self._examining.release()

    def deaths_of_memory(self) -> list[float]:
        """When somebody died of it, since we were last asked."""
        return [self._of_memory.popleft() for _ in range(len(self._of_memory))]

    def _publish(self, obituary: Obituary, incident: Incident, body: Body | None) -> None:
        with _not_worth_the_run():
            if body is not None:
                incident = self._examined(incident, body)
        with _not_worth_the_run():
            self._on_incident(incident)
        self._published.append((obituary.death, incident))
        if incident.cause == "oom-killed":
            self._of_memory.append(obituary.death.at)
        # Why, and what to do, once for each cause: what happens again is a line.
        known = incident.cause in self._explained
        self._explained.add(incident.cause)
        log.warning("%s", incident if known else incident.report())

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
