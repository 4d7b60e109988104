"""``holdfast.metrics.opentelemetry``: the figures of loaders, read when a metric reader asks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast.metrics.readings import COUNTERS, GAUGES, LABELS, Loaders, figures

__all__ = ["Instruments", "opentelemetry"]


def opentelemetry(*loaders: Any, meter: Any = None) -> Instruments:
    """Give OpenTelemetry the figures of these loaders, or of all loaders of this process that run
    on holdfast's engine, if none is given.

    Args:
        loaders: any that :func:`holdfast.of` takes. They are not kept alive.
        meter: an OpenTelemetry ``Meter``; the default is that of the global meter provider.

    The instruments are observable: they are read when your metric reader collects. Their names are
    those for Prometheus with dots, such as ``holdfast.batches`` and ``holdfast.in_flight_bytes``;
    the attributes are ``loader``, ``rank`` and, for ``holdfast.worker_private_bytes``, ``worker``.
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
        for name, text in COUNTERS.items():
            meter.create_observable_counter(f"holdfast.{name}", [self._read(name)], "", text)
        for name, text in GAUGES.items():
            meter.create_observable_gauge(f"holdfast.{name}", [self._read(name)], "", text)

    def close(self) -> None:
        """From now on nothing is reported. OpenTelemetry keeps the instruments themselves."""
        self._loaders = None

    def _read(self, name: str) -> Any:
        return lambda options: list(self._observed(name))

    def _observed(self, name: str) -> Iterator[Any]:
        for labels, report in self._loaders or ():
            attributes = dict(zip(LABELS, labels, strict=True))
            if name == "worker_private_bytes":
                for worker, size in report.worker_bytes().items():
                    yield self._observation(size, {**attributes, "worker": str(worker)})
                continue
            known = figures(report)
            if name in known:
                yield self._observation(known[name], attributes)
