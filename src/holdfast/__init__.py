"""holdfast: a PyTorch DataLoader whose workers may die.

Everything a user may import stands here. The loader itself is imported when it is first asked for:
the command line reads logs on machines where torch takes seconds to import, or is not installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.autopsy.incident import Incident
from holdfast.errors import (
    HoldfastError,
    LoaderClosed,
    PoisonSample,
    RestartLimitExceeded,
    UnusualExit,
    WorkerError,
    WorkerLost,
    WorkerStartError,
)

if TYPE_CHECKING:
    from holdfast.loader import DataLoader

__all__ = [
    "DataLoader",
    "HoldfastError",
    "Incident",
    "LoaderClosed",
    "PoisonSample",
    "RestartLimitExceeded",
    "UnusualExit",
    "WorkerError",
    "WorkerLost",
    "WorkerStartError",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name != "DataLoader":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from holdfast.loader import DataLoader

    globals()[name] = DataLoader  # asked for once
    return DataLoader
