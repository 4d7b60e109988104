"""Tasks, the other items that a worker answers, and what the consumer gets.

The states of a task, and the events that change them, are in the text of `engine.flow`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.engine.events.worker_exits import Exit

__all__ = [
    "END",
    "Delivery",
    "End",
    "GaveUp",
    "IsolationTest",
    "Item",
    "Notice",
    "PastNotice",
    "Poisoned",
    "Position",
    "Resumption",
    "SeatPosition",
    "Task",
    "TaskState",
]


class TaskState(enum.Enum):
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
    answer: int = 0  # which answer of its worker the result was, counted from 1
    tests_passed: int = 0  # isolation tests that a worker survived
    tests_dropped: int = 0  # isolation tests that kills from outside made impossible
    apart: bool = False  # its samples are loaded one by one, to find out which one is bad


@dataclass(slots=True)
class IsolationTest:
    """A suspected sample, to be loaded alone: does the worker survive it? See `restarts`."""

    task: Task
    sample: int | None  # None: the whole batch, because its dataset loads all samples in one call
    before: tuple[Exit, ...]  # the exits that raised the suspicion
    alone: list[Exit] = field(default_factory=list)  # exits during this test
    pause: float = 0.0  # seconds that the worker waits before it loads the sample
    base: float = 0.0  # `pause` is drawn from [base, 2 * base)
    prompt_kills: int = 0  # exits in a row that came too soon after the pause to be chance
    pauses: list[float] = field(default_factory=list)  # the pause before each of `alone`


@dataclass(slots=True)
class Resumption:
    """The start of another epoch on a persistent worker."""

    epoch: int
    seeds: Any  # from `EpochBegan`


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that every worker is told between its tasks: see `loader.broadcast`."""

    change: Any  # from `Announced`


@dataclass(frozen=True, slots=True)
class PastNotice:
    """A notice that the worker in a seat was told, and when: after how many epochs in which its
    replica made a batch, and how many batches of the epoch that it was in."""

    change: Any
    epochs_done: int
    batches_done: int


Item = Task | Resumption | IsolationTest | Notice


@dataclass(slots=True)
class Delivery:
    """The next batch for the consumer. `result` is what the driver put into `BatchReady`."""

    task: Task
    result: Any


class End:
    """The epoch is over."""

    def __repr__(self) -> str:
        return "END"


END: Final = End()


@dataclass(frozen=True, slots=True)
class Poisoned:
    """The result of a task whose sample ended several workers in a row."""

    task: Task
    position: int | None
    deaths: tuple[Exit, ...]
    tests_passed: int = 0
    alone: int = 0  # how many of the last deaths were in an isolation test
    pauses: tuple[float, ...] = ()  # seconds that the worker waited before each of these


@dataclass(frozen=True, slots=True)
class GaveUp:
    """Why workers are no longer replaced."""

    reason: str
    """ "restart-limit", "cannot-start", "cannot-catch-up", "shortage", "stuck", "lost", "stream"
    or "refused"."""
    worker: int
    deaths: tuple[Exit, ...] = ()
    why: str = ""  # for "stream": why it is not continued; for "lost": why none can be reached
    task: Task | None = None  # for "restart-limit": what the last one had to answer next


@dataclass(frozen=True, slots=True)
class SeatPosition:
    """Where the worker in one seat begins."""

    answered: int = 0  # items in all
    epochs_done: int = 0  # earlier epochs in which its replica made at least one batch
    batches_done: int = 0  # of this epoch
    exhausted: bool = False  # its replica has ended


@dataclass(frozen=True, slots=True)
class Position:
    """A position between two batches of an epoch."""

    number: int  # of the next batch
    turn: int  # the worker that makes it, or the first after it whose replica has not ended
    seats: tuple[SeatPosition, ...]

    @classmethod
    def after(cls, batches: int, workers: int) -> Position:
        """After this many batches of the first epoch, for map-style data in order."""
        each, more = divmod(batches, workers)
        made = [each + (worker < more) for worker in range(workers)]
        return cls(batches, more, tuple(SeatPosition(one, batches_done=one) for one in made))
