"""Counters of a loader."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Stats"]


@dataclass(slots=True)
class Stats:
    """Over all epochs and iterators of a loader. They never decrease."""

    batches: int = 0
    bytes: int = 0
    wait_seconds: float = 0.0
    waits: int = 0
    restarts: int = 0
    incidents: int = 0
    epochs: int = 0
    recycled: int = 0
    largest_batch_bytes: int = 0
    most_in_flight_bytes: int = 0
