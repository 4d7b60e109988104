"""``holdfast.metrics.prometheus``: the figures of loaders, read when Prometheus asks for them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from holdfast.metrics.readings import COUNTERS, GAUGES, LABELS, Loaders, figures


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
    return Exporter(loaders, port, address, registry)


class Exporter:
    """What `prometheus` returns."""

    def __init__(
        self, loaders: Sequence[Any], port: int | None, address: str, registry: Any
    ) -> None:
        try:
            import prometheus_client
            from prometheus_client import core
        except ImportError as error:
            words = "prometheus_client is not installed: pip install 'holdfast[prometheus]'"
            raise ImportError(words) from error
        self._core: Any = core
        self._loaders = Loaders(loaders)
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

    def __exit__(self, *_: object) -> None:
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
        for labels, report in self._loaders:
            known = figures(report)
            for name, family in (*counters.items(), *gauges.items()):
                if name in known:
                    family.add_metric(labels, known[name])
            for worker, size in report.worker_bytes().items():
                gauges["worker_private_bytes"].add_metric((*labels, str(worker)), size)
        yield from counters.values()
        yield from gauges.values()
