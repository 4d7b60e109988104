"""What the machine is told and what it answers: values without behaviour.

Events are in the past tense, actions in the imperative; what travels between them are tasks, and
what stands where a batch would be. The decisions are in `machine` and `restarts`.

Some fields are opaque: the machine takes them from an event and puts them into an action, and never
looks at them (`BatchReady.result`, `WorkerExited.remains`, `Rehearsed.finding`).
"""

from __future__ import annotations

import enum
import errno
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = [
    "ASKED",
    "DRAINED",
    "END",
    "HURRIED",
    "SHORTAGES",
    "STOPPED",
    "UNPACKED",
    "Abandon",
    "Action",
    "Ask",
    "Asked",
    "BatchReady",
    "Began",
    "Convict",
    "Deliver",
    "Delivery",
    "Dispatch",
    "Drained",
    "Draw",
    "Drawn",
    "Dump",
    "End",
    "EpochBegan",
    "Event",
    "Exit",
    "Forget",
    "GaveUp",
    "Hurried",
    "Item",
    "Kill",
    "Limits",
    "Outcome",
    "Poisoned",
    "Position",
    "Rehearse",
    "Rehearsed",
    "Renew",
    "ReplicaEnded",
    "Report",
    "Restart",
    "RestartPolicy",
    "Resumed",
    "Resumption",
    "Retire",
    "RoomChanged",
    "SeatPosition",
    "Separate",
    "Start",
    "Stay",
    "Stopped",
    "StreamLost",
    "Survived",
    "Task",
    "TaskState",
    "Ticked",
    "Trial",
    "Unpacked",
    "WentAstray",
    "WorkerExited",
    "WorkerGrown",
    "WorkerReady",
    "WorkerRefused",
    "WorkerRetired",
    "WorkerStalled",
]

SHORTAGES: Final = frozenset(
    getattr(errno, name)
    for name in ("EAGAIN", "ENOMEM", "EMFILE", "ENFILE", "ENOSPC", "ENOBUFS", "ETOOMANYREFS")
)
"""Errors for lack of something that may be given back in a moment."""


# -- what travels -------------------------------------------------------------------------


class TaskState(enum.Enum):
    """HELD until there is room for its batch, SENT to its worker, DONE when that has answered.

    A task that is asked for again, because its worker died, stays SENT. The result of a task of an
    epoch that the consumer has left is dropped, and so is a task of a replica that has ended.
    """

    HELD = enum.auto()
    SENT = enum.auto()
    DONE = enum.auto()


@dataclass(slots=True)
class Task:
    """A batch to be made. Only the machine changes it."""

    number: int
    index: Any
    epoch: int
    worker: int
    keys: Sequence[Any] = ()  # of its samples; for the driver
    state: TaskState = TaskState.HELD
    result: Any = None
    nbytes: int = 0  # of the result
    acquittals: int = 0  # trials that one of its samples survived,
    dismissals: int = 0  # and trials that could not be held, because of kills from outside
    apart: bool = False  # its samples are loaded one by one, so that they can be told apart


@dataclass(slots=True)
class Trial:
    """A sample to be loaded alone, to see whether the worker lives."""

    task: Task
    sample: int | None  # None: all of the batch, if its dataset loads them at once
    before: tuple[Exit, ...]  # the exits it is suspected of
    alone: list[Exit] = field(default_factory=list)
    pause: float = 0.0  # seconds the worker waits before it loads it,
    base: float = 0.0  # which are at least these, and less than twice as many
    telling: int = 0  # exits in a row that came so soon after the pause that it is no chance
    pauses: list[float] = field(default_factory=list)  # before each of those alone


@dataclass(slots=True)
class Resumption:
    """The start of another epoch on a persistent worker."""

    epoch: int
    seed: int | None


Item = Task | Resumption | Trial


@dataclass(slots=True)
class Delivery:
    """The next batch for the consumer; `result` is what the driver put into `BatchReady`."""

    task: Task
    result: Any


class End:
    def __repr__(self) -> str:
        return "END"


END: Final = End()


