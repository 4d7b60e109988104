"""What the machine is told and what it answers: values without behaviour.

Events are in the past tense, actions in the imperative; what travels between them are tasks, and
what stands where a batch would be. The decisions are in `machine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = [
    "END",
    "Abandon",
    "Action",
    "Ask",
    "BatchReady",
    "Convict",
    "Death",
    "Delivery",
    "Dispatch",
    "Dump",
    "End",
    "Event",
    "GaveUp",
    "Item",
    "Kill",
    "Poisoned",
    "Rehearse",
    "Rehearsed",
    "Renew",
    "ReplicaEnded",
    "RestartPolicy",
    "Resumed",
    "Resumption",
    "Retire",
    "Separate",
    "Start",
    "Stay",
    "StreamLost",
    "Survived",
    "Task",
    "Ticked",
    "Trial",
    "WentAstray",
    "WorkerDied",
    "WorkerGrown",
    "WorkerReady",
    "WorkerRetired",
    "WorkerStalled",
]


# -- what travels -------------------------------------------------------------------------


@dataclass(slots=True)
class Task:
    """A batch to be made."""

    number: int
    index: Any
    epoch: int
    worker: int
    done: bool = False
    result: Any = None
    keys: Sequence[Any] = ()  # of its samples; for the driver, as the brief is
    brief: Any = None
    acquittals: int = 0  # trials that one of its samples survived,
    dismissals: int = 0  # and trials that could not be held, because of kills from outside
    apart: bool = False  # its samples are loaded one by one, so that they can be told apart
    counted: int = 0  # bytes of the budget


@dataclass(slots=True)
class Trial:
    """A sample to be loaded alone, to see whether the worker lives."""

    task: Task
    sample: int | None  # None: all of the batch, if its dataset loads them at once
    before: tuple[Death, ...]  # the deaths it is suspected of
    alone: list[Death] = field(default_factory=list)
    pause: float = 0.0  # seconds the worker waits before it loads it,
    base: float = 0.0  # which are at least these, and less than twice as many
    telling: int = 0  # deaths in a row that came so soon after the pause that it is no chance


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
class Poisoned:
    """Stands in for the result of a task whose sample ended several workers in a row."""

    task: Task
    position: int | None
    deaths: tuple[Death, ...]
    acquittals: int = 0
    alone: int = 0  # of the deaths: when it was loaded alone


@dataclass(frozen=True, slots=True)
class GaveUp:
    """Why no worker is replaced any more."""

    reason: str  # "restart-limit", "cannot-start", "cannot-catch-up", "shortage" or "stream"
    worker: int
    deaths: tuple[Death, ...]
    why: str = ""  # of a stream that is not continued


# -- events -------------------------------------------------------------------------------


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
    nbytes: int | None = None  # None if it is no batch, but says why there is none


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
class Death:
    """What is known of one death that matters for what comes next."""

    at: float
    sample: tuple[int, int | None] | None = None  # task number, position: being loaded just then
    perhaps_from_outside: bool = False  # SIGKILL or SIGTERM: the sample may be innocent
    memory: bool = False  # but memory was short: a counter of the kernel's says so, or its size
    after: float | None = None  # seconds since that sample was begun, if that was noted
    inherited: bool = False  # it stalled on a lock that was held when it was forked
    catching_up: bool = False  # it had started, and was on its way to where its predecessor was
    shortage: bool = False  # it was never born, for lack of something that may come back
    no_way: str = ""  # why nobody can take up its stream, if something is still to come of it
    evidence: Any = None  # for the driver; the machine does not look


@dataclass(frozen=True, slots=True)
class WorkerDied:
    worker: int
    generation: int
    death: Death


@dataclass(frozen=True, slots=True)
class WorkerRetired:
    """The worker has answered its last item and is about to exit."""

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
    WorkerReady
    | BatchReady
    | ReplicaEnded
    | Resumed
    | Survived
    | WorkerDied
    | WorkerRetired
    | WentAstray
    | StreamLost
    | WorkerGrown
    | Rehearsed
    | WorkerStalled
    | Ticked
)


# -- actions ------------------------------------------------------------------------------


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
    deaths: tuple[Death, ...]


@dataclass(frozen=True, slots=True)
class Separate:
    """Have the samples of this batch loaded one by one: one of them ends workers."""

    task: Task


@dataclass(frozen=True, slots=True)
class Renew:
    """Fork workers from another nursery from now on, all of them: a lock is held in this one."""


Action = (
    Start
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
