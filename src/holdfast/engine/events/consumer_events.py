"""Events of the consumer, of its sampler and of the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.engine.events.tasks import Position

__all__ = [
    "ASKED",
    "DRAINED",
    "HURRIED",
    "STOPPED",
    "UNPACKED",
    "Announced",
    "Asked",
    "Began",
    "Drained",
    "Drawn",
    "EpochBegan",
    "Event",
    "Hurried",
    "RoomChanged",
    "Stopped",
    "Ticked",
    "Unpacked",
    "WorkersLost",
]


class Event:
    """The base class of all events, those of workers included."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Began(Event):
    """The first epoch began, at its start or at another position."""

    position: Position | None = None


@dataclass(frozen=True, slots=True)
class EpochBegan(Event):
    """Another epoch began on persistent workers."""

    seeds: Any = None  # for the workers


@dataclass(frozen=True, slots=True)
class Announced(Event):
    """Every worker is to be told this, before the tasks that are drawn from now on."""

    change: Any


@dataclass(slots=True)
class Drawn(Event):
    """The sampler returned `index`."""

    index: Any
    keys: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class Drained(Event):
    """The sampler was exhausted."""


@dataclass(frozen=True, slots=True)
class Asked(Event):
    """The consumer asked for its next batch, and has finished with the one before."""


@dataclass(frozen=True, slots=True)
class Unpacked(Event):
    """The consumer has unpacked the batch it was given, so that batch is no longer in flight."""


@dataclass(frozen=True, slots=True)
class Hurried(Event):
    """Batches follow each other so quickly that waking the other side takes longer than making
    one."""


@dataclass(frozen=True, slots=True)
class RoomChanged(Event):
    """This many bytes may be in flight from now on; None: no limit."""

    room: int | None


@dataclass(frozen=True, slots=True)
class WorkersLost(Event):
    """No worker can be reached any more, and none can be started."""

    why: str


@dataclass(frozen=True, slots=True)
class Stopped(Event):
    """The pool is closed. Later events have no effect."""


@dataclass(frozen=True, slots=True)
class Ticked(Event):
    """Time has passed."""

    at: float


DRAINED: Final = Drained()
ASKED: Final = Asked()
UNPACKED: Final = Unpacked()
HURRIED: Final = Hurried()
STOPPED: Final = Stopped()
