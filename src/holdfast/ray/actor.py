"""What a worker does that is an actor of a Ray cluster.

It carries out orders (`worker.items`), for which it is the host. Each call brings some orders, and
returns all that the worker says about them. With an answer travels what the answer leaves behind:
the random state and the dataset's state. So the trainer has all that a successor needs, whatever
becomes of the actor, its process and its machine.

A second thread of the actor tells what the first is doing (`look`, `stack`), while that is busy or
stuck.

After a death the trainer has to know what the worker is doing if it dies again, and Ray does not
say that. So then each step is announced (`Announcements`): the worker goes on when the trainer
knows. That takes a millisecond or two for each sample, in a few batches.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any, Final

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray import cloudpickle

import holdfast
from holdfast import private_names
from holdfast.autopsy.blackbox import COLLATE, FETCH, IDLE, SEND, START, Note
from holdfast.autopsy.stack import dump_of
from holdfast.transport import codec
from holdfast.worker.exceptions import describe
from holdfast.worker.interface import BATCH, Blueprint, WorkerSetup
from holdfast.worker.items import Worker
from holdfast.worker.message_host import GONE, READY, REFUSED, Message, MessageHost
from holdfast.worker.notes import ThreadNotes

Orders = list[tuple[str, int, Any]]
NOTES: Final = "notes"  # the concurrency group of what the second thread does
STEPS: Final = "steps"  # and of a third thread, which announces steps
KNOWN_WITHIN: Final = 5.0  # seconds that the worker waits until the trainer knows a step
SLICE: Final = 0.05  # seconds between two signs of life while it pauses


class Announcements:
    """What the worker is about to do, passed on before it does that."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._note: Note | None = None
        self._made = 0
        self._asked_for = -1

    def make(self, note: Note) -> None:
        """By the worker's thread. Returns when the trainer knows this: it asks for the next."""
        with self._changed:
            self._note = note
            self._made += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._asked_for >= self._made, KNOWN_WITHIN)

    def wait_for(self, number: int) -> Note:
        """By the thread that answers the trainer. The first has the number 0."""
        with self._changed:
            self._asked_for = number
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._made > number)
            assert self._note is not None
            return self._note


class _Notes(ThreadNotes):
    """Remembers which random state has to be sent, and announces steps if that is wanted."""

    unsent: bytes | None = None
    announcements: Announcements | None = None

    def note(self, task: int, position: int, step: int) -> None:
        super().note(task, position, step)
        if self.announcements is not None and step in (FETCH, COLLATE, SEND):
            self.announcements.make(self.read())

    def commit(self, number: int, size: int) -> None:
        super().commit(number, size)
        self.unsent = self.random_state(number)


class ActorWorker(MessageHost):
    """One worker. Implements `worker.interface.Host`."""

    own_process = own_dataset = True

    def __init__(self, blueprint: NDArray[np.uint8], version: str) -> None:
        self.recorder = _Notes()
        self._announcements = Announcements()
        self._blueprint = blueprint
        self._version = version
        self._said: list[Message] = []
        self._worker: Worker | None = None
        self._thread: int | None = None

    # -- calls ----------------------------------------------------------------------------

    def begin(self, setup: WorkerSetup) -> list[Message]:
        """Become torch's worker with this id."""
        self._thread = threading.get_ident()
        self.recorder.note(-1, -1, START)
        torch.set_num_threads(1)
        try:
            if self._version != holdfast.__version__:
                raise RuntimeError(
                    f"this node of the cluster has holdfast {holdfast.__version__}, and the "
                    f"trainer has {self._version}: install the same version on all nodes"
                )
            blueprint: Blueprint = cloudpickle.loads(self._blueprint.tobytes())
        except BaseException as error:
            self._say(REFUSED, describe(error, position=None, step="bootstrap"))
            return self._all_said()
        del self._blueprint
        self._worker = Worker(setup, blueprint, self)
        self._worker.begin()
        node = f"{ray.get_runtime_context().get_node_id()} on {socket.gethostname()}"
        self._say(READY, (node, os.getpid()))  # where it runs
        return self._all_said()

    def take_up(self) -> list[Message]:
        """Go to where the predecessor was."""
        if self._worker is not None and not self._worker.take_up():
            self._say(GONE)
        return self._all_said()

    def carry_out(self, orders: Orders, announced: bool) -> list[Message]:
        """Carry out orders, one after the other. `announced`: the trainer is to know each step."""
        worker = self._worker
        assert worker is not None, "it was refused"
        self.recorder.announcements = self._announcements if announced else None
        for kind, number, content in orders:
            worker.carry_out(kind, number, content)
        return self._all_said()

    @ray.method(concurrency_group=NOTES)
    def look(self) -> Note:
        """What the other thread is doing."""
        return self.recorder.read()

    @ray.method(concurrency_group=NOTES)
    def stack(self) -> str:
        """Where the other thread is, in the form of a dump of `faulthandler`."""
        return dump_of(private_names.current_frames().get(self._thread or 0), "of the worker")

    @ray.method(concurrency_group=STEPS)
    def announcement(self, number: int) -> Note:
        """What the worker is about to do. The worker waits until it is asked for the next."""
        return self._announcements.wait_for(number)

    def _all_said(self) -> list[Message]:
        self.recorder.note(-1, -1, IDLE)
        said, self._said = self._said, []
        return said

    # -- what it says ---------------------------------------------------------------------

    def _say(self, *message: Any) -> None:
        self._said.append(message)

    def publish(self, info: Any) -> None:
        private_names.set_worker_info(info)

    def encode(self, batch: Any) -> NDArray[np.uint8]:
        """As an array, which Ray passes on without a copy."""
        return np.frombuffer(codec.encode(batch, None), np.uint8)

    def answer(self, kind: bytes, number: int, content: Any, mark: int, state: bytes) -> None:
        random, self.recorder.unsent = self.recorder.unsent, None
        name = "batch" if kind is BATCH else kind  # `is` does not survive pickling
        self._say(name, number, content, mark, state or None, random)

    def between_samples(self) -> int:
        return 1 << 30  # there is nothing to do

    def pause(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.recorder.note(-1, -1, IDLE)
            time.sleep(min(left, SLICE))
        return True
