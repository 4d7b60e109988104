"""What the drivers of worker threads and of actors have in common.

Their workers say what they have to say in tuples (`worker.message_host`), hand over batches in
memory that is the trainer's own, and are not replaced for their size.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from holdfast.autopsy.evidence import Evidence
from holdfast.autopsy.verdict import Verdict
from holdfast.engine import events as ev
from holdfast.engine.bells import Bell
from holdfast.engine.checkpoint import WorkerCheckpoint, random_states_at
from holdfast.engine.continuation import CannotResume, cannot_resume
from holdfast.engine.driver import DriverOptions, Urgent
from holdfast.engine.epoch import StartRefused
from holdfast.engine.supervisor import Supervisor
from holdfast.engine.worker_records import (
    Answers,
    NothingKept,
    Order,
    WorkerRecord,
    judged,
    setup_for,
)
from holdfast.worker.interface import WorkerSetup
from holdfast.worker.message_host import READY, REFUSED, REMARK, REPORT, SURVIVED, TAKEN_UP
from holdfast.worker.notes import FEWEST, ThreadNotes


@dataclass(slots=True, kw_only=True)
class MessageRecord(WorkerRecord):
    """What is kept for one worker id."""

    worker: Any = None  # while there is one
    notes: ThreadNotes = field(default_factory=ThreadNotes)  # of its last worker: random states
    counted: bytearray | None = None  # what its workers have counted, if there is a logbook


Record = TypeVar("Record", bound=MessageRecord)


class MessageDriver(Generic[Record]):
    """Implements the part of `Driver`, where the methods are described, that is the same for
    both."""

    backlog = False
    spin = None

    def __init__(
        self, make_record: Callable[[], Record], limits: ev.Limits, options: DriverOptions
    ) -> None:
        self.limits = limits
        self.clock = time.monotonic
        self.kept = NothingKept()
        self._options = options
        self._seats = [make_record() for _ in range(options.workers)]
        for seat in self._seats:
            seat.progress.seeds = options.seeds
        for seat, begun in zip(self._seats, options.restored, strict=False):
            seat.notes = ThreadNotes(tuple(begun.random_states()))
            seat.progress = begun.progress(options.seeds)
        self._orders: dict[int, list[Order]] = {}  # not sent yet
        self._bell = Bell()  # the thread that has the pool's lock waits for it,
        self._watch_bell = Bell()  # and the background thread for this one
        self._watches_batches = False

    def connect(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._answers = answers = Answers(supervisor, self._seats, self._options.iterable)
        self._on_message: dict[object, Callable[..., None]] = {
            READY: answers.is_ready,
            REPORT: answers.report,
            REMARK: answers.remark,
            SURVIVED: answers.survived,
            TAKEN_UP: answers.taken_up,
            REFUSED: self._refused,
        }

    # -- for the drivers ------------------------------------------------------------------

    def _begin(self, order: ev.Start) -> WorkerSetup | None:
        """How the worker of this order begins. None if it cannot, which is told."""
        seat = self._seats[order.worker]
        seat.begin(order.generation, self.clock())
        states = random_states_at(order.answered, seat.notes.random_state)
        setup = setup_for(order, self._options, seat.progress, *states)
        if isinstance(setup, CannotResume):
            lost = ev.WorkerStreamLost(
                order.worker, order.generation, seat.active, setup.why, started=False
            )
            self._supervisor.tell(lost)
            return None
        kept = self._options.answers_ahead + FEWEST
        earlier = seat.notes.until(order.answered)
        seat.notes = ThreadNotes(earlier, seat.counted, order.worker, kept)
        return setup

    def _pass_on(self, seat: Record, orders: list[Order]) -> None:
        """Give them to a worker that is there."""
        raise NotImplementedError

    def _heard(self, worker: int, kind: object, *content: Any) -> None:
        """A worker has said something that is no batch and not its end."""
        hear = self._on_message.get(kind)
        if hear is None:
            self._answers.other(worker, kind, *content)  # type: ignore[arg-type]  # bytes
        else:
            hear(worker, *content)

    def _refused(self, worker: int, failure: Any) -> None:
        self._supervisor.refusal = StartRefused(worker, None, failure)
        self._supervisor.tell(ev.WorkerRefused(worker, self._seats[worker].generation))

    def _no_way(self, seat: Record) -> str:
        """Why the stream of a worker that is gone cannot be continued; empty if it can."""
        options = self._options
        none = cannot_resume(options.recovery, seat.progress) if options.iterable else None
        return none.why if none else ""

    # -- orders ---------------------------------------------------------------------------

    def flush(self) -> None:
        now = self.clock()
        for number, orders in self._orders.items():
            seat = self._seats[number]
            if seat.worker is not None:  # else it died a moment ago, and its replacement is asked
                seat.active = now
                self._pass_on(seat, orders)
        self._orders.clear()

    def rehearse(self, order: ev.Rehearse) -> None:
        raise AssertionError("this worker is not replaced for its size")

    def find_leak(self, worker: int, batches: int, nbytes: int) -> bool:
        return False

    def urge(self, worker: int, kind: Urgent, content: object = None) -> bool:
        return False

    def release(self) -> None:
        pass

    def renew(self) -> None:
        raise AssertionError("this worker inherits no locks")

    # -- waiting --------------------------------------------------------------------------

    def hear(self, worker: int) -> bool:
        raise NotImplementedError

    def take_in(self, found: None) -> bool:
        heard = False
        for worker in range(len(self._seats)):
            while self.hear(worker):
                heard = True
        return heard

    def prepare_watch(self, batches: bool) -> None:
        self._watches_batches = batches

    def wake(self) -> None:
        self._bell.ring()
        self._watch_bell.ring()

    # -- facts ----------------------------------------------------------------------------

    def checkpoint(self, worker: int, seat: ev.SeatPosition, back: int) -> WorkerCheckpoint:
        record = self._seats[worker]
        states, iterable = record.notes.random_state, self._options.iterable
        return WorkerCheckpoint.of(seat, back, record.progress, states, iterable=iterable)

    def size(self, worker: int) -> int | None:
        return None

    def own_bytes(self) -> dict[int, int]:
        return {}

    def shared_bytes(self) -> int:
        return 0

    # -- deaths ---------------------------------------------------------------------------

    def settle(self, report: ev.Report) -> None:
        if report.outcome is ev.Outcome.SAMPLE_GIVEN_UP:
            self._seats[report.worker].progress.forget_states()

    def gather(self, evidence: Evidence) -> Evidence:
        return evidence

    def examine(self, evidence: Evidence) -> tuple[Evidence, Verdict]:
        return evidence, judged(evidence, self._options)

    # -- the end --------------------------------------------------------------------------

    def disown(self) -> None:
        pass
