"""What a driver keeps for each worker id, of whatever kind its workers are: how a worker is set up
from that, and what the answers of workers change in it.

A driver decodes what its workers send, and passes it on to `Answers`, which tells the events.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from holdfast.autopsy.evidence import Evidence
from holdfast.autopsy.machine_facts import MachineFacts
from holdfast.autopsy.verdict import Run, Verdict, judge
from holdfast.engine import events as ev
from holdfast.engine.continuation import (
    ATTEMPTS,
    REST,
    STATE,
    CannotResume,
    ResumptionPlan,
    ResumptionResult,
    StreamProgress,
    Way,
    choose_plan,
)
from holdfast.engine.driver import Batch, DriverOptions
from holdfast.engine.epoch import Failed, Reported
from holdfast.engine.supervisor import Supervisor
from holdfast.samples.bad_sample import BadSample
from holdfast.samples.substitute import BatchHints
from holdfast.worker.interface import ENDED, ERROR, NOTHING_LEFT, RESUMED, TOLD, WorkerSetup
from holdfast.worker.stream_resumption import STATE_FAILED
from holdfast.worker.tolerant import DROPPED

Order = tuple[Literal["task", "hinted", "test", "tell", "resume"], int, Any]
"""What a worker is to do, as `worker.items.Worker.carry_out` takes it."""


def _same(index: Any) -> Any:
    return index


class NothingKept:
    """Implements `driver.Kept` where a batch that the user keeps is the user's own memory."""

    nbytes = 0


@dataclass(slots=True, kw_only=True)
class WorkerRecord:
    """What is kept for one worker id."""

    generation: int = 0  # of the worker that was ordered last
    active: float = 0.0  # when that was last sent something or heard from
    ready: bool = False  # it has started
    progress: StreamProgress = field(default_factory=StreamProgress)  # of its stream, if it is one
    resumptions: deque[ev.Resumption] = field(default_factory=deque)  # ordered and not answered
    epoch: int = 0  # of its replica
    reports: tuple[BadSample, ...] = ()  # of the batch whose answer comes next,
    samples: int | None = None  # and how many it took of a stream, if not as many as asked for

    def begin(self, generation: int, now: float) -> None:
        """A worker of this generation is about to be started."""
        self.generation = generation
        self.reports, self.samples = (), None  # of an answer that never came
        self.resumptions.clear()
        self.ready = False
        self.active = now

    def order(
        self, item: ev.Item, hint: BatchHints | None, copied: Callable[[Any], Any] = _same
    ) -> Order:
        """What the worker is sent for this item. `copied` is applied to indices."""
        if isinstance(item, ev.Task):
            index = copied(item.index)
            if hint is None:
                return "task", item.number, index
            return "hinted", item.number, (index, hint)
        if isinstance(item, ev.IsolationTest):
            task = item.task
            return "test", task.number, (copied(task.index), hint, item.sample, item.pause)
        if isinstance(item, ev.Notice):
            return "tell", 0, item.change
        self.resumptions.append(item)
        return "resume", 0, item.seeds


def setup_for(
    order: ev.Beginning,
    options: DriverOptions,
    progress: StreamProgress,
    random_state: bytes | None,
    random_before: bytes | None,
) -> WorkerSetup | CannotResume:
    """How the worker of this order begins. `random_state` is that before the first item it will be
    asked for, `random_before` that before the last one answered."""
    plan: ResumptionPlan | CannotResume | None = None
    if options.iterable and (order.generation or order.answered or isinstance(order, ev.Rehearse)):
        recovery = options.recovery
        if recovery == "raise":  # after a death; but this is the first worker of a resumed run
            recovery = "replay"
        plan = choose_plan(
            recovery,
            progress,
            exhausted=order.exhausted,
            epochs_done=order.epochs_done,
            persistent=options.persistent,
            unfit=order.unfit,
            random_before=random_before,
        )
    if isinstance(plan, CannotResume):
        return plan
    return WorkerSetup(
        worker=order.worker,
        generation=order.generation,
        seeds=progress.seeds,
        answered=order.answered,
        epochs_done=order.epochs_done,
        batches_done=order.batches_done,
        exhausted=order.exhausted,
        random_state=random_state,
        epoch_state=progress.epoch_state,
        told=order.told,
        settled=order.settled,
        settled_earlier=order.settled_earlier,
        plan=plan,
        dataset_state=None if options.iterable else progress.state,
        marks=options.iterable and options.recovery != "raise",
        states=_uses_states(options, STATE, order.unfit),
        rests=_uses_states(options, REST, order.unfit),
    )


def _uses_states(options: DriverOptions, way: Way, unfit: Collection[str]) -> bool:
    """Whether a stream may be continued this way, so that the worker has to give states."""
    if not options.iterable or options.recovery in ("replay", "raise"):
        return False
    return options.recovery == "state" or way not in unfit