@dataclass(frozen=True, slots=True)
class Exit:
    """How a worker's process ended: what is known when the machine has to decide, and no more.

    `signal` is a name. A worker that went with its nursery has neither signal nor exit code.
    """

    at: float  # monotonic, when we were told
    kind: str = "exited"  # or "crashed", "killed", "stalled", "unkillable", "start-failed"
    signal: str | None = None
    exitcode: int | None = None
    errno: int | None = None  # of a start that failed
    renewed: bool = False  # it went because its nursery was replaced, and lived until then
    with_nursery: bool = False  # it went with its nursery, which died,
    nursery_killed: bool = False  # killed from outside,
    nursery: tuple[str, str] = ("", "")  # or as is said here; and its traceback
    by_itself: bool = False  # it has sent itself the signal it died of
    memory: bool = False  # memory was short: a counter of the kernel's says so, or its size
    inherited: bool = False  # it stalled on a lock that was held when it was forked
    task: int | None = None  # what it was at: the task's number,
    position: int | None = None  # the sample in it,
    step: str = "unknown"  # and what was being done with that
    seconds: float | None = None  # since it had come to this step
    stack: str = ""
    grown: int | None = None  # bytes it had at most, beyond those it was born with
    no_way: str = ""  # why its stream cannot be taken up, if something is still to come of it

    @property
    def from_outside(self) -> bool:
        """SIGKILL or SIGTERM, perhaps from another process: the sample may be innocent."""
        if self.kind != "killed" or self.by_itself:
            return False
        return self.signal is not None or self.nursery_killed

    @property
    def for_memory(self) -> bool:
        return self.memory and self.from_outside

    @property
    def unproven(self) -> bool:
        """Whether it may have come from outside, and nothing says anything else."""
        return self.from_outside and not self.memory

    @property
    def shortage(self) -> bool:
        """Whether it was never born, for lack of something that may come back."""
        return self.errno in SHORTAGES

    @property
    def catching_up(self) -> bool:
        """If it had started: it was on its way to where its predecessor was."""
        return self.step in ("start-up", "replay")


@dataclass(frozen=True, slots=True)
class Poisoned:
    """Stands in for the result of a task whose sample ended several workers in a row."""

    task: Task
    position: int | None
    deaths: tuple[Exit, ...]
    acquittals: int = 0
    alone: int = 0  # of the deaths, the last so many: when it was loaded alone,
    pauses: tuple[float, ...] = ()  # after the worker had waited for so many seconds


@dataclass(frozen=True, slots=True)
class GaveUp:
    """Why no worker is replaced any more."""

    reason: str
    """ "restart-limit", "cannot-start", "cannot-catch-up", "shortage", "stream" or "refused"."""
    worker: int
    deaths: tuple[Exit, ...] = ()
    why: str = ""  # of a stream that is not continued


@dataclass(frozen=True, slots=True)
class SeatPosition:
    """Where the worker in one seat begins."""

    answered: int = 0  # items in all
    passed: int = 0  # epochs before this one of which its replica has made something
    replica: int = 0  # batches of this epoch
    ended: bool = False  # its replica has nothing more


@dataclass(frozen=True, slots=True)
class Position:
    """A place between two batches of an epoch."""

    number: int  # of the next batch
    turn: int  # the worker that makes it, or the first after it whose replica has not ended
    seats: tuple[SeatPosition, ...]

    @classmethod
    def after(cls, batches: int, workers: int) -> Position:
        """After so many batches of the first epoch, of map-style data in order."""
        each, more = divmod(batches, workers)
        made = [each + (worker < more) for worker in range(workers)]
        return cls(batches, more, tuple(SeatPosition(one, replica=one) for one in made))


# -- events of the consumer ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Began:
    """The first epoch, at its start or at another position."""

    position: Position | None = None


@dataclass(frozen=True, slots=True)
class EpochBegan:
    """Another epoch on persistent workers."""

    seed: int | None


@dataclass(slots=True)
class Drawn:
    """The sampler gave `index`."""

    index: Any
    keys: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class Drained:
    """The sampler had nothing to give."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The consumer wants its next batch, and is done with the one before."""


@dataclass(frozen=True, slots=True)
class Unpacked:
    """The consumer has made its batch of what it was given: that is not in flight any more."""


@dataclass(frozen=True, slots=True)
class Hurried:
    """Batches have followed each other so quickly that the consumer and the workers spend more time
    on waking each other than on a batch."""


