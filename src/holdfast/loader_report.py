"""``holdfast.of(loader)``, ``holdfast.incidents()``: what went on, in any loader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.utils.data

from holdfast import option_sources, options, resumption, runtime
from holdfast.autopsy.incident import Incident
from holdfast.engine.loader_records import Stats
from holdfast.limits import gauge
from holdfast.loader_identity import LoaderIdentity, name_of, rank
from holdfast.readable import Figures, Incidents
from holdfast.samples.bad_sample import BadSample
from holdfast.shared_deque import copy_of

_WRAPPED = ("base_dataloader", "_dataloader", "dataloader", "_loader", "loader")
"""Where wrappers keep the loader they iterate: Accelerate's, Fabric's, and those of others."""
_DEPTH = 5


def of(loader: Any) -> Report:
    """What holdfast knows of any loader: incidents, bad samples, figures.

    The loader may be torch's, of a subclass, or what a framework has made of it. It is the same
    as `incidents`, `bad_samples` and `stats()` of a :class:`holdfast.DataLoader`.

    >>> import holdfast, torch
    >>> loader = torch.utils.data.DataLoader([1, 2, 3])
    >>> with holdfast.install():
    ...     batches = list(loader)
    >>> holdfast.of(loader).engine, holdfast.of(loader).stats()["batches"]
    ('holdfast', 3)
    """
    found = loader
    for _ in range(_DEPTH):
        # Not isinstance: Accelerate's wrappers say that they are loaders.
        if issubclass(type(found), torch.utils.data.DataLoader):
            return Report(found)
        attributes = getattr(found, "__dict__", {})
        found = next((attributes[name] for name in _WRAPPED if name in attributes), None)
    raise TypeError(
        f"holdfast.of() takes a torch.utils.data.DataLoader, or what a framework has made of one; "
        f"{type(loader).__qualname__} is none and refers to none"
    )


def incidents() -> list[Incident]:
    """What went wrong with workers in this process so far, of all loaders, oldest first: the last
    thousand. Frameworks hide their loaders; this is where to look.

    >>> import holdfast
    >>> for incident in holdfast.incidents():
    ...     print(incident.report())
    """
    for state in runtime.living():
        state.finish_incidents()
    return Incidents(copy_of(runtime.totals.incidents))


class Report:
    """What holdfast knows of one loader, as it is when it is asked."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._state = runtime.of(loader)

    @property
    def engine(self) -> str | None:
        """``"holdfast"``, ``"torch"`` (see `why`), or None before the first `iter()`."""
        return self._state.engine

    @property
    def why(self) -> str:
        """Why the engine is torch's; empty if it is not."""
        return self._state.why_torchs if self.engine == "torch" else ""

    @property
    def identity(self) -> LoaderIdentity:
        """What messages call it: its name, or its dataset's, and the rank if there are several."""
        name = self.options["name"] or name_of(self.loader.dataset)
        return LoaderIdentity(name, rank().told)

    @property
    def options(self) -> dict[str, Any]:
        """The options that hold for it: its own, else what is installed, else the environment's."""
        return option_sources.of(self.loader)

    @property
    def incidents(self) -> list[Incident]:
        """What went wrong with its workers so far, oldest first: the last thousand.
        ``stats()["incidents"]`` counts all of them."""
        self._state.finish_incidents()
        return Incidents(copy_of(self._state.incidents))

    @property
    def bad_samples(self) -> list[BadSample]:
        """Samples that were bad so far, each once, in the order in which they were met."""
        return list(self._state.ledger.bad_samples)

    @property
    def bad_sample_count(self) -> int:
        """How many samples were bad so far; copies nothing."""
        return len(self._state.ledger.bad_samples)

    def stats(self) -> dict[str, int | float | None]:
        """Batches, bytes, waits, restarts, incidents so far; see `DataLoader.stats`."""
        state = self._state
        figures = Figures((name, getattr(state.stats, name)) for name in Stats.__slots__)
        figures["held_bytes"] = state.held_bytes()
        figures["in_flight_bytes"] = sum(pool.machine.in_flight for pool in state.pools())
        budget = options.budget_in_bytes(self.options["memory_budget"])
        figures["budget_bytes"] = state.budget_for(budget).limit
        return figures

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is: as `DataLoader.state_dict`, for loaders of other classes that
        iterate with our engine."""
        return resumption.state_dict(self.loader)

    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = True) -> None:
        """Have its next ``iter()`` go on from a state: as `DataLoader.load_state_dict`."""
        resumption.load_state_dict(self.loader, state_dict, strict=strict)

    def worker_pids(self) -> list[tuple[int, int]]:
        """Number and pid of each worker that is a running process, of all iterators of the loader.
        Does not wait for one that is starting. Empty if the engine is torch's."""
        found = []
        for pool in self._state.pools():
            for worker in range(pool.machine.workers if pool.running else 0):
                pid = pool.driver.handle(worker).pid
                if pid is not None:
                    found.append((worker, pid))
        return found

    def worker_bytes(self) -> dict[int, int]:
        """Private bytes of each of them, by its number; over all iterators of the loader. Reading
        takes about 20 ms per GB."""
        found: dict[int, int] = {}
        for worker, pid in self.worker_pids():
            size = gauge.private(pid)
            if size is not None:
                found[worker] = found.get(worker, 0) + size
        return found

    def __repr__(self) -> str:
        engine = self.engine or "not iterated yet"
        why = f" ({self.why})" if self.why else ""
        stats = self._state.stats
        return (
            f"<holdfast.Report of {type(self.loader).__qualname__}: {engine}{why}, "
            f"{stats.batches} batches, {stats.incidents} incidents, "
            f"{self.bad_sample_count} bad samples>"
        )
