"""Worker threads as a kind of worker."""

from __future__ import annotations

from typing import Any

from torch.utils.data import ChainDataset, ConcatDataset, IterableDataset, StackDataset, Subset

from holdfast.engine.driver import DriverOptions
from holdfast.engine.events import Limits
from holdfast.private_names import IterDataPipe, MapDataPipe
from holdfast.threads.thread_driver import ThreadDriver
from holdfast.threads.worker_thread import Copies, Manner, name_of
from holdfast.transport.stacking import install_for_threads
from holdfast.worker.interface import Blueprint

LIMITS = Limits(killable=False, kill_after=0.1, stuck=16)


class ThreadMethod:
    """Implements `WorkerMethod`."""

    name = "thread"
    room: int | None = None

    def __init__(self, blueprint: Blueprint) -> None:
        install_for_threads()
        self.limits = LIMITS
        self._blueprint = blueprint
        self._manner = Manner()

    def driver(self, options: DriverOptions) -> ThreadDriver:
        dataset = self._blueprint.dataset
        safe = is_thread_safe(dataset)
        # An iterable dataset is a stream with a position, and worker_init_fn may give each copy of
        # it another shard.
        each = safe is False or (safe is None and isinstance(dataset, IterableDataset))
        copies = Copies(self._blueprint, each, required=safe is False)
        return ThreadDriver(copies, self._manner, self.limits, options)

    def called(self, worker: int) -> str:
        return f"worker thread {worker} ({name_of(worker)})"


def is_thread_safe(dataset: Any) -> bool | None:
    """What a dataset says about itself (``thread_safe``), or one that it is made of; None if it
    says nothing. DataPipes are not: of each only the last iterator works."""
    if isinstance(dataset, (IterDataPipe, MapDataPipe)):
        return False
    own = getattr(dataset, "thread_safe", None)
    if own is not None:
        return bool(own)
    parts: Any = ()
    if isinstance(dataset, Subset):
        parts = (dataset.dataset,)
    elif isinstance(dataset, (ConcatDataset, ChainDataset)):
        parts = dataset.datasets
    elif isinstance(dataset, StackDataset):
        parts = dataset.datasets
        parts = parts.values() if isinstance(parts, dict) else parts
    said = [is_thread_safe(part) for part in parts]
    if False in said:
        return False
    return True if said and all(said) else None
