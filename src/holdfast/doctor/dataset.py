"""Is this dataset fit for workers? One check, one function.

What can be seen by looking is looked at here; what must be tried is tried in a worker (`probe.py`)
and judged here.
"""

from __future__ import annotations

import io
import pickle
import random
import socket
import sqlite3
import statistics
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import GeneratorType
from typing import Any

import numpy as np
import torch
import torch.utils.data

from holdfast.autopsy.machine import Machine, in_words
from holdfast.doctor.check import Check, bad, good, warning
from holdfast.doctor.parts import parts
from holdfast.doctor.probe import Samples, load_samples, rate
from holdfast.engine.pickling import find_unpicklable
from holdfast.memory.packing import large_containers
from holdfast.samples import source
from holdfast.samples.source import SourceError

__all__ = ["Plan", "examine", "find"]

_TYPES: tuple[tuple[type, str], ...] = (
    (io.IOBase, "an open file"),
    (socket.socket, "a socket"),
    (sqlite3.Connection, "a database connection"),
    (zipfile.ZipFile, "an open zip archive"),
    (tarfile.TarFile, "an open tar archive"),
)
_MODULES = {
    "h5py": "an open HDF5 file",
    "tables": "an open HDF5 file",
    "lmdb": "an open LMDB environment",
    "zarr": "an open Zarr store",
    "psycopg": "a database connection",
    "psycopg2": "a database connection",
    "pymysql": "a database connection",
    "sqlalchemy": "a database connection",
    "pymongo": "a database connection",
    "redis": "a connection",
    "requests": "a connection",
    "boto3": "a connection",
    "botocore": "a connection",
    "grpc": "a connection",
    "av": "an open video",
    "decord": "an open video",
}
_SHARE = 0.5  # of what is available: beyond that, memory in flight is a worry


@dataclass(frozen=True)
class Plan:
    """How the dataset is going to be loaded."""

    batch_size: int = 32
    num_workers: int = 4
    prefetch_factor: int = 2
    samples: int = 32
    seconds: float = 2.0
    collate_fn: Any = None


def find(spec: str, given: Mapping[str, Any]) -> Any:
    """The dataset that ``package.module:name`` or ``file.py:name`` names.

    A class or a function is called with what is `given`; of a loader the dataset is taken.
    """
    found = source.named(spec)
    if isinstance(found, torch.utils.data.DataLoader):
        found = found.dataset
    if not _is_dataset(found) and callable(found):
        found = found(**given)
    if not _is_dataset(found):
        raise SourceError(
            f"{spec} is of type {type(found).__name__}: expected a dataset (with __getitem__, or an "
            "IterableDataset), or a class or function that makes one"
        )
    if isinstance(found, torch.utils.data.IterableDataset):
        return found
    if not hasattr(found, "__len__"):
        raise SourceError(f"{spec} has no __len__, which a map-style dataset needs")
    if not len(found):
        raise SourceError(f"{spec} is empty: its length is 0")
    return found


def _is_dataset(found: Any) -> bool:
    if isinstance(found, type):
        return False
    return hasattr(found, "__getitem__") or isinstance(found, torch.utils.data.IterableDataset)


def examine(
    dataset: Any, plan: Plan, machine: Machine, say: Callable[[str], None] = lambda _: None
) -> list[Check]:
    """All checks of a dataset; `say` hears what is being done."""
    checks = [pickles(dataset), containers(dataset, plan), handles(dataset)]
    checks += [generators(dataset), accelerator_tensors(dataset)]
    say(f"loading {plan.samples} samples in a forked worker")
    forked = load_samples(dataset, plan.samples, "fork")
    spawned = None if checks[0].status != "good" else Samples("spawn")
    if spawned is not None and not forked.error:
        say(f"loading {plan.samples} samples in a spawned worker")
        spawned = load_samples(dataset, plan.samples, "spawn")
    checks += [loads(forked), worker_cost(forked, spawned, plan, machine)]
    if not forked.error:
        checks += [state(forked), sample_times(forked), sample_sizes(forked)]
        checks.append(in_flight(forked, plan, machine))
        checks.append(saturation(measure_rates(dataset, plan, machine, say), plan))
    checks.append(first_trouble(checks))
    return checks


# -- by looking ---------------------------------------------------------------------------


def pickles(dataset: Any) -> Check:
    path = find_unpicklable(dataset, "dataset")
    if path is not None:
        return warning(
            "pickling",
            f"{path} does not pickle: workers can only be forked (not the default since Python 3.14)",
            "def instead of lambda; open files when they are first used, or drop them in __getstate__",
        )
    try:
        size = len(pickle.dumps(dataset, 5))
    except Exception:  # only with multiprocessing's own reducers, as when workers are started
        return good("pickling", "pickles when workers are started, by reference")
    return good("pickling", f"pickles, to {in_words(size)}")


