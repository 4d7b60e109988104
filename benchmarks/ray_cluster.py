"""Workers on a Ray cluster, beside worker processes and beside Ray Data.

    python -m benchmarks.ray_cluster                      # a cluster of two nodes on this machine
    python -m benchmarks.ray_cluster --address auto       # the cluster that is running
    python -m benchmarks.ray_cluster --write docs/ray.md

All have two workers and make the same samples. Rounds take turns; a ratio is computed within a
round, and the table shows the medians. Ray Data makes them in a ``map``, on as many processors, and
is read with ``iter_torch_batches``. It needs ``pip install 'ray[data,train]'``.
"""

from __future__ import annotations

import argparse
import atexit
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from torch.utils.data import Dataset

import holdfast
from benchmarks.page import put
from benchmarks.workloads import decode, jpeg

# Samples in a batch, and numbers in a sample.
WORKLOADS = {
    "tiny": (32, 4),
    "tokens": (32, 512),
    "jpeg": (32, 3 * 224 * 224),
    "image": (64, 3 * 224 * 224),
}
WORKERS = 2
WARM_UP = 1.5  # seconds


class Samples(Dataset[Any]):
    """Floats, written to new memory as a decoder does; or decoded from `files`."""

    def __init__(self, length: int, size: int, files: Sequence[bytes] = ()) -> None:
        self.length, self.size, self.files = length, size, files

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if self.files:
            return decode(self.files[index % len(self.files)])
        return torch.full((self.size,), float(index))


def of_holdfast(method: str) -> Callable[[Samples, int], Iterator[Any]]:
    def batches(samples: Samples, batch_size: int) -> Iterator[Any]:
        options: Any = {"worker_method": method}
        with holdfast.DataLoader(
            samples, batch_size=batch_size, num_workers=WORKERS, **options
        ) as loader:
            yield from loader

    return batches


def of_ray_data(samples: Samples, batch_size: int) -> Iterator[Any]:
    size, files = samples.size, samples.files

    def load(row: dict[str, Any]) -> dict[str, Any]:
        if files:
            return {"x": decode(files[row["id"] % len(files)]).numpy()}
        return {"x": np.full(size, float(row["id"]), np.float32)}

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield from (
        ray.data.range(len(samples))
        .map(load)
        .iter_torch_batches(batch_size=batch_size, prefetch_batches=2 * WORKERS)
    )


LOADERS: dict[str, Callable[[Samples, int], Iterator[Any]]] = {
    "worker processes": of_holdfast("multiprocessing"),
    "Ray actors": of_holdfast("ray"),
    "Ray Data": of_ray_data,
}


def measured(name: str, workload: str, seconds: float) -> tuple[float, float]:
    """Batches per second, once it has run for a while, and milliseconds of processor time that a
    batch takes in this process."""
    batch_size, size = WORKLOADS[workload]
    files = jpeg(batch_size).pool if workload == "jpeg" else ()
    batches = LOADERS[name](Samples(10_000_000, size, files), batch_size)
    next(batches)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < WARM_UP:
        next(batches)
    began, used = time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds:
        next(batches)
        count += 1
    took, used = time.perf_counter() - began, time.process_time() - used
    batches.close()  # type: ignore[attr-defined]
    return count / took, 1e3 * used / count


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ray_cluster", description=__doc__)
    parser.add_argument("--address")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--write", type=Path, metavar="PAGE")
    asked = parser.parse_args()
    logging.getLogger("holdfast").setLevel(logging.ERROR)
    if asked.address is None:
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        atexit.register(cluster.shutdown)  # or the next program would look for it
        cluster.add_node(num_cpus=WORKERS)
        asked.address = cluster.address
    ray.init(address=asked.address, log_to_driver=False)
    lines = [
        "| workload | " + " | ".join(f"{name}, batches/s" for name in LOADERS) + " | × processes |"
        " × Ray Data | trainer, ms of CPU for a batch |",
        "| --- |" + " ---: |" * (len(LOADERS) + 3),
    ]
    for workload in asked.workloads:
        both = [
            {name: measured(name, workload, asked.seconds) for name in LOADERS}
            for _ in range(asked.repeat)
        ]
        rounds = [{name: rate for name, (rate, _) in one.items()} for one in both]
        spent = statistics.median(one["Ray actors"][1] for one in both)
        middle = {name: statistics.median(one[name] for one in rounds) for name in LOADERS}
        ratios = [
            statistics.median(one["Ray actors"] / one[other] for one in rounds)
            for other in ("worker processes", "Ray Data")
        ]
        cells = [f"{rate:,.0f}" for rate in middle.values()] + [f"{one:.2f}" for one in ratios]
        cells.append(f"{spent:.2f}")
        lines.append(f"| *{workload}* | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    if asked.write is not None:
        put(asked.write, "ray", "\n".join(lines))


if __name__ == "__main__":
    main()
