"""The interface of a driver: the part of a pool that has the workers, whatever they are.

The engine decides when a worker is started, what it is sent and when it is ended. A driver carries
that out and tells what happened. It tells events to `Supervisor.tell`, and what the machine need
not know (sizes, remarks, findings) to `Supervisor.upkeep`. Rules for a driver:

- It tells a worker's messages in the order in which they came, and all of them before its exit.
- After it has told an exit, or a start that failed, the seat has no worker for the engine. Whatever
  an earlier worker of that seat still does is not told.
- An exit is told with its evidence, because a successor overwrites what the worker left behind.
- Orders (`start` to `release`) never wait. What an order causes at once, such as a start that
  fails, may be told inside the call: the supervisor handles it after the actions of the current
  decision. What must be read only then is passed to `Supervisor.after`.

All methods are called with the pool's lock held, by one thread at a time, except `wake`, `watch`,
`examine` and `handle`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from holdfast.autopsy.blackbox import Note
from holdfast.autopsy.evidence import Evidence
from holdfast.autopsy.logbook import Logbook
from holdfast.autopsy.tally import Tally
from holdfast.autopsy.verdict import Verdict
from holdfast.engine import events as ev
from holdfast.engine.checkpoint import WorkerCheckpoint
from holdfast.engine.continuation import Recovery
from holdfast.limits.worker_limit import Allowance
from holdfast.loader_identity import LoaderIdentity
from holdfast.worker.sample_seeding import EpochSeeds

if TYPE_CHECKING:
    from holdfast.engine.supervisor import Supervisor

Urgent = Literal["ask", "retire", "stay", "shrink"]


class Batch(Protocol):
    """A batch that has arrived: the `result` of `BatchReady`, unless that is an error."""

    nbytes: int

    def unpack(self) -> Any:
        """What the user gets. May be called again if an exception interrupted it."""


class Processor(NamedTuple):
    """What a worker has had of the processors so far."""

    ran: float  # seconds in which it ran
    waited: float  # seconds in which it was ready to run, up to when it last ran
    ready: bool  # it runs now, or is ready to


class Progress(NamedTuple):
    """The signs of life of one worker."""

    note: Note  # what it noted last
    parts: int  # parts of large messages that have arrived from it
    active: float  # when it was last sent something or heard from
    processor: Processor | None = None  # None: not known


class Handle(NamedTuple):
    """A worker's process, as `multiprocessing` would show it."""

    pid: int | None  # None until it is known, and if workers are no processes
    exitcode: int | None


class Kept(Protocol):
    """The memory of batches that the user keeps."""

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class DriverOptions:
    """What a driver has to know about its pool."""

    workers: int
    iterable: bool
    persistent: bool
    recovery: Recovery
    seeds: EpochSeeds  # of the first epoch
    stall_timeout: float | None
    allowance: Allowance
    origin: LoaderIdentity
    logbook: Logbook | None
    answers_ahead: int = 0  # how many answers of one worker may wait for the consumer
    restored: tuple[WorkerCheckpoint, ...] = ()  # where the workers begin, if not at the start


class WorkerMethod(Protocol):
    """A kind of worker, chosen before there are any."""

    name: str
    """"fork", "spawn" or "forkserver" for processes; "thread"; "ray"."""
    limits: ev.Limits
    room: int | None
    """Bytes of batches that the way from the workers to the trainer has room for, if that is
    limited."""

    def called(self, worker: int) -> str:
        """What an error calls this worker: "worker process 0", in torch's words."""

    def driver(self, options: DriverOptions) -> Driver:
        """Make the driver, without workers."""


