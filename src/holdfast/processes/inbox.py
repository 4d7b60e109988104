"""The messages of worker processes become events."""

from __future__ import annotations

import pickle
from time import monotonic
from typing import Any

from holdfast.engine import events as ev
from holdfast.engine.continuation import ATTEMPTS, ResumptionResult
from holdfast.engine.epoch import Failed, Reported, StartRefused
from holdfast.engine.supervisor import Supervisor
from holdfast.limits.growth import Point
from holdfast.processes import protocol
from holdfast.processes.channel import Channel
from holdfast.processes.protocol import BATCH, CONTENT, HEAD, POINT, SIZES
from holdfast.processes.resources import Slot
from holdfast.transport import codec
from holdfast.worker.stream_resumption import STATE_FAILED
from holdfast.worker.tolerant import DROPPED

__all__ = ["Inbox"]


class Inbox:
    """Takes the messages of all workers of a pool."""

    def __init__(self, supervisor: Supervisor, slots: list[Slot], iterable: bool) -> None:
        self._supervisor = supervisor
        self._tell = supervisor.tell
        self._upkeep = supervisor.upkeep
        self._slots = slots
        self._iterable = iterable

    def take_all(self, worker: int, channel: Channel) -> bool:
        """Take everything that a worker has sent; whether that was anything."""
        heard = False
        while (message := channel.poll()) is not None:
            heard = True
            self.take(worker, message)
        return heard

    def take(self, worker: int, message: bytes) -> None:
        """Take one message."""
        slot = self._slots[worker]
        slot.active = monotonic()
        kind = message[:1]
        event: ev.Event
        if kind == BATCH:  # first, because nearly all are
            number, content = self._open(slot, message)
            parcel = codec.Parcel(memoryview(message)[content:], slot.window)
            told = slot.reports or slot.samples is not None
            answer = _with_reports(slot, parcel) if told else parcel
            event = ev.BatchReady(worker, slot.generation, number, answer, parcel.nbytes)
        elif kind == protocol.READY:
            slot.ready = True
            self._upkeep.ready(worker)
            event = ev.WorkerReady(worker, slot.generation)
        elif kind == protocol.REFUSED:
            refusal = StartRefused(worker, slot.pid, pickle.loads(message[1:]))
            self._supervisor.refusal = refusal
            event = ev.WorkerRefused(worker, slot.generation)
        elif kind == protocol.REPORT:
            reports, slot.samples = pickle.loads(message[1:])
            slot.reports = tuple(reports)
            return
        elif kind == protocol.TAKEN_UP:
            self._taken_up(worker, slot, pickle.loads(message[1:]))
            return
        elif kind == protocol.GROWN:
            slot.size, _ = SIZES.unpack_from(message, 1)
            # Not from its black box: the worker goes on, and overwrites that.
            slot.random_before = message[1 + SIZES.size :] or None
            self._upkeep.grown(worker, slot.size)
            event = ev.WorkerGrown(worker, slot.generation)
        elif kind == protocol.RAISED:
            self._upkeep.memory.raised(worker, *SIZES.unpack_from(message, 1))
            return
        elif kind == protocol.MEMORY:
            self._upkeep.memory.measured(worker, Point(*POINT.unpack_from(message, 1)))
            return
        elif kind == protocol.REMARK:
            about, text = pickle.loads(message[1:])
            if about == STATE_FAILED:
                slot.progress.state_error = text
            self._upkeep.remark(worker, about, text)
            return
        elif kind == protocol.RETIRED:
            event = ev.WorkerRetired(worker, slot.generation, slot.active)
        elif kind == protocol.SURVIVED:
            event = ev.Survived(worker, slot.generation)
        else:
            event = self._answer(worker, slot, kind, message)
        self._tell(event)

    def _answer(self, worker: int, slot: Slot, kind: bytes, message: bytes) -> ev.Event:
        """The event for an answer without a batch."""
        number, content = self._open(slot, message)
        if kind == protocol.ERROR:
            answer: Any = Failed(pickle.loads(message[content:]))
            if slot.reports or slot.samples is not None:
                answer = _with_reports(slot, answer)
            return ev.BatchReady(worker, slot.generation, number, answer)
        if kind == protocol.NOTHING_LEFT:
            return ev.BatchReady(worker, slot.generation, number, _with_reports(slot, DROPPED))
        if kind == protocol.ENDED:
            self._supervisor.ended_with(slot.epoch, slot.reports)
            slot.reports, slot.samples = (), None
            return ev.ReplicaEnded(worker, slot.generation, number)
        if kind == protocol.TOLD:
            return ev.Told(worker, slot.generation)
        assert kind == protocol.RESUMED, kind
        begun = slot.resumptions.popleft()
        slot.progress.resumed(message[content:], begun.seeds)
        slot.epoch = begun.epoch
        return ev.Resumed(worker, slot.generation)

    def _open(self, slot: Slot, message: bytes) -> tuple[int, int]:
        """The number of the task that is answered, and where the content begins."""
        number, size, mark = HEAD.unpack_from(message, 1)
        content: int = CONTENT + size
        if self._iterable:
            slot.progress.received(mark, message[CONTENT:content] if size else None)
        return number, content

    def _taken_up(self, worker: int, slot: Slot, finding: ResumptionResult) -> None:
        """A process has tried to continue the stream of its predecessor."""
        if finding.leaves:
            self.remark_on_resumption(worker, finding)
            event: ev.Event = ev.ResumptionFailed(
                worker, slot.generation, slot.active, finding.unfit
            )
            self._tell(event)
            return
        slot.progress.raised = 0
        self._upkeep.taken_up(worker, finding)
        if finding.lost:
            why = finding.in_words()
            self._tell(ev.WorkerStreamLost(worker, slot.generation, slot.active, why))

    def remark_on_resumption(self, worker: int, finding: ResumptionResult) -> None:
        """A process exits because of an exception on its way: log that."""
        if finding.to_be_tried_again:
            self._slots[worker].progress.raised += 1
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


def _with_reports(slot: Slot, result: Any) -> Reported:
    """The answer, with the bad samples that were reported just before it."""
    told = Reported(result, slot.reports, slot.samples)
    slot.reports, slot.samples = (), None
    return told
