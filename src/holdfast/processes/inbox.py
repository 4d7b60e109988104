"""The messages of worker processes: decoded, and passed on."""

from __future__ import annotations

import pickle
from time import monotonic

from holdfast.engine import events as ev
from holdfast.engine.epoch import StartRefused
from holdfast.engine.supervisor import Supervisor
from holdfast.engine.worker_records import Answers
from holdfast.limits.growth import Point
from holdfast.processes import protocol
from holdfast.processes.channel import Channel
from holdfast.processes.protocol import CONTENT, HEAD, POINT, SIZES
from holdfast.processes.resources import Slot
from holdfast.transport import codec
from holdfast.worker.interface import BATCH, ERROR


class Inbox:
    """Takes the messages of all workers of a pool."""

    def __init__(self, supervisor: Supervisor, slots: list[Slot], iterable: bool) -> None:
        self.answers = Answers(supervisor, slots, iterable)
        self._supervisor = supervisor
        self._tell = supervisor.tell
        self._upkeep = supervisor.upkeep
        self._slots = slots

    def take_all(self, worker: int, channel: Channel) -> bool:
        """Take everything that a worker has sent; whether that was anything."""
        heard = False
        while (message := channel.poll()) is not None:
            heard = True
            self.take(worker, message)
        return heard

    def take(self, worker: int, message: bytes) -> None:
        """Take one message."""
        slot, answers = self._slots[worker], self.answers
        slot.active = monotonic()
        kind = message[:1]
        if kind == BATCH:  # first, because nearly all are
            number, size, mark = HEAD.unpack_from(message, 1)
            content = CONTENT + size
            parcel = codec.Parcel(memoryview(message)[content:], slot.window)
            answers.batch(worker, number, parcel, mark, message[CONTENT:content] or None)
        elif kind == protocol.READY:
            answers.is_ready(worker)
        elif kind == protocol.REFUSED:
            refusal = StartRefused(worker, slot.pid, pickle.loads(message[1:]))
            self._supervisor.refusal = refusal
            self._tell(ev.WorkerRefused(worker, slot.generation))
        elif kind == protocol.REPORT:
            answers.report(worker, *pickle.loads(message[1:]))
        elif kind == protocol.TAKEN_UP:
            answers.taken_up(worker, pickle.loads(message[1:]))
        elif kind == protocol.GROWN:
            slot.size, _ = SIZES.unpack_from(message, 1)
            # Not from its black box: the worker goes on, and overwrites that.
            slot.random_before = message[1 + SIZES.size :] or None
            self._upkeep.grown(worker, slot.size)
            self._tell(ev.WorkerGrown(worker, slot.generation))
        elif kind == protocol.RAISED:
            self._upkeep.memory.raised(worker, *SIZES.unpack_from(message, 1))
        elif kind == protocol.MEMORY:
            self._upkeep.memory.measured(worker, Point(*POINT.unpack_from(message, 1)))
        elif kind == protocol.REMARK:
            answers.remark(worker, *pickle.loads(message[1:]))
        elif kind == protocol.RETIRED:
            self._tell(ev.WorkerRetired(worker, slot.generation, slot.active))
        elif kind == protocol.SURVIVED:
            answers.survived(worker)
        else:
            number, size, mark = HEAD.unpack_from(message, 1)
            content = CONTENT + size
            body = message[content:]
            answers.other(
                worker,
                kind,
                number,
                pickle.loads(body) if kind == ERROR else body,
                mark,
                message[CONTENT:content] or None,
            )
