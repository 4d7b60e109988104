"""holdfast: a PyTorch DataLoader whose workers may die.

Everything a user may import is listed here. The loader itself is imported at its first use: the
command line reads logs on machines where torch takes seconds to import, or is not installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from holdfast.autopsy.incident import Incident
from holdfast.errors import (
    BadSampleWarning,
    HoldfastError,
    LoaderClosed,
    NoSubstitute,
    PoisonSample,
    ReplicaLost,
    RestartLimitExceeded,
    StreamLost,
    TooManyBadSamples,
    UnusualExit,
    WorkerError,
    WorkerLost,
    WorkerStartError,
)

if TYPE_CHECKING:
    from holdfast.loader import DataLoader
    from holdfast.memory.packed import PackedDict, PackedList, PackedStrings
    from holdfast.memory.packing import PackReport, pack
    from holdfast.samples.record import BadSample

__all__ = [
    "BadSample",
    "BadSampleWarning",
    "DataLoader",
    "HoldfastError",
    "Incident",
    "LoaderClosed",
    "NoSubstitute",
    "PackReport",
    "PackedDict",
    "PackedList",
    "PackedStrings",
    "PoisonSample",
    "ReplicaLost",
    "RestartLimitExceeded",
    "StreamLost",
    "TooManyBadSamples",
    "UnusualExit",
    "WorkerError",
    "WorkerLost",
    "WorkerStartError",
    "pack",
]
__version__ = "0.1.0"


_LATER = {
    "BadSample": "holdfast.samples.record",
    "DataLoader": "holdfast.loader",
    "PackReport": "holdfast.memory.packing",
    "PackedDict": "holdfast.memory.packed",
    "PackedList": "holdfast.memory.packed",
    "PackedStrings": "holdfast.memory.packed",
    "pack": "holdfast.memory.packing",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_LATER[name]), name)
    globals()[name] = found  # so that this function is not called again
    return found
