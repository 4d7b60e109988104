"""Actions: what the machine decides, in the imperative."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from holdfast.engine.events.tasks import Delivery, End, GaveUp, Item, PastNotice, Task
from holdfast.engine.events.worker_events import Rehearsed
from holdfast.engine.events.worker_exits import Exit

__all__ = [
    "Abandon",
    "Action",
    "Ask",
    "BanSample",
    "Beginning",
    "Deliver",
    "Dispatch",
    "Draw",
    "Dump",
    "Forget",
    "Kill",
    "LoadSeparately",
    "Outcome",
    "Rehearse",
    "RenewNursery",
    "Report",
    "Restart",
    "Retire",
    "Start",
    "Stay",
]


class Action:
    """The base class of all actions."""

    __slots__ = ()


# -- for the consumer ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Draw(Action):
    """Draw this many indices from the sampler, in the consumer's thread, at its next call."""

    count: int


@dataclass(slots=True)
class Deliver(Action):
    """Give this to the consumer, which has asked."""

    what: Delivery | End | GaveUp


# -- about a worker that has exited -------------------------------------------------------


class Outcome(enum.Enum):
    """What follows from a death, beside a replacement."""

    GAVE_UP = enum.auto()  # workers are no longer replaced
    SAMPLE_GIVEN_UP = enum.auto()  # its batch cannot be made
    TRIED_AGAIN = enum.auto()  # a start failed because a resource was exhausted
    LEFT_OUT = enum.auto()  # the batch is made without the sample that ended the worker
    TESTED_ALONE = enum.auto()  # that sample is loaded alone first
    NOTHING_LEFT = enum.auto()  # the worker had nothing left to do
    STREAM = enum.auto()  # its stream is being continued
    BATCH_AGAIN = enum.auto()  # its batch is made again
    NOTHING = enum.auto()


class Restart(enum.Enum):
    """How a dead worker is replaced."""

    NO = enum.auto()
    NOW = enum.auto()
    ANEW = enum.auto()  # by a process from a new nursery
    LATER = enum.auto()  # after a pause


@dataclass(frozen=True, slots=True)
class Report(Action):
    """Report a death and what was decided about it. The first action of its decision."""

    worker: int
    exit: Exit
    evidence: Any
    outcome: Outcome
    restart: Restart
    ready: bool  # it had started
    task: Task | None  # what it had to answer next
    loading: bool = False  # it was loading a sample of that task


@dataclass(frozen=True, slots=True)
class Forget(Action):
    """A worker has exited as intended, which is no death. Comes before its successor's start."""

    worker: int
    recycled: bool  # it exited because of its size
    renewed: bool = False  # it was ended because its nursery was replaced, or because it moves


# -- for the workers ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerAction(Action):
    """An action on one process."""

    worker: int
    generation: int


@dataclass(frozen=True, slots=True)
class Beginning(WorkerAction):
    """Where a process in this seat begins."""

    answered: int  # items that this seat has answered in all
    epochs_done: int  # earlier epochs in which its replica made at least one batch
    batches_done: int  # batches that the replica has made in its epoch
    exhausted: bool  # its replica had ended
    unfit: frozenset[str] = frozenset()  # ways to continue a stream that have failed
    told: tuple[PastNotice, ...] = ()  # what this seat was told, to be told again in this order
    settled: int = 0  # after so many of these a batch was answered,
    settled_earlier: int = 0  # and after so many before this epoch


@dataclass(frozen=True, slots=True)
class Start(Beginning):
    """Start a worker."""

    accused: bool = False  # it will load a sample that may have killed its predecessor


@dataclass(frozen=True, slots=True)
class Rehearse(Beginning):
    """Have a separate process try to continue this worker's stream from where it is now."""


@dataclass(frozen=True, slots=True)
class Ask(WorkerAction):
    """Have a worker that is too large report that again, with its current position."""


@dataclass(frozen=True, slots=True)
class Retire(WorkerAction):
    """Tell a worker to exit because of its size."""


@dataclass(frozen=True, slots=True)
class Stay(WorkerAction):
    """Tell a worker to go on, although it is too large."""

    for_good: bool  # workers of this pool are no longer replaced for their size
    because: Rehearsed | None = None  # None: workers of this pool never are


@dataclass(slots=True)
class Dispatch(Action):
    """Send this item to a worker."""

    worker: int
    item: Item


@dataclass(frozen=True, slots=True)
class Dump(WorkerAction):
    """Make a stalled worker write its stack and exit."""


@dataclass(frozen=True, slots=True)
class Kill(WorkerAction):
    """Send a worker SIGKILL."""


@dataclass(frozen=True, slots=True)
class Abandon(WorkerAction):
    """Go on without a worker that SIGKILL does not end, and never use its memory again."""


@dataclass(frozen=True, slots=True)
class BanSample(Action):
    """Leave this sample out of this batch and of all later ones."""

    worker: int
    task: Task
    sample: int
    deaths: tuple[Exit, ...]


@dataclass(frozen=True, slots=True)
class LoadSeparately(Action):
    """Have the samples of this batch loaded one by one, because one of them ends workers."""

    task: Task


@dataclass(frozen=True, slots=True)
class RenewNursery(Action):
    """Replace the nursery, and with it all workers: a lock was held when it was forked."""
