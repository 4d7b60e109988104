"""What the nursery tells the trainer about the workers it forks."""

from __future__ import annotations

from dataclasses import dataclass

MESSAGE_BYTES = 64 * 1024  # bytes of an order to the nursery, or of a part of it


@dataclass(frozen=True)
class Forked:
    worker: int
    generation: int
    pid: int


@dataclass(frozen=True)
class ForkFailed:
    """A worker could not be forked."""

    worker: int
    generation: int
    errno: int


@dataclass(frozen=True)
class Died:
    """A worker was reaped: `status` as waitpid gives it, `cpu` in seconds."""

    worker: int
    generation: int
    pid: int
    status: int
    cpu: float
    at: float  # monotonic; when the nursery noticed
    grown: int | None  # its largest size in bytes, less that of the nursery
    cpu_limit: float | None  # the hard limit, at which the kernel kills; None: none, or unknown
    handlers: bool | None  # whether it had handlers for crashes; None: unknown
    group: dict[int, float]  # signals that the nursery received too, and when (monotonic)


@dataclass(frozen=True)
class Signalled:
    """An order to send a signal was carried out."""

    worker: int
    generation: int
    signal: int


Report = Forked | ForkFailed | Died | Signalled
