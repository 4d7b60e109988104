"""``holdfast.metrics.opentelemetry``: the figures of loaders, read when a metric reader asks."""

from __future__ import annotations

import threading
import time
from typing import Any, Final

from holdfast.metrics.readings import COUNTERS, GAUGES, LABELS, Loaders, figures

SAME_COLLECTION: Final = 1.0  # seconds, in which instruments may be given the same reading
_COUNTED: Final = {
    "batches": "{batch}",
    "epochs": "{epoch}",
    "restarts": "{worker}",
    "recycled": "{worker}",
    "incidents": "{incident}",
    "bad_samples": "{sample}",
}


def opentelemetry(*loaders: Any, meter: Any = None) -> Instruments:
    """Give OpenTelemetry the figures of these loaders, or of all loaders of this process that run
    on holdfast's engine, if none is given.

    Args:
        loaders: any that :func:`holdfast.of` takes. They are not kept alive.
        meter: an OpenTelemetry ``Meter``; the default is that of the global meter provider.

    The instruments are observable: they are read when your metric reader collects, all at once.
    Their names are those for Prometheus with a dot and without the unit, which OpenTelemetry keeps
    apart: ``holdfast.batches``, ``holdfast.in_flight`` (``By``), ``holdfast.wait`` (``s``). The
    attributes are ``loader``, ``rank`` and, for ``holdfast.worker_private``, ``worker``.
    Needs ``opentelemetry-api``: it is installed with ``holdfast[opentelemetry]``.
    """
    if meter is None:
        try:
            from opentelemetry import metrics
        except ImportError as error:
            words = "opentelemetry-api is not installed: pip install 'holdfast[opentelemetry]'"
            raise ImportError(words) from error
        meter = metrics.get_meter("holdfast")
    if not callable(getattr(meter, "create_observable_gauge", None)):
        raise TypeError(f"meter has to be a Meter of OpenTelemetry, not {meter!r}")
    return Instruments(loaders, meter)


class Instruments:
    """What `opentelemetry` returns."""

    def __init__(self, loaders: tuple[Any, ...], meter: Any) -> None:
        from opentelemetry.metrics import Observation

        self._observation: Any = Observation
        self._loaders: Loaders | None = Loaders(loaders)
        self._lock = threading.Lock()  # several readers may collect at once
        self._reading: dict[str, list[Any]] = {}  # by instrument, until it has asked for its own
        self._read_at = 0.0
        made = {**dict.fromkeys(COUNTERS, "counter"), **dict.fromkeys(GAUGES, "gauge")}
        for name, kind in made.items():
            create = getattr(meter, f"create_observable_{kind}")
            text = (COUNTERS | GAUGES)[name]
            create(f"holdfast.{_bare(name)}", [self._asked(name)], _unit(name), text)

    def close(self) -> None:
        """From now on nothing is reported. OpenTelemetry keeps the instruments themselves."""
        self._loaders = None

    def _asked(self, name: str) -> Any:
        def observed(options: Any) -> list[Any]:
            with self._lock:
                now = time.monotonic()
                if name not in self._reading or now - self._read_at > SAME_COLLECTION:
                    self._reading, self._read_at = self._read(), now
                found = self._reading.pop(name)
            return found if self._loaders is not None else []

        return observed

    def _read(self) -> dict[str, list[Any]]:
        """What every instrument observes now."""
        found: dict[str, list[Any]] = {name: [] for name in (*COUNTERS, *GAUGES)}
        for labels, report in self._loaders or ():
            attributes = dict(zip(LABELS, labels, strict=True))
            for worker, size in report.worker_bytes().items():
                observed = self._observation(size, {**attributes, "worker": str(worker)})
                found["worker_private_bytes"].append(observed)
            for name, value in figures(report).items():
                found[name].append(self._observation(value, attributes))
        return found


def _bare(name: str) -> str:
    return name.removesuffix("_bytes").removesuffix("_seconds")


def _unit(name: str) -> str:
    """As OpenTelemetry's conventions have it: UCUM, and in braces what is counted."""
    if name.endswith("bytes"):
        return "By"
    return "s" if name.endswith("_seconds") else _COUNTED[name]
