"""Is this dataset fit for workers? One function per check.

Some checks only inspect the dataset. The others judge what was measured in a worker (`probe.py`).
"""

from __future__ import annotations

import pickle
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from holdfast.autopsy.machine_facts import MachineFacts, in_words
from holdfast.doctor.findings import Check, bad, good, warning
from holdfast.doctor.open_handles import open_handles
from holdfast.doctor.probe import (
    THREADS_GAIN,
    Samples,
    Troubled,
    as_they_are,
    gain_of_two_threads,
    load_samples,
    rate,
)
from holdfast.introspection.attributes import is_a
from holdfast.introspection.dataset_parts import parts
from holdfast.limits.budget import Budget, Share
from holdfast.limits.gauge import MemoryReading, ranks
from holdfast.limits.pressure import Pressure
from holdfast.packed.large_containers import large_containers
from holdfast.transport.placement import PLACED
from holdfast.worker.pickling import find_unpicklable

LARGE_BATCH = 16 << 20  # bytes, from which on the memory of a batch costs more than its transport
# What receiving a batch from another machine takes the trainer (docs/ray.md has the measurement):
RECEIVE_BATCH = 5e-5  # seconds on a processor,
RECEIVE_BYTE = 6e-10  # and for each byte of it
RAY_PAYS = 10  # times that for making a batch, from which on actors of other machines pay
_MUCH_MEMORY = 0.5  # of the available memory: warn if more than that is in flight


@dataclass(frozen=True)
class LoadingPlan:
    """How the dataset will be loaded."""

    batch_size: int = 32
    num_workers: int = 4
    prefetch_factor: int = 2
    memory_budget: int | Literal["auto"] | None = "auto"
    samples: int = 32
    seconds: float = 2.0
    collate_fn: Any = None


def examine(
    dataset: Any,
    plan: LoadingPlan,
    machine: MachineFacts,
    room: MemoryReading,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Check]:
    """All checks of a dataset; `progress` is called with what is being done."""
    opened = handles(dataset)  # before pickling, which makes some libraries close their file
    checks = [pickles(dataset), containers(dataset, plan), opened]
    checks += [generators(dataset), accelerator_tensors(dataset)]
    progress(f"loading {plan.samples} samples in a forked worker")
    forked = load_samples(dataset, plan.samples, "fork")
    spawned = None if checks[0].status != "good" else Samples("spawn")
    if spawned is not None and not forked.error:
        progress(f"loading {plan.samples} samples in a spawned worker")
        spawned = load_samples(dataset, plan.samples, "spawn")
    checks += [loads(forked, spawned), worker_cost(forked, spawned, plan, room)]
    if forked.seconds and not forked.error:
        checks += [state(forked), sample_times(forked), sample_sizes(forked)]
        checks.append(in_flight(forked, plan, machine, room))
        rates = measure_rates(dataset, plan, machine, progress)
        if rates.crashed:
            words = f"one that was not among the {len(forked.seconds)}: {rates.error}"
            checks += [bad("other samples", words, rates.remedy), good("worker method", _CRASHES)]
        else:
            checks.append(worker_method(dataset, plan, checks[0], forked, progress))
            checks.append(other_machines(plan, checks[0], forked))
            if rates.by_workers:
                checks.append(collation(rates))
            checks.append(saturation(rates, plan))
    elif forked.crashed:
        checks.append(good("worker method", _CRASHES))
    checks.append(first_trouble(checks))
    return checks


_CRASHES = "processes: a sample ends its worker, and a thread that crashes ends the program"


def cannot_be_made(error: BaseException) -> Check:
    """The check if importing or making the dataset failed."""
    return bad(
        "making it",
        f"failed: {type(error).__name__}: {error}",
        "--arg NAME=VALUE   # if it needs arguments",
    )


# -- by inspecting it ---------------------------------------------------------------------


def pickles(dataset: Any) -> Check:
    path = find_unpicklable(dataset, "dataset")
    if path is not None:
        return warning(
            "pickling",
            f"{path} cannot be pickled: workers can only be forked (not the default since Python 3.14)",
            "def instead of lambda; open files when they are first used, or drop them in __getstate__",
        )
    try:
        size = len(pickle.dumps(dataset, 5))
    except Exception:  # needs multiprocessing's own reducers, which are used to start workers
        return good("pickling", "can be pickled to start workers, by reference")
    return good("pickling", f"can be pickled, to {in_words(size)}")


def containers(dataset: Any, plan: LoadingPlan) -> Check:
    found = list(large_containers(dataset))
    if not found:
        return good("containers", "no large lists or dicts of Python objects")
    total = sum(one.size for one in found)
    names = "; ".join(
        f"{one.path}: {one.kind} of {one.items:,}, {in_words(one.size)}" for one in found[:4]
    )
    meaning = (
        f"{names}. Every worker that reads them copies them: {in_words(total * plan.num_workers)} with "
        f"{plan.num_workers} workers"
    )
    command = "holdfast.pack(dataset)   # before the loader is made; says what it did"
    return (warning if total >= 64 << 20 else good)("containers", meaning, command)


