"""Every option of holdfast's own: what it may be, what it means, and what a mistake is told.

The loader keeps what the user gave, unconverted, because frameworks rebuild loaders from their
attributes; what is made of it here is kept apart.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

from holdfast.engine.machine import RestartPolicy

__all__ = ["DEFAULT_STALL_TIMEOUT", "MaxRestarts", "Options", "parse"]

MaxRestarts = int | tuple[int, float] | Literal["auto"] | None

DEFAULT_STALL_TIMEOUT = 300.0
RESTART_PERIOD = 60.0
RESTARTS_PER_WORKER = 5


@dataclass(frozen=True, slots=True)
class Options:
    """The options, ready to use."""

    restarts: RestartPolicy
    stall_timeout: float | None
    logbook: str | None


def parse(
    *, max_restarts: Any, stall_timeout: Any, num_workers: int, logbook: Any = None
) -> Options:
    """Check all options; a wrong one is named with its value and what would be right."""
    return Options(
        restarts=_restarts(max_restarts, num_workers),
        stall_timeout=_stall_timeout(stall_timeout),
        logbook=_logbook(logbook),
    )


def _restarts(value: Any, num_workers: int) -> RestartPolicy:
    right = (
        'it takes "auto", None (no limit), a number of restarts within a minute such as 20, '
        "or a pair (restarts, seconds) such as (20, 300)"
    )
    if value is None:
        return RestartPolicy(None, RESTART_PERIOD)
    if value == "auto":
        return RestartPolicy(RESTARTS_PER_WORKER * max(1, num_workers), RESTART_PERIOD)
    period: Any = RESTART_PERIOD
    count = value
    if isinstance(value, (tuple, list)):
        if len(value) != 2:
            raise ValueError(f"max_restarts={value!r} is not a pair; {right}")
        count, period = value
    if not isinstance(count, int) or isinstance(count, bool) or not _is_number(period):
        raise TypeError(f"max_restarts={value!r} is of the wrong type; {right}")
    if count < 0 or not 0 < period < math.inf:
        raise ValueError(f"max_restarts={value!r} is out of range; {right}")
    return RestartPolicy(count, float(period))


def _stall_timeout(value: Any) -> float | None:
    right = "it takes a number of seconds above 0, such as 300, or None (never)"
    if value is None:
        return None
    if not _is_number(value):
        raise TypeError(f"stall_timeout={value!r} is of the wrong type; {right}")
    if not value > 0:
        raise ValueError(f"stall_timeout={value!r} is out of range; {right}")
    return None if math.isinf(value) else float(value)


def _logbook(value: Any) -> str | None:
    right = 'it takes the path of a folder, such as "runs/today", or None'
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"logbook={value!r} is of the wrong type; {right}")
    path = os.fspath(value)
    if not isinstance(path, str) or not path:
        raise ValueError(f"logbook={value!r} is not a path; {right}")
    if os.path.exists(path) and not os.path.isdir(path):
        raise ValueError(f"logbook={value!r} is a file; {right}")
    return path


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
