"""What a worker process does, from its first instruction to its last.

It is forked from the nursery, so it has torch, NumPy and the dataset in memory already. It makes
itself safe (dies with the nursery, ignores the signals that are meant for the trainer, leaves its
stack in the black box when it crashes). Then it carries out orders (`worker.items`), for which it
is the host: it receives them, sends the answers, and looks after its memory in between. It exits
when it is told to stop or its channel ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import os
import pickle
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from holdfast import kernel, private_names
from holdfast.autopsy import thread_notes
from holdfast.autopsy.blackbox import IDLE, START, STOP, BlackBoxes, CountingRecorder, Recorder
from holdfast.autopsy.readers import procfs
from holdfast.engine.continuation import ResumptionResult
from holdfast.limits.worker_limit import Allowance
from holdfast.processes import isolation
from holdfast.processes.channel import Channel, pair
from holdfast.processes.lifeline import arm
from holdfast.processes.protocol import (
    FOUND,
    GROWN,
    HEAD,
    MEMORY,
    POINT,
    RAISED,
    READY,
    REFUSED,
    REMARK,
    REPORT,
    RETIRED,
    SIZES,
    SURVIVED,
    TAKEN_UP,
    Equipment,
    Probe,
    Setup,
    order,
)
from holdfast.samples.bad_sample import BadSample
from holdfast.transport import codec, collate
from holdfast.transport.arena import Arena
from holdfast.transport.mapping import create
from holdfast.worker import leak_probe
from holdfast.worker.exceptions import Failure, describe
from holdfast.worker.faults import Faults
from holdfast.worker.housekeeping import Housekeeper
from holdfast.worker.interface import ERROR, Blueprint
from holdfast.worker.items import Worker
from holdfast.worker.randomness import Randomness
from holdfast.worker.sample_seeding import NO_SEEDS

WAITING = 0.5  # seconds between two signs of life of a worker that waits for an order


def warm_up(parent: int) -> None:
    """In a process that will be a worker later (`spare`): make a batch of our own, so that the
    memory which this changes is copied before the trainer waits for a batch."""
    gc.freeze()
    _die_with(parent)
    _ignore_signals()
    _prefer_for_oom(0)
    ours, theirs = pair()
    boxes = BlackBoxes(1)
    recorder = Recorder(boxes.fd, 1, 0, kernel.memory_file("holdfast-dump"))
    blueprint = Blueprint(
        dataset=[torch.zeros(1), torch.ones(1)],
        iterable=False,
        auto_collation=True,
        collate_fn=torch.utils.data.default_collate,
        drop_last=False,
        worker_init_fn=None,
        base_seed=0,
        num_workers=1,
        batch_index=None,
    )
    setup = Setup(
        worker=0,
        generation=0,
        seeds=NO_SEEDS,
        random_state=Randomness().saved(),
        held=(),
        allowance=Allowance(None),
    )
    file = create("holdfast-spare", 1 << 20)
    arena, keeper = Arena(file), Housekeeper(setup.allowance)
    ours.post(order("task", 0, [0, 1], ()))
    ours.close()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        _WorkerProcess(setup, blueprint, Channel(theirs), recorder, arena, None, keeper).work()
    theirs.close()
    boxes.close()
    for fd in (file, recorder.dump_fd):
        os.close(fd)
    procfs.data("self")  # which limits of memory are computed from
    private_names.set_worker_info(None)
    private_names.set_thread_name("hf_spare")


def run(setup: Setup, equipment: Equipment, find_blueprint: Callable[[], Blueprint]) -> None:
    """The life of a worker. Returns when it is to exit with status 0."""
    gc.freeze()  # what is inherited: a collection would look at, and so copy, all of it
    _die_with(equipment.parent)
    arm(equipment.lifeline)
    channel = Channel(socket.socket(fileno=equipment.channel))
    _ignore_signals()
    _prefer_for_oom(1000 if setup.beside else 500)
    if setup.probe is None:
        kernel.let_others_finish()
    else:
        kernel.let_others_run()
    keeper = Housekeeper(setup.allowance)
    faults = Faults.asked_for(setup.worker, setup.generation)
    kind = CountingRecorder if setup.counts else Recorder
    recorder = kind(equipment.blackboxes, setup.regions, setup.region, equipment.dump)
    keeper.noted = recorder.measured
    # torch puts its own handlers first, which would hide the stack; we do not install them.
    faulthandler.disable()
    faulthandler.enable(file=recorder.dump_fd, all_threads=True)
    thread_notes.install(recorder.dump_fd)
    if faults:
        faults.strike("before-setup")
    try:
        blueprint = find_blueprint()
    except BaseException as error:
        if not setup.beside:
            _refuse(channel, describe(error, position=None, step="bootstrap"))
        channel.close()
        return
    arena = Arena(
        equipment.arena,
        setup.held,
        keeps_pages=blueprint.pinned_in_place,
        takes_over=setup.takes_over,
    )
    try:
        _WorkerProcess(setup, blueprint, channel, recorder, arena, faults, keeper).work()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the parent has closed the channel: it wants nothing more
    channel.close()
    recorder.note(-1, -1, STOP)
    if faults:
        faults.strike("before-stop")
    gc.freeze()  # nothing is worth collecting on the way out


class _WorkerProcess:
    """The host of a worker that is a process; see `worker.interface.Host` for most methods."""

    own_process = own_dataset = True

    def __init__(
        self,
        setup: Setup,
        blueprint: Blueprint,
        channel: Channel,
        recorder: Recorder,
        arena: Arena,
        faults: Faults | None,
        keeper: Housekeeper,
    ) -> None:
        self.setup = setup
        self.iterable = blueprint.iterable
        self.channel = channel
        self.recorder = recorder
        self.arena = self.memory = arena
        self.faults = faults
        self.keeper = keeper
        self.retired = False
        self.orders: deque[tuple[str, int, Any]] = deque()  # received and not carried out
        self.urgent: dict[str, Any] = {}  # orders that come before all others, once a batch is done
        self.rings_seen = 0  # the doorbell's number when it was last looked at
        self.worker = Worker(setup, blueprint, self)
        self.between_samples = keeper.between_samples
        self.begin_epoch = keeper.begin_epoch
        self.private = keeper.private
        arena.look_for_released = self._look_for_released

    # -- the loop -------------------------------------------------------------------------

    def work(self) -> None:
        """Start, then carry out orders until there is no more to do."""
        if not self._start():
            return
        worker = self.worker
        while not self.retired:
            if not (self.orders or self.urgent):
                message = self.channel.receive()
                if message is None:
                    return
                self._take_in(message)
            if self.urgent:
                self._do_urgent()
            elif self.orders:
                worker.carry_out(*self.orders.popleft())
                if not self.retired:
                    self._after_item()

    def _after_item(self) -> None:
        self.keeper.batches += 1
        now = time.monotonic()
        if now >= self.keeper.due_at:
            self._look_after_memory(now)
        rings = self.recorder.doorbell[0]
        if rings != self.rings_seen:
            self.rings_seen = rings
            self._look_for_released()
        self.recorder.note(-1, -1, IDLE)

    def _start(self) -> bool:
        """Become a worker; whether there will be orders to carry out."""
        setup, keeper = self.setup, self.keeper
        self.recorder.note(-1, -1, START)
        if setup.probe is None:
            collate.install(self.arena)
        if setup.accused:
            isolation.listen(self.recorder)
        private_names.set_thread_name("pt_data_worker" if setup.probe is None else "hf_leak_probe")
        torch.set_num_threads(1)
        self.worker.begin()
        if self.faults:
            self.faults.strike("before-ready")
        if not setup.beside:
            # To catch up with its predecessor may take long, and is no longer a part of the start.
            self.channel.send(READY)
        if not self.worker.take_up():
            return False
        keeper.begin()
        if setup.probe is not None:
            self._probe(setup.probe)
            return False
        self.recorder.note(-1, -1, IDLE)
        if keeper.raised:
            self.channel.send(RAISED + SIZES.pack(keeper.private(), keeper.limit or 0))
        if self.faults:
            self.faults.strike("after-ready")
        return True

    def _probe(self, probe: Probe) -> None:
        replica = self.worker.replica
        found = None if replica.broken is not None else leak_probe.find(replica, self.keeper, probe)
        if found is not None:
            self.channel.send(FOUND + pickle.dumps(found, 5))

    def _do_urgent(self) -> None:
        if "retire" in self.urgent:
            self.retire()
            return
        if "stay" in self.urgent:
            self.keeper.stay(for_good=self.urgent["stay"])
        if "ask" in self.urgent:
            self._ask_to_retire()
        if "shrink" in self.urgent:
            self.arena.shrink()
        self.urgent.clear()

    def _look_for_released(self) -> bool:
        """In the middle of a batch: take in what has been sent meanwhile, for its blocks."""
        found = False
        while (message := self.channel.waiting()) is not None:
            found |= self._take_in(message)
        return found

    def _take_in(self, message: bytes) -> bool:
        """Note an order, and release the blocks that came with it; whether there were any."""
        kind, number, content, released = pickle.loads(message)
        for offset in released:
            self.arena.release(offset)
        if kind in ("retire", "shrink", "ask", "stay"):
            self.urgent[kind] = content
        elif kind == "several":
            self.orders.extend(content)
        elif kind != "released":
            self.orders.append((kind, number, content))
        return bool(released)

    # -- its size -------------------------------------------------------------------------

    @property
    def limits_allocations(self) -> bool:
        return self.keeper.limits_allocations

    def _look_after_memory(self, now: float) -> None:
        self.arena.trim()
        if not self.keeper.may_continue(now):
            if not self.iterable:
                self.retire()
                return
            self._ask_to_retire()
        if self.keeper.measured:
            self._tell_sizes()

    def _tell_sizes(self) -> None:
        point = self.keeper.point(self.arena.reserved)
        self.channel.send(MEMORY + POINT.pack(*dataclasses.astuple(point)))

    def retire(self) -> None:
        self.retired = True
        self._tell_sizes()
        self.channel.send(RETIRED)

    def _ask_to_retire(self) -> None:
        """It is too large; but first it must be known that its stream can be continued."""
        self.keeper.ask()
        sizes = SIZES.pack(self.keeper.private(), self.keeper.limit or 0)
        self.channel.send(GROWN + sizes + (self.recorder.kept(self.worker.answered - 1) or b""))

    def may_retire(self) -> bool:
        self._ask_to_retire()
        position = self.recorder.cell[0]  # of the sample that failed: it is named if we stay
        poll = select.poll()
        poll.register(self.channel.fileno(), select.POLLIN)
        while not ({"retire", "stay"} & self.urgent.keys()):
            self.recorder.note(-1, -1, IDLE)  # waiting is no stall, however long that takes
            if not poll.poll(WAITING * 1000):
                continue
            message = self.channel.receive()
            if message is None:
                raise BrokenPipeError
            self._take_in(message)
            if "ask" in self.urgent:
                del self.urgent["ask"]
                self._ask_to_retire()
        if "retire" in self.urgent:
            return True
        self.recorder.cell[0] = position
        self.keeper.stay(for_good=self.urgent.pop("stay"))
        return False

    # -- what it says ---------------------------------------------------------------------

    def publish(self, info: Any) -> None:
        private_names.set_worker_info(info)

    def encode(self, batch: Any) -> bytes:
        return codec.encode(batch, self.arena)

    def answer(self, kind: bytes, number: int, content: Any, mark: int, state: bytes) -> None:
        if kind is ERROR:
            content = pickle.dumps(content)
        message = b"".join((kind, HEAD.pack(number, len(state), mark), state, content))
        faults = self.faults
        if faults is None:
            self.channel.send(message)
        else:
            faults.strike("before-send", number)
            self.channel.send(message, lambda: faults.strike("mid-send", number))
            faults.strike("after-send", number)

    def report(self, bad: list[BadSample], samples: int | None) -> None:
        self.channel.send(REPORT + pickle.dumps((bad, samples), 5))

    def remark(self, about: str, words: str) -> None:
        self.channel.send(REMARK + pickle.dumps((about, words), 5))

    def survived(self) -> None:
        self.channel.send(SURVIVED)

    def taken_up(self, result: ResumptionResult) -> None:
        self.channel.send(TAKEN_UP + pickle.dumps(result, 5))

    def pause(self, seconds: float) -> bool:
        return isolation.wait(seconds, self.recorder, self.channel.fileno())


def _refuse(channel: Channel, failure: Failure) -> None:
    """Tell the parent why this worker cannot even begin, and wait to be dismissed."""
    try:
        channel.send(REFUSED + pickle.dumps(failure))
        while channel.receive() is not None:
            pass
    except OSError:
        pass


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _die_with(parent: int) -> None:
    """Be killed when the nursery ends, whatever this process is doing then.

    The nursery has one thread that never ends, so the signal cannot come early. Comparing the
    parent afterwards closes the gap before it was armed.
    """
    kernel.die_with_parent()
    if os.getppid() != parent:
        os._exit(0)


def _prefer_for_oom(by: int) -> None:
    """Let the kernel, when it must kill, take a worker rather than the trainer, and before it an
    auxiliary process."""
    try:
        with open("/proc/self/oom_score_adj", "r+") as file:
            adjusted = min(1000, int(file.read()) + by)
            file.seek(0)
            file.write(str(adjusted))
    except OSError:
        pass  # a kernel that does not let us: the default order holds