def handles(dataset: Any) -> Check:
    found = [f"{path} is {what}" for path, what in open_handles(dataset)]
    if not found:
        return good("open handles", "no open files, sockets, archives or databases")
    more = f", and {len(found) - 5} more" if len(found) > 5 else ""
    return bad(
        "open handles",
        f"{'; '.join(found[:5])}{more}. Forked workers share it with its position and its protocol: "
        "they get each other's data, or crash in its library",
        "open it in __getitem__ when it is first used (if self.file is None: …), not in __init__",
    )


def generators(dataset: Any) -> Check:
    kinds = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
    running = [path for path, value in parts(dataset) if _is_begun(value)]
    if running:
        return bad(
            "generators",
            f"{', '.join(running)}: every worker continues a copy of this generator or iterator from "
            "the same place, so all get the same items",
            "make it in __iter__, or in worker_init_fn",
        )
    found = [path for path, value in parts(dataset) if is_a(value, kinds)]
    if found:
        return warning(
            "generators",
            f"{', '.join(found)}: every worker starts with the same copy, so all workers draw the same "
            "“random” numbers",
            "use torch's or random's global state, which is seeded for each worker",
        )
    return good("generators", "no random generator of its own")


def _is_begun(value: Any) -> bool:
    """Whether it can be iterated only once, and is not a file."""
    kind = type(value)
    return hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools", "_csv")


def accelerator_tensors(dataset: Any) -> Check:
    found = [
        f"{path} ({value.device})"
        for path, value in parts(dataset)
        if is_a(value, torch.Tensor) and value.device.type not in ("cpu", "meta")
    ]
    if found:
        return bad(
            "CUDA tensors",
            f"{', '.join(found[:5])}: cannot be used in a forked worker (“Cannot re-initialize CUDA”)",
            "keep data on the CPU; move batches in the training loop",
        )
    return good("CUDA tensors", "none: everything is in main memory")


# -- by loading samples -------------------------------------------------------------------


def loads(forked: Samples, spawned: Samples | None) -> Check:
    for seen in (forked, spawned):
        if seen is not None and seen.error:
            how = "" if seen is forked else "in a spawned worker, not in a forked one: "
            return bad("samples", f"{how}{seen.error[:400]}", seen.remedy)
    if not forked.seconds:
        return bad("samples", "the dataset gave none: the loop would end before its first batch")
    return good("samples", f"{len(forked.seconds)} loaded in a worker without an error")


def worker_cost(
    forked: Samples, spawned: Samples | None, plan: LoadingPlan, room: MemoryReading
) -> Check:
    """The private memory of a worker."""
    words = []
    heaviest = 0
    for seen in (forked, spawned):
        if seen is None:
            words.append("spawned: not possible, the dataset cannot be pickled")
        elif not seen.private:
            words.append(f"{seen.method}: could not be measured")
        else:
            total = max(seen.private)
            heaviest = max(heaviest, total)
            words.append(
                f"{'forked' if seen.method == 'fork' else 'spawned'}: {in_words(seen.start)} private "
                f"at the start, {in_words(total)} after {len(seen.seconds)} samples"
            )
    available = room.free
    meaning = "; ".join(words)
    if not heaviest:
        return warning("worker cost", meaning)
    if spawned is not None and spawned.resident:
        meaning += f" (spawned by torch, which shares less: up to {in_words(spawned.resident)})"
    need = heaviest * plan.num_workers
    if available and need > available:
        return bad(
            "worker cost",
            f"{meaning}. {plan.num_workers} of them do not fit into {in_words(available)}",
            "fewer workers",
        )
    if available and need > _MUCH_MEMORY * available:
        return warning("worker cost", f"{meaning}. {plan.num_workers} of them: {in_words(need)}")
    return good("worker cost", meaning)


