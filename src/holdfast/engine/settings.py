"""What the engine is told by the user's options, ready to use.

It stands below `holdfast.options`, which makes it of what the user wrote, and below the iterators,
which read it: so neither needs to know the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.engine.continuation import Recovery
from holdfast.engine.vocabulary import RestartPolicy
from holdfast.samples.policy import Limit, Policy

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """The options, checked."""

    restarts: RestartPolicy
    stall_timeout: float | None
    policy: Policy | None  # for bad samples; None to let them raise
    limit: Limit
    quarantine: str | None
    logbook: str | None
    memory_budget: int | Literal["auto"] | None
    worker_memory_limit: int | Literal["auto"] | None
    name: str | None
    iterable_recovery: Recovery = "auto"
