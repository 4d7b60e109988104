"""The driver of worker threads.

A thread that stalls cannot be ended. It is abandoned: its stack is read, a successor takes its
place, and what it answers later is not read. It goes on to use memory, perhaps a lock, and with an
endless loop in Python the interpreter. So the number of abandoned threads that are still stuck is
limited, for the whole process (`Limits.stuck`).
"""

from __future__ import annotations

import ctypes
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
from holdfast.autopsy.worker_status import StatusFile, WorkerStatus
from holdfast.engine import background
from holdfast.engine import events as ev
from holdfast.engine.driver import DriverOptions, Handle, Progress
from holdfast.engine.message_driver import MessageDriver, MessageRecord
from holdfast.engine.worker_records import Order
from holdfast.samples.substitute import BatchHints, copy_index
from holdfast.threads.turns import Turns
from holdfast.threads.worker_thread import Copies, Manner, WorkerThread, name_of
from holdfast.transport.batch_memory import BatchMemory
from holdfast.worker.interface import BATCH
from holdfast.worker.message_host import GONE, Message

REST = 10.0  # seconds without a batch after which memory for batches is released
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


def _interrupt(by: float) -> None:
    """At the exit of the interpreter: raise SystemExit in threads that are still running.

    A thread that comes back from native code when the interpreter is gone is ended right there,
    before Python 3.14, and C++ code that it comes back from ends the program: with SIGABRT, as
    torch's and OpenCV's functions do. So it is better if it ends before.
    """
    if not stuck_threads():
        return
    for thread in list(_left):
        ident = ctypes.c_ulong(thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))
    for thread in list(_left):
        thread.join(max(0.0, by - time.monotonic()))


background.when_all_are_closed(_interrupt)


@dataclasses.dataclass(slots=True)
class _Seat(MessageRecord):
    """What is kept for a worker id."""

    worker: WorkerThread | None = None
    evidence: Evidence = _NO_EVIDENCE
    stack: str = ""


class ThreadDriver(MessageDriver[_Seat]):
    """Implements `Driver`, where the methods are described."""

    def __init__(
        self, copies: Copies, manner: Manner, limits: ev.Limits, options: DriverOptions
    ) -> None:
        super().__init__(_Seat, limits, options)
        self._copies = copies
        self._manner = manner
        if options.logbook is not None:
            for seat in self._seats:
                seat.counted = bytearray(tally.END)
        self._consumer = threading.get_ident()
        self._status = StatusFile("thread")
        self._memory = BatchMemory()
        self._turns = Turns(self._bell)
        self._rest_at = 0.0

    # -- orders ---------------------------------------------------------------------------

    def start(self, order: ev.Start) -> None:
        seat = self._seats[order.worker]
        seat.evidence, seat.stack = _NO_EVIDENCE, ""
        setup = self._begin(order)
        if setup is None:
            return
        worker = WorkerThread(
            setup,
            self._copies,
            seat.notes,
            self._bell,
            self._watch_bell,
            self._memory,
            self._turns,
            self._manner,
        )
        try:
            worker.thread.start()
        except RuntimeError:  # "can't start new thread"
            if order.generation == 0:
                raise
            tell = partial(self._exit, order.worker, "start-failed", errno=errno.EAGAIN)
            self._supervisor.after(tell)
            return
        seat.worker = worker
        self._turns.join(order.worker, worker.inbox)

    def send(self, worker: int, item: ev.Item, hint: BatchHints | None) -> None:
        # The index is copied because the user's code may change it.
        one = self._seats[worker].order(item, hint, copy_index)
        self._orders.setdefault(worker, []).append(one)

    def _pass_on(self, seat: _Seat, orders: list[Order]) -> None:
        assert seat.worker is not None
        seat.worker.inbox.put(orders)

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
        while self.hear(number):
            pass
        if self._seats[number].worker is not worker:
            return  # it has ended meanwhile
        worker.dismiss()
        _left[worker.thread] = None
        self._exit(number, "unkillable", stuck=stuck_threads())

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
        patience = self._turns.begin(self._supervisor.machine.awaited()) if timeout > 0 else 0.0
        self._bell.wait(timeout, self._has_messages, consumer, patience)

    def watch(self, timeout: float) -> None:
        if self._watches_batches:
            self._watch_bell.wait(timeout, self._has_messages)
        else:
            self._watch_bell.pause(timeout)

    def release(self) -> None:
        machine = self._supervisor.machine
        largest, workers = machine.largest or 0, len(self._seats)
        allowed = (workers + 1) * largest  # one for each that begins a batch, one for the consumer
        if machine.room is not None:
            allowed = min(allowed, max(0, machine.room - machine.in_flight))
        self._memory.allow(allowed)

    def tick(self, now: float) -> None:
        if now >= self._rest_at:
            self._rest_at = now + REST
            self._memory.rest()
        if self._status.due(now):
            living = [(n, seat) for n, seat in enumerate(self._seats) if seat.worker is not None]
            self._status.write((self._status_of(n, seat) for n, seat in living), now)

    def _status_of(self, number: int, seat: _Seat) -> WorkerStatus:
        kernels = None if seat.worker is None else seat.worker.thread.native_id
        return WorkerStatus(number, kernels, self.place(number), seat.notes.read())

    # -- what they say --------------------------------------------------------------------

    def _take(self, worker: int, message: Message) -> None:
        seat = self._seats[worker]
        seat.active = self.clock()
        kind = message[0]
        if kind is BATCH:  # first, because nearly all are
            if self._supervisor.pinning is None:  # else the consumer does not wait for workers
                self._turns.batch_came(seat.active)
            self._answers.batch(worker, *message[1:])
        elif kind is GONE:
            seat.stack = message[1]
            self._exit(worker, "exited", exitcode=int(bool(message[1])))
        else:
            self._heard(worker, *message)

    def _exit(self, number: int, kind: str, **facts: Any) -> None:
        seat = self._seats[number]
        seat.worker = None
        note = seat.notes.read()
        exit = ev.Exit(
            self.clock(),
            kind,
            task=note.task,
            position=note.position,
            step=note.phase,
            stack=seat.stack,
            no_way=self._no_way(seat),
            **facts,
        )
        self._supervisor.tell(ev.WorkerExited(number, seat.generation, exit, seat.evidence))

    # -- facts ----------------------------------------------------------------------------

    def progress(self, worker: int) -> Progress:
        seat = self._seats[worker]
        return Progress(seat.notes.read(), 0, seat.active)

    def place(self, worker: int) -> str:
        return f"thread {name_of(worker)}"

    def tally(self) -> Tally:
        found = Tally()
        for seat in self._seats:
            if seat.counted is not None:
                found.add(seat.counted, 0)
            if seat.worker is not None:
                note = seat.notes.read()
                found.seconds[STEPS.index(note.step)] += max(0.0, self.clock() - note.since)
        return found

    def handle(self, worker: int) -> Handle:
        return Handle(None, None if self._seats[worker].worker is not None else 0)

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
        self._memory.close()
        self._turns.clear()
        for seat in self._seats:
            seat.worker = None
        del self._copies, self._manner  # at once, and not when this is garbage


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
