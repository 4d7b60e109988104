"""How worker processes are started: where each one continues, and with what."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import resource
from collections import deque
from collections.abc import Iterator
from functools import partial
from time import monotonic

from holdfast import kernel
from holdfast.engine import events as ev
from holdfast.engine.checkpoint import random_states_at
from holdfast.engine.continuation import CannotResume
from holdfast.engine.driver import DriverOptions
from holdfast.engine.growth_monitor import MAX_ROUND_BATCHES
from holdfast.engine.supervisor import Supervisor
from holdfast.engine.worker_records import setup_for
from holdfast.errors import WorkerStartError
from holdfast.loader_identity import LoaderIdentity
from holdfast.processes.auxiliary import PAYS, AuxiliaryProcesses
from holdfast.processes.exits import Exits
from holdfast.processes.nursery_reports import ForkFailed
from holdfast.processes.protocol import Probe, Setup
from holdfast.processes.resources import ProcessResources
from holdfast.worker import leak_probe

DESCRIPTORS = 3  # in the main process, for each worker
_REFUSALS = {errno.EAGAIN: "task-limit", errno.ENOMEM: "fork-enomem"}
"""What fork says when there is no room for a process, and the cause that explains it."""


class Starts:
    """Starts the workers of one pool, and processes beside them. Implements a part of `Driver`."""

    def __init__(
        self,
        supervisor: Supervisor,
        resources: ProcessResources,
        auxiliary: AuxiliaryProcesses,
        exits: Exits,
        options: DriverOptions,
    ) -> None:
        self._supervisor = supervisor
        self._resources = resources
        self._auxiliary = auxiliary
        self._exits = exits
        self._options = options
        self.sent: deque[bytes] = deque(maxlen=leak_probe.ROUNDS * MAX_ROUND_BATCHES)
        """The last orders to workers of a map-style dataset, for a leak probe."""

    def start(self, order: ev.Start) -> None:
        slot = self._resources.slots[order.worker]
        slot.begin(order.generation, monotonic())
        slot.occupied, slot.pid = True, None
        slot.kill_confirmed = slot.dumped = False
        find = partial(self._resources.boxes.random_state, order.worker)
        setup = self._setup(order, *random_states_at(order.answered, find))
        if isinstance(setup, CannotResume):
            slot.occupied = False
            self._supervisor.tell(
                ev.WorkerStreamLost(
                    order.worker, order.generation, slot.active, setup.why, started=False
                )
            )
            return
        self._resources.boxes.clear(order.worker)
        # If it died in its first batch, what it had reserved for that may be the reason.
        takes_over = order.answered > slot.answered and not slot.short
        slot.answered = order.answered
        try:
            self._resources.prepare(order.worker, order.generation)
            # Parts of the arena that the consumer still uses; of the one that was prepared.
            held = tuple(slot.window.handover())
            self._resources.start(dataclasses.replace(setup, held=held, takes_over=takes_over))
        except OSError as error:
            if order.generation == 0:
                with explaining(self._options.workers, self._options.origin):
                    raise  # in iter(loader), where torch would raise it too
            failed = ForkFailed(order.worker, order.generation, error.errno or 0)
            self._supervisor.after(lambda: self._exits.report(failed))

    def rehearse(self, order: ev.Rehearse) -> None:
        slot = self._resources.slots[order.worker]
        setup = self._setup(order, None, slot.random_before)
        if not isinstance(setup, CannotResume):
            setup = dataclasses.replace(setup, rehearsal=int(PAYS * slot.size))
            if self._auxiliary.begin(setup):
                return
        self._supervisor.tell(ev.Rehearsed(order.worker, order.generation, None))

    def find_leak(self, worker: int, batches: int, nbytes: int) -> bool:
        orders = list(self.sent)[-leak_probe.ROUNDS * batches :]
        if not orders and not self._options.iterable:
            return False
        slot = self._resources.slots[worker]
        told = self._supervisor.machine.seats[worker].told
        setup = Setup(
            worker=worker,
            generation=slot.generation,
            seeds=slot.progress.seeds,
            held=(),
            allowance=dataclasses.replace(self._options.allowance, private=nbytes),
            regions=self._resources.boxes.workers,
            probe=Probe(tuple(orders), batches),
            told=tuple(told),
            settled=len(told),
        )
        return self._auxiliary.begin(setup)

    def _setup(
        self,
        order: ev.Beginning,
        random_state: bytes | None,
        random_before: bytes | None,
    ) -> Setup | CannotResume:
        worker, options = order.worker, self._options
        progress = self._resources.slots[worker].progress
        setup = setup_for(order, options, progress, random_state, random_before)
        if isinstance(setup, CannotResume):
            return setup
        return Setup(
            **vars(setup),
            held=(),
            accused=isinstance(order, ev.Start) and order.accused,
            allowance=options.allowance,
            region=worker,
            counts=options.logbook is not None,
            regions=self._resources.boxes.workers,
        )


@contextlib.contextmanager
def explaining(workers: int, origin: LoaderIdentity) -> Iterator[None]:
    """If the system refuses the first processes, raise what a user can act on."""
    try:
        yield
    except OSError as error:
        if error.errno in _REFUSALS:
            raise WorkerStartError(
                f"DataLoader worker (pid(s) none) exited unexpectedly: {origin.prefix}the system "
                f"refused the first process of {workers} worker(s), with "
                f"{errno.errorcode[error.errno]} ({error.strerror}).\n"
                "What to do: end other processes and threads of this user, or raise the limit "
                "(ulimit -u for processes, pids.max and memory.max of the container), then call "
                f"iter(loader) again. More: holdfast explain {_REFUSALS[error.errno]}"
            ) from error
        if error.errno != errno.EMFILE:
            raise
        allowed = (kernel.limit(resource.RLIMIT_NOFILE) or ("unknown",))[0]
        raise RuntimeError(
            f"Too many open files: {origin.prefix}{workers} workers need about "
            f"{DESCRIPTORS * workers + 10} descriptors and the limit is "
            f"{allowed}. Please increase the limit using "
            "`ulimit -n` in the shell, or use fewer workers. (holdfast does not keep descriptors "
            "for batches, so `torch.multiprocessing.set_sharing_strategy` makes no difference.)"
        ) from error
