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
    "ReplicaEnded",
    "RestartPolicy",
    "Resumed",
    "Resumption",
    "Separate",
    "Start",
    "Survived",
    "Task",
    "Ticked",
    "Trial",
    "WorkerDied",
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
    acquittals: int = 0
    apart: bool = False  # its samples are loaded one by one, so that they can be told apart
    counted: int = 0  # bytes of the budget


@dataclass(slots=True)
class Trial:
    """A sample to be loaded alone, to see whether the worker lives."""

    task: Task
    sample: int
    before: tuple[Death, ...]  # the deaths it is suspected of
    alone: list[Death] = field(default_factory=list)


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


@dataclass(frozen=True, slots=True)
class GaveUp:
    """Why no worker is replaced any more."""

    reason: str  # "restart-limit", "cannot-start" or "shortage"
    worker: int
    deaths: tuple[Death, ...]


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
    shortage: bool = False  # it was never born, for lack of something that may come back
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


Action = Start | Dispatch | Dump | Kill | Abandon | Convict | Separate


# -- policy -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How many replacements, within how many seconds; None for no limit."""

    intensity: int | None
    period: float
