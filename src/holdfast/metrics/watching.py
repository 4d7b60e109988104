"""``holdfast.metrics.watch``: a function gets the figures of a loader every few seconds.

It is called by the loop itself, between two batches: loggers such as those of Weights & Biases and
MLflow want to be called in the thread that trains, and a thread beside it would be there at every
fork of a worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

from holdfast.loader_report import Report, of

T = TypeVar("T")
Callback = Callable[[dict[str, float]], Any]

TOTALS: Final = ("batches", "restarts", "incidents", "recycled")
NOW: Final = ("in_flight_bytes", "held_bytes")


def watch(loader: Iterable[T], callback: Callback, every: float = 10.0) -> Iterator[T]:
    """Iterate a loader, and call a function with its figures every so many seconds and at the end.

    The names are ``holdfast/<loader>/<figure>``, and ``holdfast/<loader>/rank<n>/<figure>`` in a
    distributed run: ``batches_per_second``, ``bytes_per_second`` and ``waited_share`` since the
    last call, ``batches``, ``restarts``, ``recycled``, ``incidents`` and ``bad_samples`` so far,
    ``in_flight_bytes``, ``held_bytes`` and ``worker_bytes/<n>`` now. The loader has to run on
    holdfast's engine: it is a :class:`holdfast.DataLoader`, or `holdfast.install` is in effect.

    >>> import holdfast, holdfast.metrics
    >>> seen = []
    >>> loader = holdfast.DataLoader([1, 2, 3], name="train")
    >>> batches = list(holdfast.metrics.watch(loader, seen.append))
    >>> seen[-1]["holdfast/train/batches"]
    3.0
    """
    if not callable(callback):
        raise TypeError(f"callback has to be a function of one dict, not {callback!r}")
    if not every >= 0:
        raise ValueError(f"every is {every!r}: it has to be a number of seconds, 0 or more")
    return _watched(loader, of(loader), callback, every)


def _watched(loader: Iterable[T], report: Report, callback: Callback, every: float) -> Iterator[T]:
    before, called = report.stats(), time.monotonic()
    taken: list[T] = []  # emptied before the user gets it: a batch is not kept here
    for batch in loader:
        taken.append(batch)
        del batch
        now = time.monotonic()
        if now - called >= every:
            after = report.stats()
            callback(_figures(report, before, after, now - called))
            before, called = after, now
        yield taken.pop()
    seconds = time.monotonic() - called
    callback(_figures(report, before, report.stats(), seconds))


def _figures(
    report: Report, before: Mapping[str, Any], after: Mapping[str, Any], seconds: float
) -> dict[str, float]:
    gained = {name: after[name] - before[name] for name in ("batches", "bytes", "wait_seconds")}
    found = {name: float(after[name]) for name in (*TOTALS, *NOW)}
    found["bad_samples"] = float(report.bad_sample_count)
    if seconds > 0:
        found["batches_per_second"] = gained["batches"] / seconds
        if report.loader.num_workers:  # without workers all is done in next(): nothing is awaited
            found["bytes_per_second"] = gained["bytes"] / seconds
            found["waited_share"] = min(1.0, gained["wait_seconds"] / seconds)
    for worker, size in report.worker_bytes().items():
        found[f"worker_bytes/{worker}"] = float(size)
    identity = report.identity
    rank = "" if identity.rank is None else f"rank{identity.rank}/"
    return {f"holdfast/{identity.loader}/{rank}{name}": value for name, value in found.items()}


class TensorBoard:
    """A callback for `watch` that writes scalars.

    ``watch(loader, TensorBoard(SummaryWriter()))`` writes each figure under its name, against the
    number of batches so far.
    """

    def __init__(self, writer: Any) -> None:
        """`writer` is a ``torch.utils.tensorboard.SummaryWriter``, or has its ``add_scalar``."""
        if not callable(getattr(writer, "add_scalar", None)):
            raise TypeError(f"writer has to be a SummaryWriter, with add_scalar(), not {writer!r}")
        self._writer = writer

    def __call__(self, figures: Mapping[str, float]) -> None:
        step = next(int(value) for name, value in figures.items() if name.endswith("/batches"))
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
