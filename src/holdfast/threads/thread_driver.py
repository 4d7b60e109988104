"""The driver of worker threads.

A thread that stalls cannot be ended. It is abandoned: its stack is read, a successor takes its
place, and what it answers later is not read. It goes on to use memory, perhaps a lock, and with an
endless loop in Python the interpreter. So the number of abandoned threads that are still stuck is
limited, for the whole process (`Limits.stuck`).
"""

from __future__ import annotations

import dataclasses
import errno
import threading
import time
from functools import partial
from typing import Any

from holdfast import private_names
from holdfast.autopsy import tally
from holdfast.autopsy.blackbox import STEPS
from holdfast.autopsy.evidence import Evidence
from holdfast.autopsy.readers import procfs
from holdfast.autopsy.stack import dump_of, tidy
from holdfast.autopsy.tally import Tally
from holdfast.autopsy.verdict import Verdict
from holdfast.autopsy.worker_status import StatusFile, WorkerStatus
from holdfast.engine import events as ev
from holdfast.engine.checkpoint import WorkerCheckpoint, random_states_at
from holdfast.engine.continuation import CannotResume, cannot_resume
from holdfast.engine.driver import DriverOptions, Handle, Progress, Urgent
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
from holdfast.samples.substitute import BatchHints, copy_index
from holdfast.threads import worker_thread as said
from holdfast.threads.bells import Bell
from holdfast.threads.notes import FEWEST, ThreadNotes
from holdfast.threads.worker_thread import Copies, Message, WorkerThread, name_of
from holdfast.worker.interface import BATCH

__all__ = ["ThreadDriver", "stuck_threads"]

GLANCE = 0.05  # seconds over which the CPU time of a stalled thread is compared
_NO_EVIDENCE = Evidence(start_method="thread")
# Not ended when they were abandoned, or their pool closed. All pools of the process use it, each
# with a lock of its own: so there are only single operations on a dict here.
_left: dict[threading.Thread, None] = {}


def stuck_threads() -> int:
    """How many threads of this process were abandoned and have not ended since."""
    for thread in list(_left):
        if not thread.is_alive():
            _left.pop(thread, None)
    return len(_left)


@dataclasses.dataclass(slots=True)
class _Seat(WorkerRecord):
    """What is kept for a worker id."""

    counted: bytearray | None = None  # what its workers have counted, if there is a logbook
    worker: WorkerThread | None = None
    notes: ThreadNotes = dataclasses.field(default_factory=ThreadNotes)  # of its last worker
    evidence: Evidence = _NO_EVIDENCE
    stack: str = ""