@dataclass(frozen=True, slots=True)
class RoomChanged:
    """So many bytes may be in flight now; None: no limit."""

    room: int | None


@dataclass(frozen=True, slots=True)
class Stopped:
    """Nothing that happens from now on has a consequence."""


DRAINED: Final = Drained()
ASKED: Final = Asked()
UNPACKED: Final = Unpacked()
HURRIED: Final = Hurried()
STOPPED: Final = Stopped()


# -- events of the workers ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerReady:
    worker: int
    generation: int


@dataclass(slots=True)
class BatchReady:
    worker: int
    generation: int
    task: int
    result: Any
    nbytes: int | None = None  # None for an error result


@dataclass(frozen=True, slots=True)
class ReplicaEnded:
    """The worker's copy of an iterable dataset has nothing more."""

    worker: int
    generation: int
    task: int


@dataclass(frozen=True, slots=True)
class Resumed:
    worker: int
    generation: int


@dataclass(frozen=True, slots=True)
class Survived:
    """The sample on trial did not end its worker."""

    worker: int
    generation: int


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """The process is gone, or is treated as if it were; all that it had sent has been told."""

    worker: int
    generation: int
    exit: Exit
    remains: Any = None  # for the autopsy


@dataclass(frozen=True, slots=True)
class WorkerRefused:
    """The worker cannot begin: the main module or the dataset did not load."""

    worker: int
    generation: int


@dataclass(frozen=True, slots=True)
class WorkerRetired:
    """The worker has answered its last item and is about to exit, because of its size."""

    worker: int
    generation: int
    at: float


@dataclass(frozen=True, slots=True)
class WentAstray:
    """The worker has not got to where its stream was, and is about to exit; these ways lead
    nowhere, or need not be tried again."""

    worker: int
    generation: int
    at: float
    unfit: frozenset[str]


@dataclass(frozen=True, slots=True)
class StreamLost:
    """The worker's stream cannot be continued with the number of batches it had."""

    worker: int
    generation: int
    at: float
    why: str
    started: bool = True  # there is a process, which is about to exit


@dataclass(frozen=True, slots=True)
class WorkerGrown:
    """The worker of an iterable dataset has grown too large, and waits for what is to be done."""

    worker: int
    generation: int


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """It was tried whether another process could take up the worker's stream."""

    worker: int
    generation: int
    exact: bool | None  # None if it could not be seen: nothing to compare, or it was killed
    pays: bool = True  # that process was smaller
    unfit: frozenset[str] = frozenset()  # another way is to be tried, if there are any
    finding: Any = None  # in full, for the driver


@dataclass(frozen=True, slots=True)
class WorkerStalled:
    worker: int
    generation: int
    at: float


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed; nothing else."""

    at: float


Event = (
    Began
    | EpochBegan
    | Drawn
    | Drained
    | Asked
    | Unpacked
    | Hurried
    | RoomChanged
    | Stopped
    | WorkerReady
    | BatchReady
    | ReplicaEnded
    | Resumed
    | Survived
    | WorkerExited
    | WorkerRefused
    | WorkerRetired
    | WentAstray
    | StreamLost
    | WorkerGrown
    | Rehearsed
    | WorkerStalled
    | Ticked
)


# -- actions for the consumer -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Draw:
    """Draw so many indices from the sampler, in the consumer's thread, when it comes by."""

    count: int


@dataclass(slots=True)
class Deliver:
    """Give this to the consumer, which has asked."""

    what: Delivery | End | GaveUp


class Outcome(enum.Enum):
    """What follows from a death, beside a replacement."""

    GAVE_UP = enum.auto()  # no worker is replaced any more
    SAMPLE_GIVEN_UP = enum.auto()  # its batch cannot be made
    TRIED_AGAIN = enum.auto()  # a start that found no room
    LEFT_OUT = enum.auto()  # the batch goes on without the sample that ended it
    ON_TRIAL = enum.auto()  # that sample is loaded alone first
    NOTHING_LEFT = enum.auto()  # it had nothing left to do
    STREAM = enum.auto()  # its stream is being taken up
    BATCH_AGAIN = enum.auto()  # its batch is made again
    NOTHING = enum.auto()


