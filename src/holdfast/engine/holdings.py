"""All that a pool has to let go of: processes, descriptors, mappings. Made, replaced and given back
here and nowhere else, so that nothing is forgotten.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from holdfast.autopsy.blackbox import BlackBoxes
from holdfast.engine import registry
from holdfast.engine.channel import Channel, pair
from holdfast.engine.continuation import Course
from holdfast.engine.faults import strike_start
from holdfast.engine.lifeline import Lifeline
from holdfast.engine.nurse import Nurse
from holdfast.engine.nursery import Nursery
from holdfast.engine.payload import Payload
from holdfast.engine.protocol import Blueprint, Equipment, Setup
from holdfast.engine.silence import Pulse
from holdfast.engine.vocabulary import Resumption
from holdfast.engine.worker import run
from holdfast.memory import arena as arenas
from holdfast.memory import threads
from holdfast.memory.window import Kept, Window
from holdfast.samples.record import BadSample

__all__ = ["Gone", "Holdings", "Place"]

GRACE = 1.0  # seconds a worker has to finish what it does when the pool closes, before SIGKILL


Gone = Literal["died", "recycled", "renewed"]
"""Why a worker was replaced: its death; its size; or the nursery was, because of a lock in it."""


@dataclass(slots=True)
class Place:
    """What the pool keeps for each worker id."""

    window: Window
    arena: int  # the arena's descriptor, for replacements
    spoiled: bool = False  # whoever had the arena may write to it yet: it is never used again
    channel: Channel | None = None
    pulse: Pulse = field(default_factory=Pulse)
    pid: int | None = None
    exitcode: int | None = None
    course: Course = field(default_factory=Course)  # of its stream, if it is one
    size: int = 0  # bytes it had of its own when it said that it is too large,
    random_before: bytes | None = None  # and its random state before the last batch
    occupied: bool = False  # a process was ordered whose end has not been told
    gone: Gone = "died"  # why there is another in its place
    dumped: bool = False  # it stalled, and has been told to write its stack and die
    kill_confirmed: bool = False
    resumptions: deque[Resumption] = field(default_factory=deque)  # ordered and not answered
    epoch: int = 0  # of its replica
    tidied: bool = False  # has been told to give back what it does not use, and nothing since
    reports: tuple[BadSample, ...] = ()  # of the batch whose answer comes next,
    samples: int | None = None  # and how many it took of a stream, if not as many as asked for


class Holdings:
    """Those of one pool."""

    def __init__(
        self,
        blueprint: Blueprint,
        payload: Payload | None,
        workers: int,
        wake: int,
        before_fork: Callable[[], None],
    ) -> None:
        """`before_fork` is called before a nursery is forked from this process."""
        self.places: list[Place] = []
        self.kept = Kept()  # by the consumer, of all arenas there ever were
        self.channels: dict[int, int] = {}  # descriptor -> worker
        self.beside: dict[int, Channel] = {}  # by descriptor; see `beside`
        self.poll = select.poll()
        self.backlog = False  # part of an order waits for room, and the watch does not know it yet
        self._blueprint = blueprint
        self._payload = payload
        self._before_fork = before_fork
        self._nursery: Nursery | None = None
        with contextlib.ExitStack() as undo:
            self.lifeline = Lifeline()
            undo.callback(self.lifeline.cut)
            # Each stream may be tried by another process while its worker is at it. The last one
            # is for a leak probe.
            self.boxes = BlackBoxes((2 * workers if blueprint.iterable else workers) + 1)
            undo.callback(self.boxes.close)
            for worker in range(workers):
                fd = arenas.create(f"holdfast-{worker}")
                undo.callback(os.close, fd)
                self.places.append(Place(Window(fd, self.kept), fd))
            self._new_nursery()
            undo.pop_all()
        self.poll.register(wake, select.POLLIN)

    # -- the nursery ----------------------------------------------------------------------

    @property
    def nursery(self) -> Nursery:
        assert self._nursery is not None, "there is one from the first moment on"
        return self._nursery

    def _new_nursery(self) -> None:
        if self._payload is not None:
            nursery = Nursery.spawn(self._payload, self.boxes.fd, self.lifeline.reading)
        else:
            threads.find()
            self._before_fork()
            nursery = Nursery.fork(self._nurse, self.boxes.fd, self.lifeline.reading)
        self.poll.register(nursery.control, select.POLLIN)
        self.poll.register(nursery.process, select.POLLIN)
        nursery.on_backlog = self._await_room
        self._nursery = nursery

    def _await_room(self) -> None:
        """An order to the nursery has to wait."""
        self.backlog = True
        self.poll.modify(self.nursery.control, select.POLLIN | select.POLLOUT)

    def flush_nursery(self) -> None:
        """Send what had to wait, now that there may be room."""
        self.nursery.flush()
        orders = select.POLLOUT if self.nursery.pending else 0
        self.poll.modify(self.nursery.control, select.POLLIN | orders)

    def drop_nursery(self) -> int | None:
        """And with it all workers, which die with it. The next start makes another. Its status, as
        waitpid gives it, if that can be known."""
        self.poll.unregister(self.nursery.control)
        self.poll.unregister(self.nursery.process)
        self.nursery.kill()
        self.nursery.wait(1.0)
        self.nursery.close()
        return self.nursery.status

    def _nurse(self, nurse: Nurse) -> None:
        """In the forked nursery."""
        self.disown()
        for other in registry.of_ancestors():
            other.disown()
        threads.limit()
        blueprint, boxes, line = self._blueprint, self.boxes.fd, self.lifeline.reading

        def deliver(setup: bytes, channel: int, arena: int, parent: int, dump: int | None) -> None:
            run(
                pickle.loads(setup),
                Equipment(channel, arena, boxes, parent, line, dump),
                lambda: blueprint,
            )

        nurse.serve(deliver)

    # -- one worker's ---------------------------------------------------------------------

    def prepare(self, worker: int, generation: int) -> None:
        """Make what a start needs and was lost. An OSError leaves everything as it was."""
        if self.nursery.closed:
            strike_start("make-nursery", worker, generation)
            with registry.descriptors():
                self._new_nursery()
        if self.places[worker].spoiled:
            strike_start("make-arena", worker, generation)
            self._new_arena(worker)

    def start(self, setup: Setup) -> None:
        """Order a worker from the nursery, on a channel of its own."""
        worker, place = setup.worker, self.places[setup.worker]
        strike_start("make-channel", worker, setup.generation)
        channel, theirs = pair()
        with theirs:
            place.channel = channel
            self.channels[channel.fileno()] = worker
            self.poll.register(channel.fileno(), select.POLLIN)
            self.nursery.start(
                worker, setup.generation, pickle.dumps(setup, 5), theirs.fileno(), place.arena
            )

    def add_beside(self, channel: Channel, region: int) -> None:
        """A process that is no worker: it has a channel, and no place."""
        self.beside[channel.fileno()] = channel
        self.channels[channel.fileno()] = region
        self.poll.register(channel.fileno(), select.POLLIN)

    def drop_beside(self, channel: Channel) -> None:
        self.beside.pop(channel.fileno(), None)
        self.channels.pop(channel.fileno(), None)
        self.poll.unregister(channel.fileno())
        channel.close()

    def post(self, channel: Channel, message: bytes) -> None:
        if channel.post(message):
            self.backlog = True
            self.poll.modify(channel.fileno(), select.POLLIN | select.POLLOUT)

    def take_backlog(self) -> list[int]:
        """The descriptors of channels where part of an order waits: the watch knows now."""
        self.backlog = False
        channels = (place.channel for place in self.places)
        return [one.fileno() for one in channels if one is not None and one.pending]

    def flush(self, channel: Channel) -> None:
        """Send what had to wait, now that there is room."""
        channel.flush()
        if not channel.pending:
            self.poll.modify(channel.fileno(), select.POLLIN)

    def drop_channel(self, worker: int) -> None:
        channel = self.places[worker].channel
        if channel is None:
            return
        self.channels.pop(channel.fileno(), None)
        self.poll.unregister(channel.fileno())
        channel.close()
        self.places[worker].channel = None

    def _new_arena(self, worker: int) -> None:
        place = self.places[worker]
        fd = arenas.create(f"holdfast-{worker}")
        try:
            window = Window(fd, self.kept)
        except BaseException:
            os.close(fd)
            raise
        place.window.close()
        os.close(place.arena)
        place.arena, place.window, place.spoiled = fd, window, False

    # -- the end --------------------------------------------------------------------------

    def send_all_away(self) -> None:
        """Tell everybody; wait for nobody."""
        with registry.descriptors():
            for place in self.places:
                if place.channel is not None:
                    place.channel.close()  # idle workers see the end, sending ones a broken pipe
        if self.nursery.closed:
            return
        if self._payload is not None and all(place.pid is None for place in self.places):
            self.nursery.kill()  # still importing torch; there is nobody to be let finish
        else:
            self.nursery.stop(GRACE)

    def let_go(self) -> None:
        """Of everything but the batches the consumer keeps, even if one makes trouble."""
        with contextlib.ExitStack() as ends:
            if self._payload is not None:
                ends.callback(self._payload.close)
            ends.callback(self.boxes.close)
            for place in self.places:
                ends.callback(os.close, place.arena)
                ends.callback(place.window.close)
            ends.callback(self.lifeline.cut)
            ends.callback(self.nursery.close)

    def disown(self) -> None:
        """In a process forked from the owner: let go of descriptors that are not its to hold."""
        self.lifeline.let_go()
        for place in self.places:
            if place.channel is not None:
                place.channel.disown()
        for channel in self.beside.values():
            channel.disown()
        if self._nursery is not None:
            self._nursery.disown()