class ThreadDriver:
    """Implements `Driver`, where the methods are described."""

    backlog = False
    spin = None

    def __init__(self, copies: Copies, limits: ev.Limits, options: DriverOptions) -> None:
        self.limits = limits
        self.clock = time.monotonic
        self.kept = NothingKept()
        self._copies = copies
        self._options = options
        self._seats = [_Seat() for _ in range(options.workers)]
        for seat in self._seats:
            seat.progress.seeds = options.seeds
            if options.logbook is not None:
                seat.counted = bytearray(tally.END)
        for seat, begun in zip(self._seats, options.restored, strict=False):
            seat.notes = ThreadNotes(tuple(begun.random_states()))
            seat.progress = begun.progress(options.seeds)
        self._orders: dict[int, list[Order]] = {}  # not sent yet
        self._bell = Bell()  # the thread that has the pool's lock waits for it,
        self._watch_bell = Bell()  # and the background thread for this one
        self._watches_batches = False
        self._consumer = threading.get_ident()
        self._status = StatusFile("thread")

    def connect(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._answers = Answers(supervisor, self._seats, self._options.iterable)

    # -- orders ---------------------------------------------------------------------------

    def start(self, order: ev.Start) -> None:
        seat = self._seats[order.worker]
        seat.begin(order.generation, self.clock())
        seat.evidence, seat.stack = _NO_EVIDENCE, ""
        states = random_states_at(order.answered, seat.notes.random_state)
        setup = setup_for(order, self._options, seat.progress, *states)
        if isinstance(setup, CannotResume):
            lost = ev.WorkerStreamLost(
                order.worker, order.generation, seat.active, setup.why, started=False
            )
            self._supervisor.tell(lost)
            return
        kept = self._options.answers_ahead + FEWEST
        earlier = seat.notes.until(order.answered)
        seat.notes = ThreadNotes(earlier, seat.counted, order.worker, kept)
        worker = WorkerThread(setup, self._copies, seat.notes, self._bell, self._watch_bell)
        try:
            worker.thread.start()
        except RuntimeError:  # "can't start new thread"
            if order.generation == 0:
                raise
            tell = partial(self._exit, order.worker, "start-failed", errno=errno.EAGAIN)
            self._supervisor.after(tell)
            return
        seat.worker = worker

    def rehearse(self, order: ev.Rehearse) -> None:
        raise AssertionError("no thread is replaced for its size")

    def find_leak(self, worker: int, batches: int, nbytes: int) -> bool:
        return False

    def send(self, worker: int, item: ev.Item, hint: BatchHints | None) -> None:
        # The index is copied because the user's code may change it.
        one = self._seats[worker].order(item, hint, copy_index)
        self._orders.setdefault(worker, []).append(one)

    def flush(self) -> None:
        now = self.clock()
        for number, orders in self._orders.items():
            seat = self._seats[number]
            if seat.worker is not None:  # else it died a moment ago, and its replacement is asked
                seat.active = now
                seat.worker.orders.put(orders)
        self._orders.clear()

    def urge(self, worker: int, kind: Urgent, content: object = None) -> bool:
        return False

    def release(self) -> None:
        pass

    def dump(self, worker: int, generation: int) -> None:
        seat = self._seats[worker]
        if seat.worker is None:
            return
        thread = seat.worker.thread
        seat.evidence = _looked_at(seat.evidence, thread)
        seat.stack = _stack_of(thread)
        self.abandon(worker, generation)  # to wait for it longer would change nothing

    def kill(self, worker: int, generation: int) -> None:
        raise AssertionError("a thread cannot be killed")

    def terminate(self, worker: int, generation: int) -> None:
        """Nothing: it is a thread of the program that asks for that."""

    def abandon(self, worker: int, generation: int) -> None:
        self._supervisor.after(partial(self._abandon, worker, generation))

    def _abandon(self, number: int, generation: int) -> None:
        seat = self._seats[number]
        worker = seat.worker
        if worker is None or seat.generation != generation:
            return
        self._take_all(number)
        if self._seats[number].worker is not worker:
            return  # it has ended meanwhile
        worker.dismiss()
        _left[worker.thread] = None
        self._exit(number, "unkillable", stuck=stuck_threads())

    def renew(self) -> None:
        raise AssertionError("threads inherit no locks")

    # -- waiting --------------------------------------------------------------------------

    def hear(self, worker: int) -> bool:
        thread = self._seats[worker].worker
        if thread is None or not thread.outbox:
            return False
        self._take(worker, thread.outbox.popleft())
        return True

    def _has_messages(self) -> bool:
        return any(seat.worker is not None and seat.worker.outbox for seat in self._seats)

    def poll(self, timeout: float) -> None:
        consumer = threading.get_ident() == self._consumer
        self._bell.wait(timeout, self._has_messages, consumer)

    def take_in(self, found: None) -> bool:
        heard = False
        for worker in range(len(self._seats)):
            heard |= self._take_all(worker)
        return heard

    def _take_all(self, worker: int) -> bool:
        thread = self._seats[worker].worker
        heard = False
        while thread is not None and thread.outbox and self._seats[worker].worker is thread:
            heard = True
            self._take(worker, thread.outbox.popleft())
        return heard

    def prepare_watch(self, batches: bool) -> None:
        self._watches_batches = batches

    def watch(self, timeout: float) -> None:
        if self._watches_batches:
            self._watch_bell.wait(timeout, self._has_messages)
        else:
            self._watch_bell.pause(timeout)

    def wake(self) -> None:
        self._bell.ring()
        self._watch_bell.ring()

    def tick(self, now: float) -> None:
        if self._status.due(now):
            living = [(n, seat) for n, seat in enumerate(self._seats) if seat.worker is not None]
            self._status.write((self._status_of(n, seat) for n, seat in living), now)

    def _status_of(self, number: int, seat: _Seat) -> WorkerStatus:
        kernels = None if seat.worker is None else seat.worker.thread.native_id
        return WorkerStatus(number, kernels, self.place(number), seat.notes.read())

    # -- what they say --------------------------------------------------------------------

    def _take(self, worker: int, message: Message) -> None:
        seat, answers = self._seats[worker], self._answers
        seat.active = self.clock()
        kind = message[0]
        if kind is BATCH:  # first, because nearly all are
            answers.batch(worker, *message[1:])
        elif kind is said.READY:
            answers.is_ready(worker)
        elif kind is said.REPORT:
            answers.report(worker, *message[1:])
        elif kind is said.REMARK:
            answers.remark(worker, *message[1:])
        elif kind is said.SURVIVED:
            answers.survived(worker)
        elif kind is said.TAKEN_UP:
            answers.taken_up(worker, *message[1:])
        elif kind is said.REFUSED:
            self._supervisor.refusal = StartRefused(worker, None, message[1])
            self._supervisor.tell(ev.WorkerRefused(worker, seat.generation))
        elif kind is said.GONE:
            seat.stack = message[1]
            self._exit(worker, "exited", exitcode=int(bool(message[1])))
        else:
            answers.other(worker, *message)

    def _exit(self, number: int, kind: str, **facts: Any) -> None:
        seat, options = self._seats[number], self._options
        seat.worker = None
        note = seat.notes.read()
        step = note.step
        if step in ("fetch", "collate") and note.task is None:
            step = "replay"  # batches without a number are those that were delivered before
        none = cannot_resume(options.recovery, seat.progress) if options.iterable else None
        exit = ev.Exit(
            self.clock(),
            kind,
            task=note.task,
            position=note.position,
            step=step,
            stack=seat.stack,
            no_way=none.why if none else "",
            **facts,
        )
        self._supervisor.tell(ev.WorkerExited(number, seat.generation, exit, seat.evidence))

    # -- facts ----------------------------------------------------------------------------

    def checkpoint(self, worker: int, seat: ev.SeatPosition, back: int) -> WorkerCheckpoint:
        record = self._seats[worker]
        states, iterable = record.notes.random_state, self._options.iterable
        return WorkerCheckpoint.of(seat, back, record.progress, states, iterable=iterable)

    def progress(self, worker: int) -> Progress:
        seat = self._seats[worker]
        return Progress(seat.notes.read(), 0, seat.active)

    def place(self, worker: int) -> str:
        return f"thread {name_of(worker)}"

    def size(self, worker: int) -> int | None:
        return None

    def tally(self) -> Tally:
        found = Tally()
        for seat in self._seats:
            if seat.counted is not None:
                found.add(seat.counted, 0)
            if seat.worker is not None:
                note = seat.notes.read()
                found.seconds[STEPS.index(note.step)] += max(0.0, self.clock() - note.since)
        return found

    def own_bytes(self) -> dict[int, int]:
        return {}

    def shared_bytes(self) -> int:
        return 0

    def handle(self, worker: int) -> Handle:
        return Handle(None, None if self._seats[worker].worker is not None else 0)

    # -- deaths ---------------------------------------------------------------------------

    def settle(self, report: ev.Report) -> None:
        if report.outcome is ev.Outcome.SAMPLE_GIVEN_UP:
            self._seats[report.worker].progress.forget_states()

    def gather(self, evidence: Evidence) -> Evidence:
        return evidence

    def examine(self, evidence: Evidence) -> tuple[Evidence, Verdict]:
        return evidence, judged(evidence, self._options)

    # -- the end --------------------------------------------------------------------------

    def stop(self, deadline: float) -> None:
        living = [
            (number, seat.worker)
            for number, seat in enumerate(self._seats)
            if seat.worker is not None
        ]
        for _, worker in living:
            worker.dismiss()
        for number, worker in living:
            worker.thread.join(max(0.0, deadline - time.monotonic()))
            if worker.thread.is_alive():
                _left[worker.thread] = None
                self._supervisor.upkeep.remark(number, "still-running", _still_running(worker))

    def close(self) -> None:
        self._status.close()
        for seat in self._seats:
            seat.worker = None

    def disown(self) -> None:
        pass


def _looked_at(evidence: Evidence, thread: threading.Thread) -> Evidence:
    """What the kernel says that a stalled thread is doing, where it says so."""
    task = f"self/task/{thread.native_id}"
    before = procfs.activity(task)
    if before is None:
        return evidence
    time.sleep(GLANCE)
    after = procfs.activity(task)
    busy = None if after is None else after.ticks > before.ticks
    return dataclasses.replace(evidence, activity=after, busy=busy)


def _stack_of(thread: threading.Thread) -> str:
    return tidy(dump_of(private_names.current_frames().get(thread.ident or 0), thread.name))


def _still_running(worker: WorkerThread) -> str:
    return (
        "its thread is still running, although the loader was closed: a thread cannot be killed. "
        "It ends when the sample it is loading is done; until then it uses the dataset. It is at:\n"
        + _stack_of(worker.thread)
    )