class Restart(enum.Enum):
    """How a dead worker is replaced."""

    NO = enum.auto()
    NOW = enum.auto()
    ANEW = enum.auto()  # by one that is forked from another nursery
    LATER = enum.auto()  # after a pause


@dataclass(frozen=True, slots=True)
class Report:
    """Tell of a death, and what was decided about it. The first action of its decision."""

    worker: int
    exit: Exit
    remains: Any
    outcome: Outcome
    restart: Restart
    ready: bool  # it had come through its start
    task: Task | None  # what it had to answer next,
    loading: bool = False  # of which it was loading a sample


@dataclass(frozen=True, slots=True)
class Forget:
    """A worker has gone as it was to: that is no death. Comes before the start of its successor."""

    worker: int
    recycled: bool  # it went because of its size


# -- actions for the workers --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Start a worker; `answered` and `replica` say where it takes up."""

    worker: int
    generation: int
    answered: int  # items this seat has answered in all
    passed: int  # epochs before its replica's, without those of which it has made nothing
    replica: int  # batches the replica has made in its epoch
    exhausted: bool  # whether its replica had ended
    unfit: frozenset[str] = frozenset()  # ways to take up a stream that do not lead there
    accused: bool = False  # a sample it will come to may have killed its predecessor


@dataclass(frozen=True, slots=True)
class Rehearse:
    """Have a process try to take up this worker's stream where it is now, and nothing else."""

    worker: int
    generation: int
    answered: int
    passed: int
    replica: int
    exhausted: bool
    unfit: frozenset[str]


@dataclass(frozen=True, slots=True)
class Ask:
    """Have a worker say anew that it is too large, and where it is."""

    worker: int
    generation: int


@dataclass(frozen=True, slots=True)
class Retire:
    """Tell a worker to go, because of its size."""

    worker: int
    generation: int


@dataclass(frozen=True, slots=True)
class Stay:
    """Tell a worker to go on, although it is too large."""

    worker: int
    generation: int
    for_good: bool  # no worker of this pool is replaced for its size any more
    because: Rehearsed | None = None  # None: workers of this pool never are


@dataclass(slots=True)
class Dispatch:
    worker: int
    item: Item


@dataclass(frozen=True, slots=True)
class Dump:
    """Make a stalled worker write its stack and die of it."""

    worker: int
    generation: int


@dataclass(frozen=True, slots=True)
class Kill:
    worker: int
    generation: int


@dataclass(frozen=True, slots=True)
class Abandon:
    """Leave a worker that even SIGKILL does not end; never use its memory again."""

    worker: int
    generation: int


@dataclass(frozen=True, slots=True)
class Convict:
    """Leave this sample out of this batch, and wherever it comes again."""

    worker: int
    task: Task
    sample: int
    deaths: tuple[Exit, ...]


@dataclass(frozen=True, slots=True)
class Separate:
    """Have the samples of this batch loaded one by one: one of them ends workers."""

    task: Task


@dataclass(frozen=True, slots=True)
class Renew:
    """Fork workers from another nursery from now on, all of them: a lock is held in this one."""


Action = (
    Draw
    | Deliver
    | Report
    | Forget
    | Start
    | Dispatch
    | Dump
    | Kill
    | Abandon
    | Convict
    | Separate
    | Renew
    | Rehearse
    | Ask
    | Retire
    | Stay
)


# -- policy -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How many replacements, within how many seconds; None for no limit."""

    intensity: int | None
    period: float


@dataclass(frozen=True, slots=True)
class Limits:
    """How long and how often something is tried with workers of one kind. These are for processes.

    A start that could not be, or was killed, is tried again after a pause: the first is
    `first_pause`, each is twice as long as the one before, and none longer than `longest_pause`.
    """

    kill_after: float = 0.5  # seconds to dump its stack, or to exit, before SIGKILL
    abandon_after: float = 1.0  # seconds after SIGKILL when the run goes on without the worker
    failed_starts: int = 3  # deaths before "ready", in a row, after which a seat is given up
    tries: int = 12  # starts in a row that find no room, likewise: 31 s in all
    first_pause: float = 0.1  # seconds
    longest_pause: float = 5.0

    def pause(self, tries: int) -> float:
        """Seconds after so many starts in a row that came to nothing."""
        return min(self.first_pause * (1 << min(tries - 1, 32)), self.longest_pause)
