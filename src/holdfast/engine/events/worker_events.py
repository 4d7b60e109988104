"""Events of one worker process. `generation` says which process of its seat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.engine.events.consumer_events import Event
from holdfast.engine.events.worker_exits import Exit

__all__ = [
    "BatchReady",
    "Rehearsed",
    "ReplicaEnded",
    "Resumed",
    "ResumptionFailed",
    "Survived",
    "Told",
    "WorkerEvent",
    "WorkerExited",
    "WorkerGrown",
    "WorkerReady",
    "WorkerRefused",
    "WorkerRetired",
    "WorkerStalled",
    "WorkerStreamLost",
    "WorkerWentOn",
]


@dataclass(slots=True)
class BatchReady(Event):
    """The worker answered a task. Not frozen, because making a frozen one takes longer."""

    worker: int
    generation: int
    task: int
    result: Any
    nbytes: int | None = None  # None for an error result


@dataclass(frozen=True, slots=True)
class WorkerEvent(Event):
    """Every other event of a worker."""

    worker: int
    generation: int


@dataclass(frozen=True, slots=True)
class WorkerReady(WorkerEvent):
    """The worker has started."""


@dataclass(frozen=True, slots=True)
class ReplicaEnded(WorkerEvent):
    """The worker answered a task with the end of its copy of an iterable dataset."""

    task: int


@dataclass(frozen=True, slots=True)
class Resumed(WorkerEvent):
    """The worker has begun another epoch."""


@dataclass(frozen=True, slots=True)
class Told(WorkerEvent):
    """The worker has heard a notice."""


@dataclass(frozen=True, slots=True)
class Survived(WorkerEvent):
    """The worker loaded a suspected sample alone and is still running."""


@dataclass(frozen=True, slots=True)
class WorkerExited(WorkerEvent):
    """The process has ended, or is treated as if it had. All its messages were handled before."""

    exit: Exit
    evidence: Any = None  # for the autopsy: what the worker left behind


@dataclass(frozen=True, slots=True)
class WorkerRefused(WorkerEvent):
    """The worker cannot start: the main module or the dataset did not load."""


@dataclass(frozen=True, slots=True)
class WorkerRetired(WorkerEvent):
    """The worker has answered its last item and is about to exit, because of its size."""

    at: float


@dataclass(frozen=True, slots=True)
class ResumptionFailed(WorkerEvent):
    """The worker did not reach the position of its stream, and is about to exit."""

    at: float
    unfit: frozenset[str]  # ways that need not be tried again


@dataclass(frozen=True, slots=True)
class WorkerStreamLost(WorkerEvent):
    """The worker's stream cannot be continued with the number of batches it had."""

    at: float
    why: str
    started: bool = True  # there is a process, which is about to exit


@dataclass(frozen=True, slots=True)
class WorkerGrown(WorkerEvent):
    """The worker of an iterable dataset has grown too large, and asks what to do."""


@dataclass(frozen=True, slots=True)
class Rehearsed(WorkerEvent):
    """Another process has tried to continue the worker's stream."""

    exact: bool | None  # None if unknown: there was nothing to compare, or the process was killed
    pays: bool = True  # that process was smaller
    unfit: frozenset[str] = frozenset()  # ways that failed; another one, if any, is to be tried
    finding: Any = None  # the full result, for the driver


@dataclass(frozen=True, slots=True)
class WorkerStalled(WorkerEvent):
    """The worker has made no progress for too long."""

    at: float


@dataclass(frozen=True, slots=True)
class WorkerWentOn(WorkerEvent):
    """The worker has made progress since it was said to have stalled, and was not signalled yet."""
