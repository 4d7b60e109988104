"""holdfast: a PyTorch DataLoader whose workers may die.

Everything a user may import is listed here. The loader itself is imported at its first use: the
command line reads logs on machines where torch takes seconds to import, or is not installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from holdfast.errors import (
    BadSampleWarning,
    HoldfastError,
    LoaderClosed,
    NoSubstitute,
    PoisonSample,
    ReplicaLost,
    RestartLimitExceeded,
    StateError,
    StreamLost,
    TooManyBadSamples,
    UnusualExit,
    WorkerError,
    WorkerLost,
    WorkerStartError,
)

if TYPE_CHECKING:
    from holdfast.autopsy.incident import Incident
    from holdfast.loader import DataLoader
    from holdfast.loader_report import Report, incidents, of
    from holdfast.packed.containers import PackedDict, PackedList, PackedStrings
    from holdfast.packed.pack import PackReport, pack
    from holdfast.samples.bad_sample import BadSample
    from holdfast.takeover.install import Installation, install, uninstall
    from holdfast.views.tracking import track

__all__ = [
    "BadSample",
    "BadSampleWarning",
    "DataLoader",
    "HoldfastError",
    "Incident",
    "Installation",
    "LoaderClosed",
    "NoSubstitute",
    "PackReport",
    "PackedDict",
    "PackedList",
    "PackedStrings",
    "PoisonSample",
    "ReplicaLost",
    "Report",
    "RestartLimitExceeded",
    "StateError",
    "StreamLost",
    "TooManyBadSamples",
    "UnusualExit",
    "WorkerError",
    "WorkerLost",
    "WorkerStartError",
    "incidents",
    "install",
    "of",
    "pack",
    "track",
    "uninstall",
]
__version__ = "0.1.0"


_LATER = {
    "BadSample": "holdfast.samples.bad_sample",
    "DataLoader": "holdfast.loader",
    "Incident": "holdfast.autopsy.incident",
    "Installation": "holdfast.takeover.install",
    "PackReport": "holdfast.packed.pack",
    "PackedDict": "holdfast.packed.containers",
    "PackedList": "holdfast.packed.containers",
    "PackedStrings": "holdfast.packed.containers",
    "Report": "holdfast.loader_report",
    "incidents": "holdfast.loader_report",
    "install": "holdfast.takeover.install",
    "of": "holdfast.loader_report",
    "pack": "holdfast.packed.pack",
    "track": "holdfast.views.tracking",
    "uninstall": "holdfast.takeover.install",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_LATER[name]), name)
    globals()[name] = found  # so that this function is not called again
    return found


def load_ipython_extension(ipython: Any) -> None:
    """``%load_ext holdfast`` in a notebook: `install`, with the options in the environment."""
    importlib.import_module("holdfast.takeover.install").install()


def unload_ipython_extension(ipython: Any) -> None:
    """``%unload_ext holdfast``: `uninstall`."""
    importlib.import_module("holdfast.takeover.install").uninstall()
