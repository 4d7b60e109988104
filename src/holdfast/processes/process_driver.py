"""The driver of worker processes: orders become messages and signals, and results become events.

Messages from workers are handled in `inbox`, starts in `starts`, exits and the nursery in `exits`.
This module sends orders and waits.

It never waits long under the pool's lock, except when the pool is closed; `engine.pool` lists the
exceptions.
"""

from __future__ import annotations

import os
import select
import signal
import time
from functools import partial
from typing import Any

from holdfast import kernel
from holdfast.autopsy.blackbox import FEWEST_SLOTS
from holdfast.autopsy.evidence import Evidence
from holdfast.autopsy.investigator import Investigator
from holdfast.autopsy.readers import procfs
from holdfast.autopsy.tally import Tally
from holdfast.autopsy.verdict import Verdict
from holdfast.engine import events as ev
from holdfast.engine.checkpoint import WorkerCheckpoint
from holdfast.engine.driver import DriverOptions, Handle, Processor, Progress, Urgent
from holdfast.engine.supervisor import Supervisor
from holdfast.limits import gauge
from holdfast.processes.auxiliary import AuxiliaryProcesses
from holdfast.processes.channel import PACKET, Channel
from holdfast.processes.exits import Exits
from holdfast.processes.inbox import Inbox
from holdfast.processes.protocol import Order, order
from holdfast.processes.resources import ProcessResources, descriptor_lock
from holdfast.processes.spawn import Payload
from holdfast.processes.starts import Starts, explaining
from holdfast.samples.substitute import BatchHints
from holdfast.worker.interface import Blueprint

_Ready = list[tuple[int, int]]  # descriptors, and what they are ready for


