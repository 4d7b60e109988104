"""From a death to an incident: recorded, examined, reported and counted.

One death is carried by four types. `Exit` is the fact: how the worker ended and what it was doing.
The machine decides on it. `Evidence` is what can be read about it. `Verdict` is the cause that
follows from the evidence. `Incident` is what the user reads.

Neither the replacement nor the consumer waits for the autopsy. The driver tells the exit together
with what the worker left behind, before a successor overwrites that. The machine decides, and the
decision is carried out. Then what changes from moment to moment is read (`submit`). So far this is
under the pool's lock. The examination, which may take a tenth of a second, and the reports to the
loader's incidents, the logbook and the log come last (`examine_pending`): in another thread, or in
the thread that wants to read the incidents.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.autopsy import thread_notes
from holdfast.autopsy.catalogue import CATALOGUE
from holdfast.autopsy.cause import Remedy
from holdfast.autopsy.evidence import Evidence
from holdfast.autopsy.incident import Incident, describe_end
from holdfast.engine import events as ev
from holdfast.engine.continuation import AGAIN, TO_DO, TRUST, Recovery, ResumptionResult
from holdfast.engine.driver import Driver
from holdfast.engine.loader_records import LoaderRecords
from holdfast.engine.transform_detection import in_transform
from holdfast.introspection.attributes import weakly
from holdfast.loader_identity import LoaderIdentity
from holdfast.samples.bad_sample import name_of
from holdfast.samples.substitute import position_of
from holdfast.shared_deque import copy_of

log = logging.getLogger("holdfast")

IDLE = "not replaced, because it had nothing left to do"
REMEMBERED = 100  # incidents that a pool keeps for its error messages
WAITING = 1000  # of one worker whose stream is being taken up, at most: as a loader keeps them
BEING_TAKEN_UP = "; its stream is being taken up"
PATIENCE = 2.0  # seconds to wait for another thread's examination: the logbook's disk may be gone

WhyReplaced = Literal["died", "recycled", "renewed"]
"""Why a worker was replaced: its death; its size; or the nursery was, because of a lock in it."""


def accusation(exit: ev.Exit) -> tuple[str, str, str]:
    """For a bad sample of which a worker died: its kind, its error and its message."""
    if exit.kind in ("stalled", "unkillable"):
        return "stalled", "stalled", "made no progress"
    if exit.unexplained:
        return "killed", "unexplained", "its process ended, and nothing says how"
    error = exit.signal or f"exit code {exit.exitcode}"
    return "killed", error, describe_end(exit.signal, exit.exitcode)


_BEGUN = {
    ev.Restart.NOW: "replaced",
    ev.Restart.ANEW: "replaced by one forked anew",
    ev.Restart.LATER: "started again after a pause",
}


def done(report: ev.Report) -> str:
    """What was decided about a death, in words. Only what is known now."""
    outcome, restart = report.outcome, report.restart
    if outcome is ev.Outcome.GAVE_UP:
        return "gave up"
    if outcome is ev.Outcome.SAMPLE_GIVEN_UP:
        given_up = "the sample is given up"
        return given_up if restart is ev.Restart.NO else f"replaced; {given_up}"
    if outcome is ev.Outcome.TRIED_AGAIN:
        return "tried again, after longer and longer pauses"
    if outcome is ev.Outcome.LEFT_OUT:
        return "replaced; the sample is left out, because it did so alone too"
    if outcome is ev.Outcome.TESTED_ALONE:
        return "replaced; the sample is tried alone"
    if outcome is ev.Outcome.NOTHING_LEFT:
        return IDLE
    if outcome is ev.Outcome.STREAM:
        return f"{_BEGUN[restart]}{BEING_TAKEN_UP}"
    again = "; its batch is made again" if outcome is ev.Outcome.BATCH_AGAIN else ""
    return f"{_BEGUN[restart]}{again}"


@contextlib.contextmanager
def _not_worth_the_run(origin: LoaderIdentity) -> Iterator[None]:
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
    finding: ResumptionResult
    at: float
    gone: WhyReplaced


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


def _told(finding: ResumptionResult) -> str:
    """What it has shown, and no more, in words for an incident."""
    words = finding.in_words()
    if finding.lost:
        return f"not continued: {words}"
    if finding.exact is False:
        return f"samples may be missing or come twice: {words}"
    return words


class Deaths:
    """The deaths in one pool."""

    def __init__(
        self,
        driver: Driver,
        dataset: Any,
        records: LoaderRecords,
        recovery: Recovery = "auto",
    ) -> None:
        """`recovery`: how streams are to be continued."""
        self.recovery = recovery
        self.origin = records.origin
        self._driver = driver
        self._dataset = weakly(dataset)  # which may refer to the loader
        self._on_incident = records.on_incident
        self._on_amended = records.on_amended
        self._explained = records.explained
        self._published: deque[tuple[ev.Exit | None, Incident]] = deque(maxlen=REMEMBERED)
        # Deaths whose stream is being taken up, until the result is known.
        self._waiting: dict[int, deque[tuple[ev.Exit, Incident]]] = {}
        self._filed: deque[tuple[ev.Exit, Incident, Evidence | None] | _TakenUp] = deque()
        # One examination at a time. A thread that holds the pool's lock may take this lock, never
        # the other way round. A log handler of the user may break that rule, or ask for incidents
        # during an examination: hence `PATIENCE`, and a lock that its owner may take again.
        self._examining = threading.RLock()
        self._remedies = remedies(recovery)  # of a stream
        self._of_memory: deque[float] = deque()  # times of deaths for lack of memory

    def all(self) -> list[Incident]:
        """The last ones, oldest first."""
        self.examine_pending()
        return [incident for _, incident in copy_of(self._published)]

    def incidents_of(self, deaths: Sequence[ev.Exit]) -> list[Incident]:
        """The incidents of these deaths, as far as they are kept."""
        self.examine_pending()
        wanted = {id(death) for death in deaths}
        return [incident for death, incident in copy_of(self._published) if id(death) in wanted]

    def submit(self, report: ev.Report, sample: Any) -> None:
        """File a death for examination. `sample` is what the sampler calls the one that was being
        loaded."""
        exit, task = report.exit, report.task
        evidence: Evidence | None = report.evidence
        step, batch = exit.step, exit.task
        if step == "send" and (task is None or exit.task != task.number):
            step, batch = "idle", None  # its answer has come; it had not begun the next
        incident = Incident(
            kind=exit.kind,
            worker_id=report.worker,
            pid=None if evidence is None else evidence.pid,
            signal=exit.signal,
            exitcode=exit.exitcode,
            batch=batch if task is None else task.number,
            sample=sample,
            position=position_of(exit.position) if report.loading else None,
            step=step,
            stack=exit.stack,
            action=done(report),
            time=time.time() - (self._driver.clock() - exit.at),
            loader=self.origin.loader,
            rank=self.origin.rank,
        )
        gathered: Evidence | None = None
        with _not_worth_the_run(self.origin):
            if evidence is not None:
                gathered = self._driver.gather(_combined(evidence, exit, incident, report.ready))
        self._filed.append((exit, incident, gathered))

    def taken_up(
        self, worker: int, pid: int | None, finding: ResumptionResult, gone: WhyReplaced
    ) -> None:
        """Another process has tried to continue the stream of its predecessor, which is `gone` for
        that reason."""
        self._filed.append(_TakenUp(worker, pid, finding, time.time(), gone))

    @property
    def pending(self) -> bool:
        """Whether there is a death to examine."""
        return bool(self._filed)

    def examine_pending(self) -> None:
        """Examine and report all deaths that are filed. When it returns that is done, unless
        another thread is at it and does not come to an end."""
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
        """The times of deaths for lack of memory since the last call."""
        return [self._of_memory.popleft() for _ in range(len(self._of_memory))]

    def _publish(self, exit: ev.Exit, incident: Incident, evidence: Evidence | None) -> None:
        with _not_worth_the_run(self.origin):
            if evidence is not None:
                incident = self._examined(incident, evidence)
        with _not_worth_the_run(self.origin):
            self._on_incident(incident)
        self._published.append((exit, incident))
        if incident.action.endswith(BEING_TAKEN_UP):
            waiting = self._waiting.setdefault(incident.worker_id, deque(maxlen=WAITING))
            waiting.append((exit, incident))
        if incident.cause in ("oom-killed", "ray-out-of-memory"):
            self._of_memory.append(exit.at)
        # Why, and what to do, once for deaths that are alike: what happens again is a line.
        kind = incident.kind_of_death()
        known = kind in self._explained
        self._explained.add(kind)
        # Ultralytics' loaders end their workers by their handles whenever one is not used any more.
        level = logging.INFO if incident.cause == "ended-on-request" else logging.WARNING
        log.log(level, "%s", incident if known else incident.report())

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
        self._tell(f"{self.origin.prefix}{last.who()}", finding)

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
        self._tell(f"{self.origin.prefix}{incident.who()}", taken.finding)

    def _tell(self, who: str, finding: ResumptionResult) -> None:
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

    def _examined(self, incident: Incident, evidence: Evidence) -> Incident:
        """The incident, with its cause."""
        evidence, verdict = self._driver.examine(evidence)
        sample, dataset = incident.sample, self._dataset()
        if incident.step == "fetch" and in_transform(dataset, evidence.stack):
            incident = dataclasses.replace(incident, step="transform")
            evidence = dataclasses.replace(evidence, step="transform")
        return dataclasses.replace(
            incident,
            stack=evidence.stack,
            cause=verdict.cause,
            confidence=verdict.confidence,
            because=verdict.because,
            evidence=evidence.to_json(),
            remedies=verdict.remedies,
            sample_name=None if sample is None else name_of(dataset, sample),
        )


def _combined(found: Evidence, exit: ev.Exit, incident: Incident, ready: bool) -> Evidence:
    """What the driver has found, with what the machine knows."""
    notes, stack = thread_notes.split(exit.stack)
    stalled = exit.kind in ("stalled", "unkillable")
    return dataclasses.replace(
        found,
        signal=exit.signal,
        exitcode=exit.exitcode,
        disappeared=exit.kind == "killed" and exit.signal is None,
        nursery_end=exit.nursery[0],
        nursery_error=exit.nursery[1],
        stalled=stalled,
        survived_sigkill=exit.kind == "unkillable" and found.start_method != "thread",
        sent_by_us=stalled or found.sent_by_us,
        sent_by_itself=exit.by_itself,
        forked=exit.errno is None,
        errno=exit.errno,
        step=incident.step,
        batch=incident.batch,
        sample=incident.sample,
        ready=ready,
        stack=stack,
        thread_notes=notes,
    )


Resumed = Sequence[tuple[int | None, ResumptionResult]]
"""The workers, None for the main process, and how each has taken up its stream."""


def tell_resumed(findings: Resumed, seconds: float, origin: LoaderIdentity) -> None:
    """The streams of an earlier run have been taken up: say how, and what it cost."""
    again = [one for _, one in findings if one.way in AGAIN and one.delivered]
    if again:
        log.warning(
            "%sresumed: %d batches that had been delivered were drawn again and dropped, in %.1f s,"
            " because %s. A dataset or iterator with state_dict() and load_state_dict() is "
            "continued without that",
            origin.prefix,
            sum(one.delivered for one in again),
            seconds,
            "the dataset has no state that leads there",
        )
    if any(one.way == TRUST and one.error is None for _, one in findings):
        log.warning(
            "%sresumed: the stream goes on from the state that the dataset gave; there was nothing "
            "to compare it with",
            origin.prefix,
        )
    for worker, one in findings:
        if one.exact is False and not one.lost and one.way != TRUST:
            who = "the stream" if worker is None else f"the stream of worker {worker}"
            log.warning(
                "%sresumed: %s goes on, and not as it was: %s. %s",
                origin.prefix, who, one.in_words(), TO_DO,
            )  # fmt: skip