def judged(evidence: Evidence, options: DriverOptions) -> Verdict:
    """The verdict on a death, from its evidence alone."""
    book = None if options.logbook is None else options.logbook.given
    run = Run(options.workers, os.getpid(), book, options.stall_timeout)
    return judge(evidence, MachineFacts.read(), run)


class Answers:
    """What the workers of a pool say becomes events. The content is decoded already."""

    def __init__(
        self, supervisor: Supervisor, records: Sequence[WorkerRecord], iterable: bool
    ) -> None:
        self._supervisor = supervisor
        self._tell = supervisor.tell
        self._upkeep = supervisor.upkeep
        self._records = records
        self._iterable = iterable

    def batch(self, worker: int, number: int, batch: Batch, mark: int, state: bytes | None) -> None:
        """A batch is made. `mark` is its fingerprint, `state` that of the dataset after it."""
        record = self._records[worker]
        if self._iterable or state is not None:
            self._received(worker, record, mark, state)
        told = record.reports or record.samples is not None
        answer = _with_reports(record, batch) if told else batch
        self._tell(ev.BatchReady(worker, record.generation, number, answer, batch.nbytes))

    def other(
        self, worker: int, kind: bytes, number: int, content: Any, mark: int, state: bytes | None
    ) -> None:
        """An answer without a batch; see `worker.interface`."""
        record = self._records[worker]
        generation = record.generation
        if self._iterable or (state is not None and kind != RESUMED):
            self._received(worker, record, mark, state)
        event: ev.Event
        if kind == ERROR:
            answer: Any = Failed(content)
            if record.reports or record.samples is not None:
                answer = _with_reports(record, answer)
            event = ev.BatchReady(worker, generation, number, answer)
        elif kind == NOTHING_LEFT:
            event = ev.BatchReady(worker, generation, number, _with_reports(record, DROPPED))
        elif kind == ENDED:
            self._supervisor.ended_with(record.epoch, record.reports)
            record.reports, record.samples = (), None
            event = ev.ReplicaEnded(worker, generation, number)
        elif kind == TOLD:
            event = ev.Told(worker, generation)
        else:
            assert kind == RESUMED, kind
            begun = record.resumptions.popleft()
            record.progress.resumed(content, begun.seeds)
            if not self._iterable and state is not None:
                self._received(worker, record, mark, state)
            record.epoch = begun.epoch
            event = ev.Resumed(worker, generation)
        self._tell(event)

    def _received(self, worker: int, record: WorkerRecord, mark: int, state: bytes | None) -> None:
        """Note the position of a stream, or the state of a map-style dataset, as far back as the
        batches that are not delivered."""
        keep = self._supervisor.machine.undelivered(worker) + 2
        record.progress.received(mark, state, keep)

    def is_ready(self, worker: int) -> None:
        """A worker has started."""
        record = self._records[worker]
        record.ready = True
        self._upkeep.ready(worker)
        self._tell(ev.WorkerReady(worker, record.generation))

    def report(self, worker: int, bad: Sequence[BadSample], samples: int | None) -> None:
        """Bad samples of the batch whose answer comes next."""
        record = self._records[worker]
        record.reports, record.samples = tuple(bad), samples

    def remark(self, worker: int, about: str, text: str) -> None:
        if about == STATE_FAILED:
            self._records[worker].progress.state_error = text
        self._upkeep.remark(worker, about, text)

    def survived(self, worker: int) -> None:
        self._tell(ev.Survived(worker, self._records[worker].generation))

    def taken_up(self, worker: int, finding: ResumptionResult) -> None:
        """A worker has tried to continue the stream of its predecessor."""
        record = self._records[worker]
        if finding.leaves:
            self.remark_on_resumption(worker, finding)
            self._tell(ev.ResumptionFailed(worker, record.generation, record.active, finding.unfit))
            return
        record.progress.raised = 0
        self._upkeep.taken_up(worker, finding)
        if finding.lost:
            why = finding.in_words()
            self._tell(ev.WorkerStreamLost(worker, record.generation, record.active, why))

    def remark_on_resumption(self, worker: int, finding: ResumptionResult) -> None:
        """A worker exits because of an exception on its way: log that."""
        if finding.to_be_tried_again:
            self._records[worker].progress.raised += 1
            text = (
                f"drawn again after a death, its stream raised {finding.error} where it had not "
                f"before; another process tries it, {ATTEMPTS} in all"
            )
            self._upkeep.remark(worker, "stream-raised", text)
        elif finding.error is not None:
            text = (
                f"to go on from the state that the dataset gave raised {finding.error}; the stream "
                "is continued in another way, if there is one"
            )
            self._upkeep.remark(worker, "stream-state-not-loaded", text)


def _with_reports(record: WorkerRecord, result: Any) -> Reported:
    """The answer, with the bad samples that were reported just before it."""
    told = Reported(result, record.reports, record.samples)
    record.reports, record.samples = (), None
    return told
