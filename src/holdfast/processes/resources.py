"""The processes, descriptors and mappings of a pool. They are made, replaced and released here and
nowhere else, so that none is forgotten.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import pickle
import select
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from holdfast import kernel
from holdfast.autopsy.blackbox import FEWEST_SLOTS, BlackBoxes
from holdfast.engine import background
from holdfast.engine.worker_records import WorkerRecord
from holdfast.processes.channel import Channel, pair
from holdfast.processes.lifeline import Lifeline
from holdfast.processes.nursery import Nursery
from holdfast.processes.nursery_main import NurseryLoop
from holdfast.processes.protocol import Equipment, Setup
from holdfast.processes.spare import Assignment
from holdfast.processes.spawn import Payload
from holdfast.processes.worker_main import run, warm_up
from holdfast.transport.mapping import create
from holdfast.transport.window import Kept, Window
from holdfast.worker import blas_threads
from holdfast.worker.faults import strike_start
from holdfast.worker.generator_states import global_states
from holdfast.worker.interface import Blueprint

_descriptors = threading.Lock()


def descriptor_lock() -> threading.Lock:
    """Held while descriptors are closed, or made and passed on by a fork: a number that one thread
    has just closed may already be another's."""
    return _descriptors


def _in_child(new_lock: Callable[[], threading.Lock] = threading.Lock) -> None:
    global _descriptors
    _descriptors = new_lock()  # a thread that held it is not here


os.register_at_fork(after_in_child=_in_child)


@dataclass(slots=True)
class Slot(WorkerRecord):
    """The same for a worker that is a process."""

    window: Window
    arena: int  # the arena's descriptor, for replacements
    spoiled: bool = False  # an earlier process may still write to the arena: never use it again
    channel: Channel | None = None
    pid: int | None = None
    exitcode: int | None = None
    size: int = 0  # bytes it had of its own when it said that it is too large,
    random_before: bytes | None = None  # and its random state before the last batch
    occupied: bool = False  # a process was ordered whose end has not been told
    dumped: bool = False  # it stalled, and has been told to write its stack and die
    kill_confirmed: bool = False
    answered: int = 0  # items of this seat, when it was started
    short: bool = False  # lack of memory may be why it died
    tidied: bool = False  # it was told to return unused memory, and was sent nothing since


