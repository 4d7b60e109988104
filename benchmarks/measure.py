"""One measurement, in a process of its own: `python -m benchmarks.measure KIND WORKLOAD LOADER …`.

A fresh process for each, because allocators, page tables and imported modules remember what ran
before. The consumer touches one element of each batch and drops it: this is about loaders, not
about training steps. Imports and the making of the data are done before the clock starts.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import importlib
import json
import mmap
import os
import signal
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.data import Dataset, default_collate

from benchmarks.loaders import LOADERS, WORKERS, Loader
from benchmarks.workloads import WORKLOADS, Batch, Samples, Stream, Workload

Values = dict[str, Any]
CLOCK_TICK = os.sysconf("SC_CLK_TCK")
LEAST_BATCHES = 6


def speed(workload: Workload, loader: Loader, seconds: float) -> Values:
    """Time to the first batch; then, in steady state, batches per second and CPU time."""
    prepare(workload, loader)
    began = time.perf_counter()
    batches = iter(loader.start(workload))
    touch(workload, next(batches))
    first = time.perf_counter() - began
    consume(workload, batches, seconds / 4)  # queues fill, buffers reach their final size

    cpu = tree_cpu_seconds()
    count, elapsed = consume(workload, batches, seconds)
    cpu = tree_cpu_seconds() - cpu
    return {
        "first_batch_s": first,
        "batches_per_s": count / elapsed,
        "cpu_s_per_gb": cpu / (count * workload.batch_bytes / 1e9),
        "cpu_s_per_batch": cpu / count,
        "batches": count,
    }


def memory(workload: Workload, loader: Loader, seconds: float) -> Values:
    """Only runs the loader: the process that started this one reads the memory of its tree."""
    prepare(workload, loader)
    count, _ = consume(workload, iter(loader.start(workload)), seconds)
    return {"batches": count}


def ceiling(workload: Workload, _: Loader, seconds: float) -> Values:
    """What two workers could do at all: twice the rate of fetching and collating in one process
    with one thread, when nothing has to be handed over."""
    torch.set_num_threads(1)
    batches = map(workload.batch, range(10**9))
    consume(workload, batches, seconds / 4)
    count, elapsed = consume(workload, batches, seconds)
    return {"batches_per_s": WORKERS * count / elapsed}


def recovery(workload: Workload, loader: Loader, _: float) -> Values:
    """From SIGKILL of a worker in the middle of a batch, with the consumer waiting for that very
    batch, until the consumer has it."""
    trap = Trap({12, 24, 36})
    trapped = dataclasses.replace(workload, build=lambda _: trap.around(workload))
    prepare(trapped, loader)
    threading.Thread(target=trap.kill_the_caught, daemon=True).start()
    took = []
    for number, batch in enumerate(loader.start(trapped)):
        if number in trap.numbers:
            took.append(time.perf_counter() - trap.killed_at[number])
            if not equal(batch, workload.batch(number)):
                raise AssertionError(f"batch {number} changed when it was redone")
        if number == max(trap.numbers):
            break
    return {"recovery_s": took}


class Trap:
    """Holds the worker that comes to one of these batches until it is killed; lets the next pass.

    Its page is shared with the workers by fork: the number of the batch, the pid of the caught.
    """

    PAGE = struct.Struct("qq")

    def __init__(self, numbers: set[int]) -> None:
        self.numbers = numbers
        self.killed_at: dict[int, float] = {}
        self.page = mmap.mmap(-1, mmap.PAGESIZE)
        self.sprung = mmap.mmap(-1, mmap.PAGESIZE)

    def visit(self, number: int) -> None:
        if number in self.numbers and not self.sprung[number]:
            self.sprung[number] = 1
            self.PAGE.pack_into(self.page, 0, number, os.getpid())
            time.sleep(600)

    def kill_the_caught(self) -> None:
        while len(self.killed_at) < len(self.numbers):
            time.sleep(0.001)
            number, pid = self.PAGE.unpack_from(self.page, 0)
            if pid:
                self.PAGE.pack_into(self.page, 0, 0, 0)
                time.sleep(0.05)  # by now the consumer waits for this batch
                self.killed_at[number] = time.perf_counter()
                os.kill(pid, signal.SIGKILL)

    def around(self, workload: Workload) -> Dataset[Any]:
        inner = workload.dataset
        if isinstance(inner, Stream):
            return TrappedStream(inner, self)
        assert isinstance(inner, Samples)
        return TrappedSamples(inner, workload.batch_size, self)


class TrappedSamples(Dataset[Any]):
    def __init__(self, inner: Samples, batch_size: int, trap: Trap) -> None:
        self.inner, self.batch_size, self.trap = inner, batch_size, trap

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        if index % self.batch_size == self.batch_size // 2:
            self.trap.visit(index // self.batch_size)
        return self.inner[index]


class TrappedStream(Stream):
    def __init__(self, inner: Stream, trap: Trap) -> None:
        super().__init__(inner.pool, inner.batch_size, inner.make)
        self.trap = trap

    def block(self, number: int) -> Iterator[Any]:
        self.trap.visit(number)
        yield from super().block(number)


def check(workload: Workload, loader: Loader, _: float) -> Values:
    """Does this loader really make these batches, in two processes that are not this one?"""
    with tempfile.TemporaryDirectory() as folder:
        witness = Witness(folder, workload.collate_fn or default_collate)
        witnessed = dataclasses.replace(workload, collate_fn=witness)
        prepare(witnessed, loader)
        Path(folder, str(os.getpid())).unlink()  # from the preparations
        batches = iter(loader.start(witnessed))
        wrong = [n for n in range(12) if not equal(next(batches), workload.batch(n))]
        pids = {int(name) for name in os.listdir(folder)}
    problems = [f"batch {number} is not what it should be" for number in wrong]
    if len(pids) != WORKERS or os.getpid() in pids:
        problems.append(f"collated in {len(pids)} processes instead of {WORKERS}")
    return {"problems": problems}


@dataclasses.dataclass(frozen=True)
class Witness:
    """A collate function that leaves a file with the pid of its process."""

    folder: str
    collate: Callable[[list[Any]], Batch]

    def __call__(self, samples: list[Any]) -> Batch:
        if os.path.isdir(self.folder):
            Path(self.folder, str(os.getpid())).touch()
        return self.collate(samples)


def equal(one: Batch, other: Batch) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return bool(one == other)


def prepare(workload: Workload, loader: Loader) -> None:
    importlib.import_module(loader.module)
    assert workload.batch_bytes  # makes the dataset
    # And batches, to see how large they are: whether the allocator keeps their memory is chance.
    # Not with holdfast's own `trim`: its modules would be in torch's figures.
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def touch(workload: Workload, batch: Batch) -> None:
    workload.first(batch).view(-1)[0].item()


def consume(workload: Workload, batches: Iterator[Batch], seconds: float) -> tuple[int, float]:
    """Take batches for so long. How many came, and how long it really took."""
    count, elapsed = 0, 0.0
    began = time.perf_counter()
    while elapsed < seconds or count < LEAST_BATCHES:
        touch(workload, next(batches))
        count += 1
        elapsed = time.perf_counter() - began
    return count, elapsed


def tree_cpu_seconds() -> float:
    """User and system time of this process and all its living descendants."""
    me = psutil.Process()
    ticks = 0
    for pid in (me.pid, *(child.pid for child in me.children(recursive=True))):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / CLOCK_TICK


KINDS: dict[str, Callable[[Workload, Loader, float], Values]] = {
    kind.__name__: kind for kind in (speed, memory, ceiling, recovery, check)
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.measure", description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("loader", choices=LOADERS)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--out", type=Path, help="write the values there instead of printing them")
    asked = parser.parse_args()
    values = KINDS[asked.kind](WORKLOADS[asked.workload], LOADERS[asked.loader], asked.seconds)
    text = json.dumps(values)
    if asked.out:
        asked.out.write_text(text)
    else:
        print(text, flush=True)
    # Some loaders take half a minute to end. The process that started this one ends the rest.
    os._exit(0)


if __name__ == "__main__":
    main()
