"""What belongs to a loader and not to one of its iterators, as the engine is given it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from holdfast.autopsy.incident import Incident
from holdfast.autopsy.logbook import Logbook
from holdfast.engine.epoch import EpochCounter
from holdfast.limits.growth import GrowthWarnings
from holdfast.loader_identity import LoaderIdentity
from holdfast.samples.ledger import Ledger


@dataclass(slots=True)
class Stats:
    """Counters over all epochs and iterators of a loader. They never decrease."""

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


@dataclass(frozen=True)
class LoaderRecords:
    """One for each iterator. Nothing in it knows the iterator, whose pool may outlive it."""

    origin: LoaderIdentity = field(default_factory=LoaderIdentity)
    logbook: Logbook | None = None
    stats: Stats = field(default_factory=Stats)
    ledger: Ledger = field(default_factory=Ledger)  # of bad samples
    epochs: EpochCounter = field(default_factory=EpochCounter)
    growth_warnings: GrowthWarnings = field(default_factory=GrowthWarnings)
    explained: set[Hashable] = field(default_factory=set)  # kinds of death
    on_incident: Callable[[Incident], None] = lambda incident: None
    on_amended: Callable[[Incident, Incident, str], None] = lambda old, new, text: None
    """Called when more is known of an incident: with what it was, what it is, and that in words."""
