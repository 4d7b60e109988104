"""What a worker does that is an actor of a Ray cluster.

It carries out orders (`worker.items`), for which it is the host. Each call brings some orders, and
returns all that the worker says about them. With an answer travels what the answer leaves behind:
the random state and the dataset's state. So the trainer has all that a successor needs, whatever
becomes of the actor, its process and its machine.

A second thread of the actor tells what the first is doing (`look`, `stack`), while that is busy or
stuck.
"""

from __future__ import annotations

import os
import socket
import threading
from typing import Any, Final

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray import cloudpickle

import holdfast
from holdfast import private_names
from holdfast.autopsy.blackbox import IDLE, START, Note
from holdfast.autopsy.stack import dump_of
from holdfast.transport import codec
from holdfast.worker.exceptions import describe
from holdfast.worker.interface import BATCH, Blueprint, WorkerSetup
from holdfast.worker.items import Worker
from holdfast.worker.message_host import GONE, READY, REFUSED, Message, MessageHost
from holdfast.worker.notes import ThreadNotes

Orders = list[tuple[str, int, Any]]
NOTES: Final = "notes"  # the concurrency group of what the second thread does


class _Notes(ThreadNotes):
    """Remembers which random state has to be sent."""

    unsent: bytes | None = None

    def commit(self, number: int, size: int) -> None:
        super().commit(number, size)
        self.unsent = self.random_state(number)


class ActorWorker(MessageHost):
    """One worker. Implements `worker.interface.Host`."""

    own_process = own_dataset = True

    def __init__(self, setup: WorkerSetup, blueprint: NDArray[np.uint8], version: str) -> None:
        self.recorder = _Notes()
        self._setup = setup
        self._blueprint = blueprint
        self._version = version
        self._said: list[Message] = []
        self._worker: Worker | None = None
        self._thread: int | None = None

    # -- calls ----------------------------------------------------------------------------

    def begin(self) -> list[Message]:
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
        self._worker = Worker(self._setup, blueprint, self)
        self._worker.begin()
        node = f"{ray.get_runtime_context().get_node_id()} on {socket.gethostname()}"
        self._say(READY, (node, os.getpid()))  # where it runs
        return self._all_said()

    def take_up(self) -> list[Message]:
        """Go to where the predecessor was."""
        if self._worker is not None and not self._worker.take_up():
            self._say(GONE)
        return self._all_said()

    def carry_out(self, orders: Orders) -> list[Message]:
        """Carry out orders, one after the other."""
        worker = self._worker
        assert worker is not None, "it was refused"
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
        return True
