"""holdfast: a PyTorch DataLoader whose workers may die.

Everything a user may import stands here.
"""

from holdfast.autopsy.incident import Incident
from holdfast.errors import (
    BadSampleWarning,
    HoldfastError,
    LoaderClosed,
    NoSubstitute,
    PoisonSample,
    ReplicaLost,
    RestartLimitExceeded,
    TooManyBadSamples,
    UnusualExit,
    WorkerError,
    WorkerLost,
    WorkerStartError,
)
from holdfast.loader import DataLoader
from holdfast.samples.record import BadSample

__all__ = [
    "BadSample",
    "BadSampleWarning",
    "DataLoader",
    "HoldfastError",
    "Incident",
    "LoaderClosed",
    "NoSubstitute",
    "PoisonSample",
    "ReplicaLost",
    "RestartLimitExceeded",
    "TooManyBadSamples",
    "UnusualExit",
    "WorkerError",
    "WorkerLost",
    "WorkerStartError",
]
__version__ = "0.1.0"
