"""Who loads: holdfast, torch, and the peers, each with two worker processes.

An adapter starts its loader and yields the batches of a workload in order. Every peer is used in
the fastest form of those we tried, and with about as many batches in flight as torch's default of
two per worker. Those without a map-style dataset of their own (torchdata.nodes, SPDL, Grain) are
handed the number of a batch and call `Workload.batch` in their workers, which spares them work per
sample.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np
import torch
import torch.multiprocessing

from benchmarks.workloads import ENDLESS, Batch, Workload

WORKERS = 2
IN_FLIGHT = 2  # per worker


@dataclass(frozen=True)
class Loader:
    name: str
    distribution: str
    module: str
    start: Callable[[Workload], Iterable[Batch]]

    @property
    def present(self) -> bool:
        try:
            return importlib.util.find_spec(self.module) is not None
        except ModuleNotFoundError:  # not even the package around it
            return False

    @property
    def version(self) -> str:
        """Of what is installed, or of what lies on the path without being installed."""
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            package = importlib.import_module(self.module.partition(".")[0])
            return str(getattr(package, "__version__", "unknown"))


def torch_like(
    loader_class: Callable[..., Iterable[Batch]],
    workload: Workload,
    prefetch_factor: int | None = IN_FLIGHT,
) -> Iterable[Batch]:
    return loader_class(
        workload.dataset,
        batch_size=workload.batch_size,
        num_workers=WORKERS,
        prefetch_factor=prefetch_factor,
        collate_fn=workload.collate_fn,
    )


def holdfast(workload: Workload) -> Iterable[Batch]:
    from holdfast import DataLoader

    return torch_like(DataLoader, workload)


def holdfast_threads(workload: Workload) -> Iterable[Batch]:
    from holdfast import DataLoader

    return torch_like(functools.partial(DataLoader, worker_method="thread"), workload)


def holdfast_ahead(workload: Workload) -> Iterable[Batch]:
    """How many batches are made ahead is left to holdfast."""
    from holdfast import DataLoader

    return torch_like(DataLoader, workload, None)


def holdfast_threads_ahead(workload: Workload) -> Iterable[Batch]:
    from holdfast import DataLoader

    return torch_like(functools.partial(DataLoader, worker_method="thread"), workload, None)


def stock(workload: Workload) -> Iterable[Batch]:
    from torch.utils.data import DataLoader

    return torch_like(DataLoader, workload)


def stateful(workload: Workload) -> Iterable[Batch]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return torch_like(StatefulDataLoader, workload)


def nodes(workload: Workload) -> Iterable[Batch]:
    from torchdata.nodes import IterableWrapper, Loader, ParallelMapper

    mapper = ParallelMapper(
        IterableWrapper(range(ENDLESS)),
        workload.batch,
        num_workers=WORKERS,
        method="process",
        multiprocessing_context="fork",
    )
    batches: Iterable[Batch] = Loader(mapper)
    return batches


def nodes_threads(workload: Workload) -> Iterable[Batch]:
    from torchdata.nodes import IterableWrapper, Loader, ParallelMapper

    mapper = ParallelMapper(
        IterableWrapper(range(ENDLESS)), workload.batch, num_workers=WORKERS, method="thread"
    )
    batches: Iterable[Batch] = Loader(mapper)
    return batches


def spdl_threads(workload: Workload) -> Iterator[Batch]:
    """A pipeline in this process that maps in its own threads."""
    from spdl.pipeline import PipelineBuilder

    builder: PipelineBuilder[int, Batch] = PipelineBuilder()
    pipeline = (
        builder.add_source(range(ENDLESS))
        .pipe(workload.batch, concurrency=WORKERS, output_order="input")
        .add_sink(IN_FLIGHT)
        .build(num_threads=WORKERS)
    )
    with pipeline.auto_stop():
        yield from pipeline.get_iterator(timeout=60)


def spdl(workload: Workload) -> Iterator[Batch]:
    """SPDL offers several ways. Measured in turns, the shared-memory ring was the faster one for
    small batches (up to five times), the process pool for those of some ten MB (by a third)."""
    way = spdl_pool if workload.batch_bytes > 25e6 else spdl_ring
    yield from way(workload)


def spdl_ring(workload: Workload) -> Iterator[Batch]:
    """One pipeline process per worker, each with a ring of shared memory."""
    from spdl.pipeline import SharedMemoryRingBuffer, iterate_in_subprocess

    room = (IN_FLIGHT + 2) * workload.batch_bytes + 2**20
    parts = [
        iter(
            iterate_in_subprocess(
                functools.partial(_every_nth_batch, workload, worker),
                buffer_size=IN_FLIGHT,
                mp_context="fork",
                arena=SharedMemoryRingBuffer(room),
            )
        )
        for worker in range(WORKERS)
    ]
    for part in itertools.cycle(parts):
        yield next(part)


def spdl_pool(workload: Workload) -> Iterator[Batch]:
    """A pipeline in this process that maps over a pool; tensors come as torch sends them."""
    from spdl.pipeline import PipelineBuilder

    _of_the_pool.append(workload)  # inherited by fork, not pickled with every task
    executor = ProcessPoolExecutor(
        WORKERS,
        mp_context=torch.multiprocessing.get_context("fork"),
        initializer=torch.set_num_threads,
        initargs=(1,),
    )
    builder: PipelineBuilder[int, Batch] = PipelineBuilder()
    pipeline = (
        builder.add_source(range(ENDLESS))
        .pipe(_batch_in_the_pool, executor=executor, concurrency=WORKERS, output_order="input")
        .add_sink(IN_FLIGHT)
        .build(num_threads=1)
    )
    with pipeline.auto_stop():
        yield from pipeline.get_iterator(timeout=60)


_of_the_pool: list[Workload] = []


def _batch_in_the_pool(number: int) -> Batch:
    return _of_the_pool[-1].batch(number)


def _every_nth_batch(workload: Workload, worker: int) -> Iterator[Batch]:
    torch.set_num_threads(1)
    for number in range(worker, ENDLESS, WORKERS):
        yield workload.batch(number)


def grain(workload: Workload) -> Iterator[Batch]:
    """Grain moves NumPy arrays, so tensors are wrapped (without a copy) on both sides. Arrays of
    less than 64 KiB go through its queue: a shared-memory file for each would be slower."""
    from grain import MapDataset, MultiprocessingOptions, ReadOptions
    from grain.experimental import DatasetOptions, WithOptionsIterDataset

    options = MultiprocessingOptions(num_workers=WORKERS, per_worker_buffer_size=IN_FLIGHT)
    batches = MapDataset.source(NumpyBatches(workload))
    stream = batches.to_iter_dataset(ReadOptions(num_threads=0, prefetch_buffer_size=0))
    stream = WithOptionsIterDataset(stream, DatasetOptions(min_shm_size=64 * 1024))
    for batch in stream.mp_prefetch(options, worker_init_fn=_one_thread):
        yield _rewrap(batch, np.ndarray, torch.from_numpy)


class NumpyBatches:
    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, number: int) -> Any:
        return _rewrap(self.workload.batch(number), torch.Tensor, torch.Tensor.numpy)


def _one_thread(worker: int, workers: int) -> None:
    torch.set_num_threads(1)


def _rewrap(batch: Any, kind: type, wrap: Callable[[Any], Any]) -> Any:
    if isinstance(batch, kind):
        return wrap(batch)
    if isinstance(batch, dict):
        return {key: _rewrap(value, kind, wrap) for key, value in batch.items()}
    return batch


LOADERS = {
    loader.name: loader
    for loader in (
        Loader("holdfast", "holdfast", "holdfast.loader", holdfast),
        Loader("torch", "torch", "torch", stock),
        Loader("stateful", "torchdata", "torchdata.stateful_dataloader", stateful),
        Loader("nodes", "torchdata", "torchdata.nodes", nodes),
        Loader("spdl", "spdl-core", "spdl.pipeline", spdl),
        Loader("grain", "grain", "grain", grain),
        Loader("holdfast threads", "holdfast", "holdfast.loader", holdfast_threads),
        Loader("holdfast ahead", "holdfast", "holdfast.loader", holdfast_ahead),
        Loader("holdfast threads ahead", "holdfast", "holdfast.loader", holdfast_threads_ahead),
        Loader("nodes threads", "torchdata", "torchdata.nodes", nodes_threads),
        Loader("spdl threads", "spdl-core", "spdl.pipeline", spdl_threads),
    )
}
FURTHER_AHEAD = ("holdfast ahead", "holdfast threads ahead")
"""With more batches in flight than the others, so compared among themselves (`methods`)."""
