"""holdfast: a PyTorch DataLoader whose workers may die.

Everything a user may import stands here.
"""

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
