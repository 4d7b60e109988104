"""``holdfast.metrics.prometheus``: the figures of loaders, read when Prometheus asks for them."""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final

from holdfast import runtime
from holdfast.report import Report, of

__all__ = ["COUNTERS", "GAUGES", "Exporter", "prometheus"]

LABELS: Final = ("loader", "rank")
COUNTERS: Final = {
    "batches": "Batches that were delivered.",
    "bytes": "Bytes of batches that came from workers.",
    "wait_seconds": "Seconds in which the consumer waited for a worker's batch.",
    "epochs": "Epochs that were begun.",
    "restarts": "Workers that were replaced after a death or a stall.",
    "recycled": "Workers that were replaced for their size.",
    "incidents": "Deaths, stalls and failed starts of workers.",
    "bad_samples": "Samples that could not be used.",
}
"""``holdfast_<name>_total``, with what it says."""
GAUGES: Final = {
    "in_flight_bytes": "Bytes of batches that are ordered and not handed over yet.",
    "held_bytes": "Bytes of batches that the consumer keeps.",
    "budget_bytes": "Bytes that may be in flight.",
    "worker_private_bytes": "Private bytes of a worker.",
}
"""``holdfast_<name>``; the last one has the label ``worker`` too."""


def prometheus(
    *loaders: Any, port: int | None = None, address: str = "127.0.0.1", registry: Any = None
) -> Exporter:
    """Let Prometheus read the figures of these loaders, or of all loaders of this process that
    run on holdfast's engine, if none is given.

    Args:
        loaders: any that :func:`holdfast.of` takes. They are not kept alive.
        port: serve the figures there; 0 for a free port, which `Exporter.port` tells. Each rank
            needs a port of its own, such as ``9400 + local_rank``.
        address: where to listen. The default is this machine only; ``""`` is all addresses.
        registry: a ``CollectorRegistry`` of yours, to add the figures to what you serve already.
            Give either this or `port`.

    It ends with `Exporter.close`, or with the ``with`` block. Needs ``prometheus_client``: it is
    installed with ``holdfast[prometheus]``.
    """
    if (port is None) == (registry is None):
        raise TypeError(
            "prometheus() takes either port=, a number, or registry=, a CollectorRegistry of "
            "prometheus_client; " + ("none was given" if port is None else "both were given")
        )
    if registry is not None and not callable(getattr(registry, "register", None)):
        raise TypeError(f"registry has to be a CollectorRegistry, not {registry!r}")
    return Exporter([of(loader) for loader in loaders], port, address, registry)


class Exporter:
    """What `prometheus` returns."""

    def __init__(
        self, reports: list[Report], port: int | None, address: str, registry: Any
    ) -> None:
        try:
            import prometheus_client
            from prometheus_client import core
        except ImportError as error:
            words = "prometheus_client is not installed: pip install 'holdfast[prometheus]'"
            raise ImportError(words) from error
        self._core: Any = core
        self._loaders = [weakref.ref(report.loader) for report in reports]
        self._registry = prometheus_client.CollectorRegistry() if registry is None else registry
        self._server: Any = None
        self._thread: threading.Thread | None = None
        self._registry.register(self)
        if port is not None:
            self._server, self._thread = prometheus_client.start_http_server(
                port, address, self._registry
            )

    @property
    def port(self) -> int | None:
        """Where it is served; None with a registry of yours."""
        return None if self._server is None else self._server.server_port

    def close(self) -> None:
        """Stop serving, and leave the registry. Nothing happens the second time."""
        if self._registry is not None:
            self._registry.unregister(self)
            self._registry = None
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            # Workers that were forked meanwhile have the socket too, and would keep the port.
            with contextlib.suppress(OSError):
                self._server.socket.shutdown(socket.SHUT_RDWR)
            self._server.server_close()
            self._thread.join()
            self._server = None

    def __enter__(self) -> Exporter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- what prometheus_client calls, in a thread of its own ------------------------------

    def describe(self) -> list[Any]:
        """Nothing: it would be read when it is registered."""
        return []

    def collect(self) -> Iterator[Any]:
        """All families, with a sample for each loader."""
        counters = {
            name: self._core.CounterMetricFamily(f"holdfast_{name}", text, labels=LABELS)
            for name, text in COUNTERS.items()
        }
        gauges = {
            name: self._core.GaugeMetricFamily(
                f"holdfast_{name}",
                text,
                labels=(*LABELS, "worker") if name == "worker_private_bytes" else LABELS,
            )
            for name, text in GAUGES.items()
        }
        for labels, report in self._labelled():
            figures = report.stats()
            counts: dict[str, int | float | None] = {**figures}
            counts["bad_samples"] = report.bad_sample_count
            if not report.loader.num_workers:  # nothing comes from workers, or is awaited
                counts["bytes"] = counts["wait_seconds"] = None
            for name, family in counters.items():
                if counts[name] is not None:
                    family.add_metric(labels, counts[name])
            for name, family in gauges.items():
                if figures.get(name) is not None:
                    family.add_metric(labels, figures[name])
            for worker, size in report.worker_bytes().items():
                gauges["worker_private_bytes"].add_metric((*labels, str(worker)), size)
        yield from counters.values()
        yield from gauges.values()

    def _labelled(self) -> Iterator[tuple[tuple[str, str], Report]]:
        """Each loader that is still there. Two of the same name are told apart by a number, in
        the order in which they were given or made: Prometheus refuses equal labels."""
        found = [ref() for ref in self._loaders] if self._loaders else runtime.loaders()
        count: dict[tuple[str, str], int] = {}
        for loader in found:
            if loader is None:
                continue
            report = Report(loader)
            if not self._loaders and report.engine != "holdfast":
                continue
            identity = report.identity
            labels = identity.loader, "" if identity.rank is None else str(identity.rank)
            count[labels] = again = count.get(labels, 0) + 1
            yield (labels if again == 1 else (f"{labels[0]} {again}", labels[1])), report