class ProcessDriver:
    """Implements `Driver`, where the methods are described."""

    def __init__(
        self,
        blueprint: Blueprint,
        payload: Payload | None,
        method: str,
        limits: ev.Limits,
        options: DriverOptions,
    ) -> None:
        self.limits = limits
        self.clock = time.monotonic
        self.backlog = False
        self.spin = kernel.yield_processor()
        self.investigator = Investigator(
            method, options.workers, options.logbook, stall_timeout=options.stall_timeout
        )
        with explaining(options.workers, options.origin), descriptor_lock():
            self.resources = ProcessResources(
                blueprint,
                payload,
                options.workers,
                self.investigator.before_fork,
                random_states=options.answers_ahead + FEWEST_SLOTS,
            )
        self.resources.on_backlog = self._note_backlog
        self.kept = self.resources.kept
        self._slots = self.resources.slots
        for slot in self._slots:
            slot.progress.seeds = options.seeds
        self._options = options
        for worker, one in enumerate(options.restored):
            self._restore(worker, one)
        self._auxiliary = AuxiliaryProcesses(self.resources, options.workers, options.stall_timeout)
        self._orders: dict[int, tuple[Channel, list[tuple[Order, int, Any]]]] = {}  # not sent yet
        self._watch = select.poll()
        self._watched: dict[int, int] = {}
        self._doorbell = self.resources.doorbell
        self._watch.register(self._doorbell, select.POLLIN)

    def connect(self, supervisor: Supervisor) -> None:
        options = self._options
        self._after = supervisor.after
        self._tell = supervisor.tell
        self._inbox = Inbox(supervisor, self._slots, options.iterable)
        self._exits = Exits(
            supervisor,
            self.resources,
            self.investigator,
            self._auxiliary,
            self._inbox,
            self.limits,
            options,
        )
        self._starts = Starts(supervisor, self.resources, self._auxiliary, self._exits, options)

    def _restore(self, worker: int, begun: WorkerCheckpoint) -> None:
        """The first process of a seat begins as if it replaced one that was in this place."""
        states = {number: state for number, _, state in begun.random_states()}
        self.resources.boxes.put_random_states(worker, states)
        self._slots[worker].progress = begun.progress(self._options.seeds)

    # -- orders ---------------------------------------------------------------------------

    def start(self, order: ev.Start) -> None:
        self._starts.start(order)

    def rehearse(self, order: ev.Rehearse) -> None:
        self._starts.rehearse(order)

    def find_leak(self, worker: int, batches: int, nbytes: int) -> bool:
        return self._starts.find_leak(worker, batches, nbytes)

    def send(self, worker: int, item: ev.Item, hint: BatchHints | None) -> None:
        slot = self._slots[worker]
        if slot.channel is None:
            return  # it died a moment ago; its replacement will be asked
        slot.tidied = False
        one = slot.order(item, hint)
        orders = self._orders.get(worker)
        if orders is None or orders[0] is not slot.channel:  # else it is for a process before it
            self._orders[worker] = slot.channel, [one]
        else:
            orders[1].append(one)

    def flush(self) -> None:
        """Each worker gets what it was given in one message."""
        now = time.monotonic()
        for worker, (channel, orders) in self._orders.items():
            slot = self._slots[worker]
            if slot.channel is not channel:
                continue  # it died a moment ago; its replacement is asked
            released = slot.window.take_released()
            slot.active = now
            if len(orders) == 1:
                message = order(*orders[0], released=released)
            else:
                message = order("several", 0, orders, released)
            self.resources.post(channel, message)
            if not self._options.iterable and len(message) <= PACKET:
                self._starts.sent.append(message)
        self._orders.clear()

    def urge(self, worker: int, kind: Urgent, content: object = None) -> bool:
        slot = self._slots[worker]
        if slot.channel is None or not slot.ready:
            return False
        if kind == "shrink":
            if slot.tidied and not slot.window.has_released:
                return True  # there is nothing new to return
            slot.tidied = True
        message = order(kind, 0, content, slot.window.take_released())
        self.resources.post(slot.channel, message)
        self.resources.boxes.ring_doorbell(worker)
        return True

    def release(self) -> None:
        """What small batches leave goes with the next task."""
        for slot in self._slots:
            if slot.channel is not None and slot.window.has_released:
                released = slot.window.take_released()
                self.resources.post(slot.channel, order("released", 0, None, released))

    def dump(self, worker: int, generation: int) -> None:
        def progress() -> object:
            shown = self.progress(worker)
            return shown.note, shown.parts

        if not self.investigator.before_kill(worker, progress):
            self._tell(ev.WorkerWentOn(worker, generation))  # a slow step has just come to its end
            return
        self._slots[worker].dumped = True
        self._signal(worker, generation, signal.SIGABRT)

    def kill(self, worker: int, generation: int) -> None:
        self._signal(worker, generation, signal.SIGKILL)

    def _signal(self, worker: int, generation: int, number: int) -> None:
        self._slots[worker].kill_confirmed = False
        self.resources.nursery.signal(worker, generation, number)

    def terminate(self, worker: int, generation: int) -> None:
        """If the process is gone by now, the nursery knows."""
        if generation == self._slots[worker].generation:
            self.investigator.sent(worker)
            self.resources.nursery.signal(worker, generation, signal.SIGKILL)

    def abandon(self, worker: int, generation: int) -> None:
        self._after(partial(self._exits.abandon, worker, generation))

    def renew(self) -> None:
        self._exits.renew()

    # -- waiting --------------------------------------------------------------------------

    def hear(self, worker: int) -> bool:
        channel = self._slots[worker].channel
        message = None if channel is None else channel.poll()
        if message is None:
            return False
        self._inbox.take(worker, message)
        return True

    def poll(self, timeout: float) -> _Ready:
        return self.resources.poll.poll(timeout * 1000)

    def take_in(self, found: _Ready) -> bool:
        self.investigator.begin()  # it reads much; meanwhile the first workers start
        heard = False
        for fd, mask in found:
            worker = self.resources.channels.get(fd)
            if worker is None:
                if fd == self._doorbell.fileno():
                    self._doorbell.clear()
                else:
                    self._exits.attend(fd, mask)
            elif self._auxiliary.owns(worker):
                self._auxiliary.hear(worker)
            else:
                heard |= self._attend(worker, fd, mask)
        return heard

    def _attend(self, worker: int, fd: int, mask: int) -> bool:
        """The channel of a worker is ready."""
        channel = self._slots[worker].channel
        if channel is None or channel.fileno() != fd:
            return False  # it was replaced a moment ago
        if mask & select.POLLOUT:
            self.resources.flush(channel)
        if not mask & ~select.POLLOUT:
            return False
        heard = self._inbox.take_all(worker, channel)
        if not channel.open and self._slots[worker].channel is channel:
            self.resources.drop_channel(worker)  # the nursery reports its death
        return heard

    def _note_backlog(self) -> None:
        self.backlog = True

    def prepare_watch(self, batches: bool) -> None:
        self.backlog = False
        nursery, watched = self.resources.nursery, dict[int, int]()
        if not nursery.closed:
            # The rest of a large order is sent when there is room, whatever the consumer does.
            watched = dict.fromkeys(self.resources.backlogged(), select.POLLOUT)
            if batches:
                for fd in self.resources.channels:
                    watched[fd] = watched.get(fd, 0) | select.POLLIN
            watched[nursery.process.fileno()] = select.POLLIN
            orders = select.POLLOUT if nursery.pending else 0
            watched[nursery.control.fileno()] = select.POLLIN | orders
        if watched != self._watched:
            for fd in self._watched:
                self._watch.unregister(fd)
            for fd, mask in watched.items():
                self._watch.register(fd, mask)
            self._watched = watched

    def watch(self, timeout: float) -> None:
        """It uses its own poll object, which only the background thread touches."""
        self._watch.poll(timeout * 1000)

    def wake(self) -> None:
        self._doorbell.ring()

    def tick(self, now: float) -> None:
        self.investigator.sample_counters(now)
        self._auxiliary.end_stalled(now)
        self._exits.end_deaf_nursery(now)

    # -- facts ----------------------------------------------------------------------------

    def checkpoint(self, worker: int, seat: ev.SeatPosition, back: int) -> WorkerCheckpoint:
        progress, iterable = self._slots[worker].progress, self._options.iterable
        states = partial(self.resources.boxes.random_state, worker)
        return WorkerCheckpoint.of(seat, back, progress, states, iterable=iterable)

    def progress(self, worker: int) -> Progress:
        slot = self._slots[worker]
        channel, note = slot.channel, self.resources.boxes.note(worker)
        pid = slot.pid
        if pid is None and not self.resources.nursery.closed:
            pid = self.resources.nursery.pid  # which has to start it, and may be starting itself
        if channel is None:
            return Progress(note, 0, slot.active, _processor(pid))
        # It waits for us if we are slow to read what it sends, perhaps because others send much.
        active = time.monotonic() if channel.unread else slot.active
        return Progress(note, channel.parts, active, _processor(pid))

    def place(self, worker: int) -> str:
        pid = self._slots[worker].pid
        return "its process has not started yet" if pid is None else f"pid {pid}"

    def size(self, worker: int) -> int | None:
        pid = self._slots[worker].pid
        return None if pid is None else gauge.private(pid)

    def tally(self) -> Tally:
        alive = {worker for worker, slot in enumerate(self._slots) if slot.occupied}
        return self.resources.boxes.tally(range(len(self._slots)), alive, time.monotonic())

    def own_bytes(self) -> dict[int, int]:
        noted = {worker: self.resources.boxes.size(worker) for worker in range(len(self._slots))}
        return {
            worker: max(0, size.resident - size.shared)
            for worker, size in noted.items()
            if size is not None
        }

    def shared_bytes(self) -> int:
        return sum(512 * os.fstat(slot.arena).st_blocks for slot in self._slots)

    def handle(self, worker: int) -> Handle:
        slot = self._slots[worker]
        return Handle(slot.pid, slot.exitcode)

    # -- deaths ---------------------------------------------------------------------------

    def settle(self, report: ev.Report) -> None:
        slot = self._slots[report.worker]
        if report.outcome is ev.Outcome.SAMPLE_GIVEN_UP:
            slot.progress.forget_states()  # they lead to the sample that is given up
        if report.restart is not ev.Restart.NO:
            slot.pid = None

    def gather(self, evidence: Evidence) -> Evidence:
        return self.investigator.gather(evidence)

    def examine(self, evidence: Evidence) -> tuple[Evidence, Verdict]:
        return self.investigator.examine(evidence)

    # -- the end --------------------------------------------------------------------------

    def stop(self, deadline: float) -> None:
        self._auxiliary.stop()
        self.resources.send_all_away(self.limits.grace)
        self._exits.wait_for_all(deadline)

    def close(self) -> None:
        self.resources.release_all()

    def disown(self) -> None:
        self.resources.disown()


def _processor(pid: int | None) -> Processor | None:
    """What the main thread of a process has had of the processors. Takes some 20 µs."""
    fields = None if pid is None else procfs.stat(pid)
    if pid is None or fields is None:
        return None
    ran, waited = procfs.scheduled(pid, pid)
    return Processor(ran, waited, fields[0] == "R") if ran else None