class ProcessResources:
    """The resources of one pool."""

    def __init__(
        self,
        blueprint: Blueprint,
        payload: Payload | None,
        workers: int,
        before_fork: Callable[[], None],
        *,
        random_states: int = FEWEST_SLOTS,
    ) -> None:
        """`before_fork` is called before a nursery is forked from this process. `random_states`:
        how many of each worker are kept. The payload is closed with everything else, also if this
        fails. The blueprint is the iterator's: what the user has put into it may refer to the
        loader, and a thread holds this."""
        self.slots: list[Slot] = []
        self.kept = Kept()  # by the consumer, of all arenas
        self.channels: dict[int, int] = {}  # descriptor -> worker
        self.auxiliary: dict[int, Channel] = {}  # by descriptor; see `auxiliary`
        self.poll = select.poll()
        self.on_backlog: Callable[[], None] = lambda: None
        """Called when part of an order has to wait for room."""
        self._blueprint = weakref.ref(blueprint)
        self._payload = payload
        self._before_fork = before_fork
        self._nursery: Nursery | None = None
        with contextlib.ExitStack() as undo:
            if payload is not None:
                undo.callback(payload.close)
            self.doorbell = kernel.Doorbell()
            undo.callback(self.doorbell.close)
            self.lifeline = Lifeline()
            undo.callback(self.lifeline.cut)
            # A rehearsal has a black box beside that of its worker. The last is for a leak probe.
            self.boxes = BlackBoxes(
                (2 * workers if blueprint.iterable else workers) + 1, random_states
            )
            undo.callback(self.boxes.close)
            for worker in range(workers):
                fd = create(f"holdfast-{worker}")
                undo.callback(os.close, fd)
                self.slots.append(Slot(Window(fd, self.kept), fd))
            self._new_nursery()
            undo.pop_all()
        self.poll.register(self.doorbell, select.POLLIN)

    # -- the nursery ----------------------------------------------------------------------

    @property
    def nursery(self) -> Nursery:
        assert self._nursery is not None, "there is one from the first moment on"
        return self._nursery

    def _new_nursery(self) -> None:
        if self._payload is not None:
            nursery = Nursery.spawn(self._payload, self.boxes.fd, self.lifeline.reading)
        else:
            blueprint = self._blueprint()
            if blueprint is None:
                raise OSError(errno.ESRCH, "the iterator is gone")
            blas_threads.find()
            global_states()  # where they are in memory: found out here, and not in each worker
            self._before_fork()
            loop = functools.partial(self._nursery_loop, blueprint)
            nursery = Nursery.fork(loop, self.boxes.fd, self.lifeline.reading)
        self.poll.register(nursery.control, select.POLLIN)
        self.poll.register(nursery.process, select.POLLIN)
        nursery.on_backlog = self._await_room
        self._nursery = nursery

    def _await_room(self) -> None:
        """An order to the nursery has to wait."""
        self.on_backlog()
        self.poll.modify(self.nursery.control, select.POLLIN | select.POLLOUT)

    def flush_nursery(self) -> None:
        """Send what had to wait, now that there may be room."""
        self.nursery.flush()
        orders = select.POLLOUT if self.nursery.pending else 0
        self.poll.modify(self.nursery.control, select.POLLIN | orders)

    def drop_nursery(self) -> int | None:
        """End the nursery, and all workers with it. The next start makes another. Returns its
        status, as waitpid gives it, if that can be known."""
        self.poll.unregister(self.nursery.control)
        self.poll.unregister(self.nursery.process)
        self.nursery.kill()
        self.nursery.wait(1.0)
        self.nursery.close()
        return self.nursery.status

    def _nursery_loop(self, blueprint: Blueprint, loop: NurseryLoop) -> None:
        """In the forked nursery."""
        self.disown()
        for other in background.pools_of_ancestors():
            other.disown()
        blas_threads.limit()
        boxes, line = self.boxes.fd, self.lifeline.reading

        def deliver(given: Assignment, parent: int) -> None:
            equipment = Equipment(given.channel, given.arena, boxes, parent, line, given.dump)
            run(pickle.loads(given.setup), equipment, lambda: blueprint)

        loop.serve(deliver, warm_up)

    # -- one worker's ---------------------------------------------------------------------

    def prepare(self, worker: int, generation: int) -> None:
        """Make what a start needs and was lost. An OSError leaves everything as it was."""
        if self.nursery.closed:
            strike_start("make-nursery", worker, generation)
            with descriptor_lock():
                self._new_nursery()
        if self.slots[worker].spoiled:
            strike_start("make-arena", worker, generation)
            self._new_arena(worker)

    def start(self, setup: Setup) -> None:
        """Order a worker from the nursery, on a channel of its own."""
        worker, place = setup.worker, self.slots[setup.worker]
        strike_start("make-channel", worker, setup.generation)
        channel, theirs = pair()
        with theirs:
            place.channel = channel
            self.channels[channel.fileno()] = worker
            self.poll.register(channel.fileno(), select.POLLIN)
            self.nursery.start(
                worker, setup.generation, pickle.dumps(setup, 5), theirs.fileno(), place.arena
            )

    def add_auxiliary(self, channel: Channel, region: int) -> None:
        """Add the channel of a process that is no worker."""
        self.auxiliary[channel.fileno()] = channel
        self.channels[channel.fileno()] = region
        self.poll.register(channel.fileno(), select.POLLIN)

    def drop_auxiliary(self, channel: Channel) -> None:
        self.auxiliary.pop(channel.fileno(), None)
        self.channels.pop(channel.fileno(), None)
        self.poll.unregister(channel.fileno())
        channel.close()

    def post(self, channel: Channel, message: bytes) -> None:
        if channel.post(message):
            self.on_backlog()
            self.poll.modify(channel.fileno(), select.POLLIN | select.POLLOUT)

    def backlogged(self) -> list[int]:
        """The descriptors of channels where part of an order waits."""
        channels = (place.channel for place in self.slots)
        return [one.fileno() for one in channels if one is not None and one.pending]

    def flush(self, channel: Channel) -> None:
        """Send what had to wait, now that there is room."""
        channel.flush()
        if not channel.pending:
            self.poll.modify(channel.fileno(), select.POLLIN)

    def drop_channel(self, worker: int) -> None:
        channel = self.slots[worker].channel
        if channel is None:
            return
        self.channels.pop(channel.fileno(), None)
        self.poll.unregister(channel.fileno())
        channel.close()
        self.slots[worker].channel = None

    def _new_arena(self, worker: int) -> None:
        place = self.slots[worker]
        fd = create(f"holdfast-{worker}")
        try:
            window = Window(fd, self.kept)
        except BaseException:
            os.close(fd)
            raise
        place.window.close()
        os.close(place.arena)
        place.arena, place.window, place.spoiled = fd, window, False

    # -- the end --------------------------------------------------------------------------

    def send_all_away(self, grace: float) -> None:
        """Tell all processes to exit, within `grace` seconds, without waiting for them."""
        with descriptor_lock():
            for place in self.slots:
                if place.channel is not None:
                    place.channel.close()  # idle workers see the end, sending ones a broken pipe
        if self.nursery.closed:
            return
        if self._payload is not None and all(place.pid is None for place in self.slots):
            self.nursery.kill()  # still importing torch: there are no workers
        else:
            self.nursery.stop(grace)

    def release_all(self) -> None:
        """Release everything but the batches that the consumer keeps, whichever part fails."""
        with contextlib.ExitStack() as ends:
            ends.enter_context(descriptor_lock())
            ends.callback(self.doorbell.close)
            if self._payload is not None:
                ends.callback(self._payload.close)
            ends.callback(self.boxes.close)
            for place in self.slots:
                ends.callback(os.close, place.arena)
                ends.callback(place.window.close)
            ends.callback(self.lifeline.cut)
            ends.callback(self.nursery.close)

    def disown(self) -> None:
        """In a process forked from the owner: close descriptors that are not its to hold."""
        self.lifeline.let_go()
        for place in self.slots:
            if place.channel is not None:
                place.channel.disown()
        for channel in self.auxiliary.values():
            channel.disown()
        if self._nursery is not None:
            self._nursery.disown()