def state(seen: Samples) -> Check:
    if not seen.changed:
        return good("state", "loading samples changed no attribute and no global that was compared")
    more = f", and {len(seen.changed) - 8} more" if len(seen.changed) > 8 else ""
    return warning(
        "state",
        f"loading samples changes {', '.join(seen.changed[:8])}{more}: each worker changes its own "
        "copy, and the trainer sees none of it",
        "return such values with the sample, or use shared memory",
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
        return warning("sample size", f"{words}: plan memory for the largest")
    return good("sample size", words)


def worker_method(
    dataset: Any,
    plan: LoadingPlan,
    pickling: Check,
    seen: Samples,
    progress: Callable[[str], None],
) -> Check:
    """Processes or threads: by what two threads gain."""
    if isinstance(dataset, torch.utils.data.IterableDataset):
        words = "processes; whether threads would do is not measured for an iterable dataset"
        return good("worker method", words)
    progress("loading samples in two threads of a worker")
    try:
        gain = gain_of_two_threads(dataset, min(plan.samples, 16))
    except Troubled as trouble:
        words = f"processes: in two threads at a time its samples do not load ({trouble})"
        return good("worker method", words)
    measured = f"two threads load {gain.samples:.1f} times as many samples as one"
    if gain.samples >= THREADS_GAIN and (gain.reliable or _waits(seen)):
        no_pickle = (
            "" if pickling.status == "good" else "; it cannot be pickled, which is no matter"
        )
        batch = int(statistics.median(seen.nbytes)) * plan.batch_size
        large = (
            f". But its batches have {in_words(batch)}, which the collate_fn makes in new memory, "
            "and processes copy into memory that is used again: measure both (holdfast tune)"
        )
        costs = plan.collate_fn is not None and batch >= LARGE_BATCH
        words = (
            f"{measured}, so Python's lock is free most of the time: worker_method='thread' would do"
            f"{no_pickle}. Nothing is pickled or copied with it, but a sample that crashes ends the "
            f"program then, and not only its worker{large if costs else ''}"
        )
    elif not gain.reliable:
        words = (
            f"processes, as long as it cannot be told: {measured}, and a calculation without "
            f"Python's lock gains {gain.possible:.1f} times, but fewer than two processors are free "
            f"at present ({gain.load:.1f} programs for each). Repeat this when they are"
        )
    else:
        words = f"processes: {measured}, because Python's lock is held"
    return good("worker method", words)


def _waits(seen: Samples) -> bool:
    """Whether loading a sample is mostly waiting: for a disk, a network, a lock."""
    return statistics.median(seen.busy) < statistics.median(seen.seconds) / 2


def other_machines(plan: LoadingPlan, pickling: Check, seen: Samples) -> Check:
    """Whether processors of other machines would help: actors of a Ray cluster."""
    name = "other machines"
    if pickling.status != "good":
        return good(name, "no: it cannot be pickled, so worker_method='ray' cannot be used")
    if _waits(seen):
        words = "not needed: loading a sample is mostly waiting, so more workers here do as well"
        return good(name, words)
    making = statistics.median(seen.busy) * plan.batch_size
    receiving = RECEIVE_BATCH + RECEIVE_BYTE * statistics.median(seen.nbytes) * plan.batch_size
    words = (
        f"making a batch takes a processor {_ms(making)}, and receiving it from another machine takes "
        f"the trainer about {_ms(receiving)}: worker_method='ray' "
    )
    if making >= RAY_PAYS * receiving:
        return good(name, f"{words}pays if the processors of this machine are not enough")
    return good(name, f"{words}would not pay")


def in_flight(
    seen: Samples, plan: LoadingPlan, machine: MachineFacts, room: MemoryReading
) -> Check:
    """Bytes of batches that exist at the same time, with torch's loader and with ours."""
    sample = max(seen.nbytes)
    batch = sample * plan.batch_size
    waiting = plan.num_workers * plan.prefetch_factor * batch
    given = plan.memory_budget
    budget = Budget(None, auto=True) if given == "auto" else Budget(given)
    budget.adapt(room.free, ranks(), plan.num_workers)
    # torch's workers collate a list of samples; ours copy large samples one by one into the batch.
    making = plan.num_workers * batch
    placing = plan.num_workers * (sample if sample >= PLACED else batch)
    ours = _ordered(budget, batch, plan, room) + placing
    allows = "" if budget.limit is None else f" (memory_budget: {in_words(budget.limit)})"
    words = (
        f"a batch is up to {in_words(batch)}; {plan.num_workers} workers × prefetch_factor "
        f"{plan.prefetch_factor}: torch {in_words(waiting + making)}, holdfast "
        f"{in_words(ours)}{allows}"
    )
    available = room.free
    shm = machine.shm
    less = "DataLoader(…, prefetch_factor=1, num_workers=…)   # or smaller batches"
    if available is not None and ours > available:
        return bad("in flight", f"{words}. Only {in_words(available)} are available", less)
    if available is not None and ours > _MUCH_MEMORY * available:
        return warning("in flight", f"{words}, of {in_words(available)} available", less)
    if available is not None and waiting + making > available:
        return warning(
            "in flight",
            f"{words}, of {in_words(available)} available: too much for torch's loader. holdfast's "
            "loader keeps only what fits",
        )
    if shm is not None and waiting > shm.free:
        return warning(
            "in flight",
            f"{words}. torch's batches go to /dev/shm, where {in_words(shm.free)} are free: “No space "
            "left on device”. holdfast's do not",
        )
    return good("in flight", words)


def _ordered(budget: Budget, batch: int, plan: LoadingPlan, room: MemoryReading) -> int:
    """Bytes our loader would have in flight: as many batches as its budget allows."""
    share = Share(budget)
    pressure = Pressure(oom_group=room.oom_group)
    pressure.observe(room.fill, 0.0)
    share.cap = pressure.cap(None if room.free is None else room.free // ranks())
    allowed, most = share.room(), plan.num_workers * plan.prefetch_factor
    share.close()
    return batch * (most if allowed is None else min(most, max(1, allowed // max(1, batch))))


@dataclass
class Rates:
    """Samples per second by number of workers; and the error that ended the measuring, if any."""

    by_workers: dict[int, float] = field(default_factory=dict)
    uncollated: str = ""  # why batches were not collated
    error: str = ""
    crashed: bool = False  # a sample has ended its worker
    remedy: str = ""


def measure_rates(
    dataset: Any, plan: LoadingPlan, machine: MachineFacts, progress: Callable[[str], None]
) -> Rates:
    """Samples per second for growing numbers of workers, until more of them do not help."""
    found = Rates()
    collate = plan.collate_fn
    workers = 1
    most = max(plan.num_workers, machine.cpus or 1)
    while workers <= most:
        progress(f"measuring {workers} worker{'s' if workers > 1 else ''}")
        try:
            speed = rate(dataset, plan.batch_size, workers, plan.seconds, collate)
        except Troubled as trouble:  # a sample that was not loaded before, or collating failed
            incident = trouble.incident
            if incident is not None and incident.kind not in ("stalled", "start-failed"):
                found.error, found.remedy, found.crashed = str(trouble), trouble.remedy, True
                break
            if collate is None and not found.by_workers:
                found.uncollated, collate = str(trouble), as_they_are
                continue
            found.error = str(trouble)
            break
        before = max(found.by_workers.values(), default=0.0)
        found.by_workers[workers] = speed
        if speed < 1.05 * before:
            break
        workers *= 2
    return found


def saturation(rates: Rates, plan: LoadingPlan) -> Check:
    """How many workers are worth having."""
    speeds = rates.by_workers
    if not speeds or not max(speeds.values()):
        why = rates.error or "there are too few samples"
        return warning("workers", f"no rate could be measured: {why}", _NAME_THE_LOADER)
    best = max(speeds.values())
    enough = min(count for count, speed in speeds.items() if speed >= 0.95 * best)
    shown = ", ".join(f"{count}: {speed:,.0f}" for count, speed in speeds.items())
    words = f"samples per second by number of workers: {shown}. {enough} saturate{'s' if enough == 1 else ''} this machine"
    if rates.error:
        words += f". With more workers: {rates.error}"
        return warning("workers", words)
    if rates.uncollated:
        return good("workers", f"{words}, without collating")
    if plan.num_workers > 2 * enough:
        return warning(
            "workers",
            f"{words}; {plan.num_workers} only cost memory",
            f"DataLoader(…, num_workers={enough})",
        )
    return good("workers", words)


def collation(rates: Rates) -> Check:
    """Whether samples can be collated, with the collate_fn that is known."""
    if rates.uncollated:
        return warning(
            "batches", f"samples cannot be collated: {rates.uncollated}", _NAME_THE_LOADER
        )
    return good("batches", "samples can be collated")


_NAME_THE_LOADER = (
    "name the loader instead of its dataset, so that its collate_fn is used: mypackage.data:loader"
)

_CONSEQUENCES = {
    "samples": "a sample raises an error, or ends its worker",
    "other samples": "a sample ends its worker",
    "open handles": "workers read garbage through a shared handle, or crash in its library",
    "CUDA tensors": "the first batch fails: CUDA cannot be used in a forked worker",
    "batches": "the first batch fails, unless the loader has its own collate_fn",
    "in flight": "memory runs out while batches wait to be used",
    "worker cost": "memory runs out when the workers have started",
    "generators": "all workers draw the same random numbers or items",
    "containers": "memory grows through the first epoch, because workers copy the dataset",
    "pickling": "workers do not start with spawn or forkserver",
    "state": "the dataset's attributes differ from worker to worker",
    "sample size": "one large batch takes more memory than planned",
    "sample time": "the loop waits for single slow samples",
    "workers": "too many workers take memory without being faster",
}


def first_trouble(checks: Sequence[Check]) -> Check:
    """What is likely to go wrong first."""
    by_name = {check.name: check for check in checks}
    for wanted in ("bad", "warning"):
        for name, words in _CONSEQUENCES.items():
            check = by_name.get(name)
            if check is not None and check.status == wanted:
                return Check("goes wrong first", check.status, f"{words} (see {name})")
    return good("goes wrong first", "nothing that these checks can see")


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