def containers(dataset: Any, plan: Plan) -> Check:
    found = list(large_containers(dataset))
    if not found:
        return good("containers", "no large lists or dicts of Python objects")
    total = sum(one.size for one in found)
    names = "; ".join(
        f"{one.path}: {one.kind} of {one.items:,}, {in_words(one.size)}" for one in found[:4]
    )
    meaning = (
        f"{names}. Every worker that reads them copies them, {in_words(total * plan.num_workers)} for "
        f"{plan.num_workers} workers"
    )
    command = "holdfast.pack(dataset)   # before the loader is made; says what it did"
    return (warning if total >= 64 << 20 else good)("containers", meaning, command)


def handles(dataset: Any) -> Check:
    found = [f"{path} is {what}" for path, what in _handles(dataset)]
    if not found:
        return good("open handles", "no open files, sockets, archives or databases")
    return bad(
        "open handles",
        f"{'; '.join(found[:5])}. Forked workers share it, its position and its protocol too: they get "
        "each other's data",
        "open it in __getitem__ when it is first used (if self.file is None: …), not in __init__",
    )


def _handles(dataset: Any) -> Iterator[tuple[str, str]]:
    for path, value in parts(dataset):
        if isinstance(value, (io.BytesIO, io.StringIO)):
            continue
        for kind, what in _TYPES:
            if isinstance(value, kind) and not getattr(value, "closed", False):
                yield path, what
                break
        else:
            what = _MODULES.get(type(value).__module__.partition(".")[0], "")
            if what and not isinstance(value, (type, Exception)):
                yield path, what


def generators(dataset: Any) -> Check:
    kinds = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
    running = [path for path, value in parts(dataset) if isinstance(value, GeneratorType)]
    if running:
        return bad(
            "generators",
            f"{', '.join(running)}: a Python generator that was begun here goes on in every worker "
            "from the same place, and gives each the same",
            "make it in __iter__, or in worker_init_fn",
        )
    found = [path for path, value in parts(dataset) if isinstance(value, kinds)]
    if found:
        return warning(
            "generators",
            f"{', '.join(found)}: every worker begins with the same copy, so workers draw the same "
            "“random” numbers",
            "use torch's or random's global state, which is seeded for each worker",
        )
    return good("generators", "no random generator of its own")


def accelerator_tensors(dataset: Any) -> Check:
    found = [
        f"{path} ({value.device})"
        for path, value in parts(dataset)
        if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta")
    ]
    if found:
        return bad(
            "CUDA tensors",
            f"{', '.join(found[:5])}: cannot be used in a forked worker (“Cannot re-initialize CUDA”)",
            "keep data on the CPU; move batches in the training loop",
        )
    return good("CUDA tensors", "none: everything is in main memory")


# -- by trying ----------------------------------------------------------------------------


def loads(seen: Samples) -> Check:
    if seen.error:
        return bad(
            "samples",
            seen.error[:400],
            "DataLoader(…, on_bad_sample='skip')   # holdfast's: costs one sample, not the run",
        )
    return good("samples", f"{len(seen.seconds)} loaded in a worker without an error")


def worker_cost(forked: Samples, spawned: Samples | None, plan: Plan, machine: Machine) -> Check:
    """What a worker has for itself."""
    words = []
    heaviest = 0
    for seen in (forked, spawned):
        if seen is None:
            words.append("spawned: not possible, it does not pickle")
        elif not seen.private:
            words.append(f"{seen.method}: could not be measured")
        else:
            total = max(seen.private)
            heaviest = max(heaviest, total)
            words.append(
                f"{'forked' if seen.method == 'fork' else 'spawned'}: {in_words(seen.start)} of its own "
                f"at the start, {in_words(total)} after {len(seen.seconds)} samples"
            )
    available = _available(machine)
    meaning = "; ".join(words)
    if spawned is not None and spawned.resident:
        meaning += f" (spawned by torch, which shares less: up to {in_words(spawned.resident)})"
    need = heaviest * plan.num_workers
    if available and need > available:
        return bad(
            "worker cost",
            f"{meaning}. {plan.num_workers} of them do not fit into {in_words(available)}",
            "fewer workers",
        )
    if available and need > _SHARE * available:
        return warning("worker cost", f"{meaning}. {plan.num_workers} of them: {in_words(need)}")
    return good("worker cost", meaning)


def state(seen: Samples) -> Check:
    if not seen.changed:
        return good("state", "loading samples changed no attribute and no global that we see")
    return warning(
        "state",
        f"loading samples changes {', '.join(seen.changed[:8])}: each worker changes its own copy, and "
        "the trainer sees none of it",
        "return what is to be known with the sample, or use shared memory",
    )


def sample_times(seen: Samples) -> Check:
    times = sorted(seen.seconds[1:] or seen.seconds)  # the first one opens files
    middle, slowest = statistics.median(times), times[-1]
    words = f"median {_ms(middle)}, slowest {_ms(slowest)}, the first in a worker {_ms(seen.seconds[0])}"
    if slowest > max(10 * middle, 0.05):
        return warning(
            "sample time",
            f"{words}: batches wait for the slowest, because they come in order",
            "DataLoader(…, in_order=False)   # if their order does not matter",
        )
    return good("sample time", words)