class Driver(Protocol):
    """The workers of one pool."""

    limits: ev.Limits
    backlog: bool
    """Part of an order could not be sent yet, and `watch` has not been prepared for that."""

    @property
    def clock(self) -> Callable[[], float]:
        """The time, for all deadlines of the pool: `time.monotonic` except in tests."""

    @property
    def kept(self) -> Kept:
        """The memory of batches that the user keeps."""

    @property
    def spin(self) -> Callable[[], object] | None:
        """Lets workers run for a moment, if that is quicker than `poll` for batches that follow
        each other closely; None if it is not."""

    def connect(self, supervisor: Supervisor) -> None:
        """Called once, before anything else."""

    # -- orders ---------------------------------------------------------------------------

    def start(self, order: ev.Start) -> None:
        """Start a worker. An OSError for the very first worker of a seat is raised; all later
        failures are told."""

    def send(self, worker: int, item: ev.Item, hint: Any) -> None:
        """Have the worker answer this, after all that it was sent before. `hint` is what it has to
        know about the samples of a batch besides their indices. May wait for `flush`, so that a
        worker gets several items in one message."""

    def flush(self) -> None:
        """Send everything that waits."""

    def urge(self, worker: int, kind: Urgent, content: object = None) -> bool:
        """Send an order that overtakes items: report again that you are too large (ask); exit
        because of that (retire); go on although you are (stay); return unused memory (shrink).
        False if the worker has not started."""

    def rehearse(self, order: ev.Rehearse) -> None:
        """Try whether another worker could continue this worker's stream; tell `Rehearsed`."""

    def find_leak(self, worker: int, batches: int, nbytes: int) -> bool:
        """Find which lines leak, in a process beside the workers, which compares its memory every
        `batches` batches and may grow by `nbytes`. Tells `Upkeep.leak_found`. False if that cannot
        be done now."""

    def dump(self, worker: int, generation: int) -> None:
        """Make a stalled worker write its stack and, if it can be ended, exit. If it makes progress
        before it is ended, it may be left alone: then `WorkerWentOn` is told."""

    def kill(self, worker: int, generation: int) -> None:
        """End a worker; its exit is told. Never called unless `limits.killable`."""

    def terminate(self, worker: int, generation: int) -> None:
        """End a worker because the user has asked for that, through its handle."""

    def abandon(self, worker: int, generation: int) -> None:
        """Go on without a worker that does not end. Never use its memory again. Tells its exit."""

    def renew(self) -> None:
        """Fork later workers from another image of the trainer. Workers that live are ended; their
        exits are told as `renewed`."""

    def release(self) -> None:
        """The user has released memory of batches: let the workers use it at once. Processes are
        told which it is. For threads a limit is set, which they share. Actors do not use it."""

    # -- waiting --------------------------------------------------------------------------

    def hear(self, worker: int) -> bool:
        """Tell one message of this worker, if it has sent one."""

    def poll(self, timeout: float) -> Any:
        """Wait until something happens. Nothing is told, and nothing is lost if an exception
        interrupts it: signal handlers of the user may run here. Pass the result to `take_in`."""

    def take_in(self, found: Any) -> bool:
        """Tell what `poll` found; whether a worker sent something."""

    def prepare_watch(self, batches: bool) -> None:
        """Choose what ends the next `watch`: what cannot wait for the consumer, such as deaths;
        with `batches` also a message of a worker."""

    def watch(self, timeout: float) -> None:
        """Wait as prepared, without the lock, in the background thread only."""

    def wake(self) -> None:
        """End `poll` and `watch` early. Any thread, finalizer or signal handler may call this."""

    def tick(self, now: float) -> None:
        """Do what is due, whether or not anything has happened."""

    # -- facts ----------------------------------------------------------------------------

    def checkpoint(self, worker: int, seat: ev.SeatPosition, back: int) -> WorkerCheckpoint:
        """Where a worker was before its last `back` answers, all of which were told."""

    def progress(self, worker: int) -> Progress:
        """What the stall detector compares."""

    def place(self, worker: int) -> str:
        """Where a worker is, in words: its process, its thread, or its actor and node."""

    def size(self, worker: int) -> int | None:
        """Bytes that a running worker has of its own; None if that is not known."""

    def tally(self) -> Tally:
        """What its workers have counted so far. They do if there is a logbook."""

    def own_bytes(self) -> dict[int, int]:
        """The memory of each worker that is no shared memory, as it was last noted."""

    def shared_bytes(self) -> int:
        """The memory in which workers hand over batches."""

    def handle(self, worker: int) -> Handle:
        """May be called without the lock."""

    # -- deaths ---------------------------------------------------------------------------

    def settle(self, report: ev.Report) -> None:
        """A death was decided on: drop what a successor must not use."""

    def gather(self, evidence: Evidence) -> Evidence:
        """Add what changes from moment to moment. Called when the replacement was ordered."""

    def examine(self, evidence: Evidence) -> tuple[Evidence, Verdict]:
        """Add what takes long to read, and judge. Without the lock, one death after the other."""

    # -- the end --------------------------------------------------------------------------

    def stop(self, deadline: float) -> None:
        """Tell all workers to exit, and wait for them; end the rest by then."""

    def close(self) -> None:
        """Release everything but the memory of batches that the user keeps."""

    def disown(self) -> None:
        """In a process forked from the owner: close what would keep workers alive or waiting."""


def hand_over_backlog(driver: Driver) -> None:
    """The thread that has the lock does something else now: the background thread sends the rest of
    an order."""
    if driver.backlog:
        driver.wake()
