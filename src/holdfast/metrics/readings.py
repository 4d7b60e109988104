"""The figures of loaders as monitoring wants them: counters and gauges, with labels."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Final

from holdfast import runtime
from holdfast.loader_report import Report, of

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


class Loaders:
    """The loaders that were named, or all of this process that run on holdfast's engine. They are
    not kept alive."""

    def __init__(self, loaders: Sequence[Any]) -> None:
        self._named = [weakref.ref(of(loader).loader) for loader in loaders]

    def __iter__(self) -> Iterator[tuple[tuple[str, str], Report]]:
        """Each that is still there, with its labels. Two of the same name are told apart by a
        number, in the order in which they were given or made: Prometheus refuses equal labels."""
        found = [ref() for ref in self._named] if self._named else runtime.loaders()
        count: dict[tuple[str, str], int] = {}
        for loader in found:
            if loader is None:
                continue
            report = Report(loader)
            if not self._named and report.engine != "holdfast":
                continue
            identity = report.identity
            labels = identity.loader, "" if identity.rank is None else str(identity.rank)
            count[labels] = again = count.get(labels, 0) + 1
            yield (labels if again == 1 else (f"{labels[0]} {again}", labels[1])), report


def figures(report: Report) -> dict[str, float]:
    """Every counter and gauge but the workers' memory. What does not apply is left out: without
    workers there is no waiting and there are no bytes."""
    found: dict[str, Any] = {**report.stats()}
    found["bad_samples"] = report.bad_sample_count
    if not report.loader.num_workers:
        found["bytes"] = found["wait_seconds"] = None
    return {name: found[name] for name in (*COUNTERS, *GAUGES) if found.get(name) is not None}