def sample_sizes(seen: Samples) -> Check:
    middle, largest = statistics.median(seen.nbytes), max(seen.nbytes)
    words = f"median {in_words(int(middle))}, largest {in_words(largest)}"
    if largest > 10 * max(middle, 1024):
        return warning("sample size", f"{words}: memory must be reckoned with the largest")
    return good("sample size", words)


def in_flight(seen: Samples, plan: Plan, machine: Machine) -> Check:
    """Bytes of batches that exist at the same time, for torch and for us."""
    batch = max(seen.nbytes) * plan.batch_size
    waiting = plan.num_workers * plan.prefetch_factor * batch
    # torch's workers collate from a list of samples, ours (large samples) one by one into place.
    making = plan.num_workers * batch
    ours = plan.num_workers * (max(seen.nbytes) if max(seen.nbytes) >= 64 << 10 else batch)
    words = (
        f"a batch is up to {in_words(batch)}; {plan.num_workers} workers × prefetch_factor "
        f"{plan.prefetch_factor}: torch {in_words(waiting + making)}, holdfast "
        f"{in_words(waiting + ours)}"
    )
    available = _available(machine)
    shm = machine.shm
    less = "DataLoader(…, prefetch_factor=1, num_workers=…)   # or smaller batches"
    if available and waiting + ours > available:
        return bad("in flight", f"{words}. Only {in_words(available)} are available", less)
    if available and waiting + ours > _SHARE * available:
        return warning("in flight", f"{words}, of {in_words(available)} available", less)
    if shm is not None and waiting > shm.free:
        return warning(
            "in flight",
            f"{words}. torch's go to /dev/shm, where {in_words(shm.free)} are free: “No space left on "
            "device”. holdfast's do not",
        )
    return good("in flight", words)


def measure_rates(
    dataset: Any, plan: Plan, machine: Machine, say: Callable[[str], None]
) -> dict[int, float]:
    """Samples per second for growing numbers of workers, until more of them do not help."""
    rates: dict[int, float] = {}
    workers = 1
    most = max(plan.num_workers, machine.cpus or 1)
    while workers <= most:
        say(f"measuring {workers} worker{'s' if workers > 1 else ''}")
        try:
            rates[workers] = rate(dataset, plan.batch_size, workers, plan.seconds, plan.collate_fn)
        except Exception as error:  # a sample that only these batches hold
            say(f"stopped: {type(error).__name__}")
            break
        if workers > 1 and rates[workers] < 1.05 * max(list(rates.values())[:-1]):
            break
        workers *= 2
    return rates


def saturation(rates: dict[int, float], plan: Plan) -> Check:
    """How many workers are worth having."""
    if not rates or not max(rates.values()):
        return warning(
            "workers", "no rate could be measured: too few samples, or batches that fail"
        )
    best = max(rates.values())
    enough = min(count for count, speed in rates.items() if speed >= 0.95 * best)
    shown = ", ".join(f"{count}: {speed:,.0f}" for count, speed in rates.items())
    words = f"samples per second by number of workers: {shown}. {enough} saturate{'s' if enough == 1 else ''} this machine"
    if plan.num_workers > 2 * enough:
        return warning(
            "workers",
            f"{words}; {plan.num_workers} only cost memory",
            f"DataLoader(…, num_workers={enough})",
        )
    return good("workers", words)


_LIKELY = {
    "samples": "a sample raises an error, or ends its worker",
    "open handles": "workers read garbage through a shared handle, or crash in its library",
    "CUDA tensors": "the first batch fails: CUDA cannot be used in a forked worker",
    "in flight": "memory ends while batches wait to be used",
    "worker cost": "memory ends when the workers have started",
    "generators": "workers repeat each other's augmentation",
    "containers": "memory grows through the first epoch, as workers copy the dataset",
    "pickling": "it does not start with spawn or forkserver",
    "state": "what the dataset remembers differs from worker to worker",
    "sample size": "one large batch takes more memory than planned",
    "sample time": "the loop waits for single slow samples",
    "workers": "too many workers take memory without being faster",
}


def first_trouble(checks: Sequence[Check]) -> Check:
    """What is likely to go wrong first."""
    by_name = {check.name: check for check in checks}
    for wanted in ("bad", "warning"):
        for name, words in _LIKELY.items():
            check = by_name.get(name)
            if check is not None and check.status == wanted:
                return Check("goes wrong first", check.status, f"{words} (see {name})")
    return good("goes wrong first", "nothing that we can see")


def _available(machine: Machine) -> int | None:
    if machine.memory is None:
        return None
    return min(machine.memory.available, machine.memory_limit or machine.memory.available)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
