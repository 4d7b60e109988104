"""What stands for a batch on its way from a worker to the consumer, beside the batch itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.engine.exceptions import Failure
from holdfast.samples.record import BadSample

__all__ = ["Failed", "Refused", "Reported"]


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker's answer that is an error."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Reported:
    """A worker's answer, and the bad samples it met on the way."""

    result: Any  # a parcel, `Failed` or `DROPPED`
    bad: tuple[BadSample, ...]
    samples: int | None = None  # of a stream that the batch took, if not as many as were asked for


@dataclass(frozen=True, slots=True)
class Refused:
    """A worker could not begin: the main module or the blueprint did not load."""

    worker: int
    pid: int | None
    failure: Failure
