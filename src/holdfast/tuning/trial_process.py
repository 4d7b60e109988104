"""The process of one trial: makes a loader with one setting, takes its batches, and measures.

It is forked from the command, which has the dataset, so a trial that crashes, hangs or takes all
memory ends itself and not the command. It takes batches before and after the time that is
measured: so several of them (one for each rank) are all at work in the time that each measures.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final

import torch.utils.data

from holdfast import kernel, loader_report, runtime
from holdfast.autopsy.readers import procfs
from holdfast.doctor.probe import Troubled, trouble_of
from holdfast.limits import gauge
from holdfast.loader import DataLoader
from holdfast.option_sources import PREFIX
from holdfast.tuning.measurement import Setting, Slice, Trouble

SLICES: Final = 6  # in which the time is divided, to see how much rates differ
LONGEST: Final = 4.0  # times the time given, if batches take long or processors are in use
AT_WORK: Final = 0.3  # of the time given, in which workers were not waiting for a processor
FEW: Final = 3  # batches of each worker that are measured, if that does not take too long
ASKING: Final = 0.3  # seconds of asking for Python's lock,
ASKED: Final = 8  # and how often at least
OF_MEMORY: Final = ("oom-killed", "group-oom", "allocation-failed", "fork-enomem")


@dataclass(frozen=True)
class Job:
    """What is loaded, and for how long."""

    dataset: Any
    batch_size: int | None = 32
    collate: Any = None
    options: dict[str, Any] = field(default_factory=dict)  # of the loader, as given
    batch_sampler: Any = None  # of a loader that was named
    window: float = 1.0  # seconds to measure
    stall_timeout: float = 30.0
    memory: int | None = None  # bytes for batches in flight, if they are not those of "auto"
    on_bad_sample: Any = "raise"
    ranks: int = 1


@dataclass(frozen=True)
class Ready:
    """All workers have given a batch."""

    pids: tuple[int, ...]  # of workers that are processes
    tids: tuple[int, ...]  # of workers that are threads of the trial's process


def run_trial(job: Job, setting: Setting, seed: int, line: Connection, output: int) -> None:
    """The main function of the process. Sends `Ready`, waits for a word, sends a dict with the
    result, and goes on until it is ended."""
    os.setpgid(0, 0)  # so that the command can end this process and all it has started
    kernel.die_with_parent()
    for fd in (1, 2):
        os.dup2(output, fd)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    logging.getLogger("holdfast").disabled = True
    os.environ["LOCAL_WORLD_SIZE"] = str(job.ranks)
    for name in ("LOGBOOK", "QUARANTINE"):  # those of the user's runs
        os.environ.pop(f"{PREFIX}{name}", None)
    if (procfs.threads("self") or 1) == 1 and (procfs.threads(os.getppid()) or 1) > 1:
        torch.set_num_threads(1)  # OpenMP's threads are not here: it would wait for them
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # more workers than cores are intended here
            _measure(job, setting, seed, line)
    except Troubled as trouble:
        found = Trouble(_kind(trouble), str(trouble), trouble.details)
        line.send({"trouble": found})
    except (BrokenPipeError, EOFError):
        pass  # the command has ended


def _kind(trouble: Troubled) -> str:
    incident = trouble.incident
    if incident is None:
        return "memory" if trouble.args[0].startswith("MemoryError") else "raised"
    if incident.cause in OF_MEMORY:
        return "memory"
    return "hung" if incident.kind == "stalled" else "died"


def _measure(job: Job, setting: Setting, seed: int, line: Connection) -> None:
    began = time.perf_counter()
    before = gauge.private("self") or 0
    loader = _loader(job, setting, seed)
    with trouble_of(loader), contextlib.closing(loader):
        batches = _Consumer(loader, setting.step)
        # In order, so after as many batches every worker has given one.
        for _ in range(max(1, setting.workers)):
            batches.take()
            if batches.taken == 1:
                first_batch = time.perf_counter() - began
        meter = _Meter(loader, setting, batches)
        line.send(Ready(meter.pids, meter.tids))
        while not line.poll():
            batches.take()
        line.recv()
        slices = _slices(job, setting, batches, meter)
        result = _result(loader, setting, slices, before)
        result |= {"first_batch": first_batch, "lock": _lock_share(setting, batches)}
        line.send(result)
        while not line.poll():  # at work, as long as other ranks measure
            batches.take()


def _slices(job: Job, setting: Setting, batches: _Consumer, meter: _Meter) -> list[Slice]:
    """Measure for `job.window` seconds, and longer if that says too little."""
    found = []
    length = job.window / SLICES
    began = last = meter.read()
    while True:
        batches.take()
        now = time.perf_counter()
        count = batches.taken - last.batches
        # Workers that began together answer together: a slice has as many batches of each.
        even = count % max(1, setting.workers) == 0 or now - last.at > 3 * length
        if now - last.at < length or not even:
            continue
        reading = meter.read()
        found.append(reading.since(last))
        last = reading
        total, spent = batches.taken - began.batches, last.at - began.at
        whole, workers = last.since(began), max(1, setting.workers)
        queued = whole.queued if setting.workers else whole.main_queued
        enough = total >= FEW * workers and spent - queued / workers >= AT_WORK * job.window
        if spent >= job.window and (enough or spent >= LONGEST * job.window):
            return found


def _lock_share(setting: Setting, batches: _Consumer) -> float:
    """How much of the time Python's lock is taken when another thread asks for it: 0 to 1.

    A thread that asks gets the lock after `sys.getswitchinterval()` at the earliest, if code that
    keeps it runs. The time in which there was no processor for the asking thread does not count.
    """
    if setting.kind != "threads":
        return 0.0
    found: list[float] = []
    over = threading.Event()
    asking = threading.Thread(target=_ask_for_the_lock, args=(found, over), daemon=True)
    asking.start()
    until = time.perf_counter() + ASKING
    while time.perf_counter() < until or len(found) < ASKED:
        batches.take()
    over.set()
    asking.join(1.0)
    return min(1.0, sum(found) / len(found))


def _ask_for_the_lock(found: list[float], over: threading.Event) -> None:
    """Add what each time of asking took, in units of the least that it takes if it is taken."""
    least = sys.getswitchinterval()
    task = threading.get_native_id()
    began, before = time.perf_counter(), sum(procfs.scheduled("self", task))
    while not over.is_set():
        time.sleep(least)
        spent = sum(procfs.scheduled("self", task))  # opening and reading a file ask for it, too
        now = time.perf_counter()
        found.append(max(0.0, now - began - least - (spent - before)) / (3 * least))
        began, before = now, spent


def _result(loader: Any, setting: Setting, slices: list[Slice], before: int) -> dict[str, Any]:
    about = loader_report.of(loader)
    sizes = list(about.worker_bytes().values())
    if setting.kind != "processes":
        sizes = [max(0, (gauge.private("self") or 0) - before)]
    figures = about.stats()
    bad = about.bad_samples
    shared = sum(pool.driver.shared_bytes() for pool in runtime.of(loader).pools())
    return {
        "slices": slices,
        "worker_bytes": max(sizes, default=0),
        "shared_bytes": shared,
        "batch_bytes": figures["largest_batch_bytes"],
        "budget_bytes": figures["budget_bytes"],
        "bad_samples": len(bad),
        "bad_sample": str(bad[0]) if bad else "",
    }


def _loader(job: Job, setting: Setting, seed: int) -> Any:
    options = dict(job.options)
    iterable = isinstance(job.dataset, torch.utils.data.IterableDataset)
    if job.batch_sampler is not None:
        options["batch_sampler"] = _Again(job.batch_sampler)
    elif not iterable:
        options["sampler"] = _AtRandom(len(job.dataset), seed)
    if job.batch_sampler is None:
        options["batch_size"] = job.batch_size
    if setting.workers:
        options["prefetch_factor"] = setting.prefetch
        options["persistent_workers"] = True
        options["worker_method"] = setting.method
        if setting.kind == "processes":
            options["multiprocessing_context"] = setting.start
    return DataLoader(
        job.dataset,
        num_workers=setting.workers,
        collate_fn=job.collate,
        max_restarts=0,
        stall_timeout=job.stall_timeout,
        memory_budget="auto" if job.memory is None else job.memory,
        worker_memory_limit=None,  # the command watches the memory of a trial
        on_bad_sample=job.on_bad_sample,
        **options,
    )


class _Consumer:
    """Takes batches, epoch after epoch, and spends `step` seconds on each."""

    def __init__(self, loader: Any, step: float) -> None:
        self.loader = loader
        self.step = step
        self.taken = 0
        self.waited = 0.0  # seconds
        self._stream = iter(loader)
        self._of_epoch = 0

    def take(self) -> None:
        if self.step and self.taken:
            time.sleep(self.step)
        began = time.perf_counter()
        while True:
            try:
                next(self._stream)
                break
            except StopIteration:
                if not self._of_epoch:
                    raise ValueError(
                        "the dataset gave no batch in a whole epoch (with drop_last, or fewer "
                        "samples than workers, there may be none)"
                    ) from None
                self._of_epoch = 0
                self._stream = iter(self.loader)
        self.waited += time.perf_counter() - began
        self.taken += 1
        self._of_epoch += 1


@dataclass(frozen=True)
class _Reading:
    at: float
    batches: int
    waited: float
    cpu: float
    queued: float
    main_cpu: float
    main_queued: float

    def since(self, before: _Reading) -> Slice:
        return Slice(
            seconds=self.at - before.at,
            batches=self.batches - before.batches,
            cpu=max(0.0, self.cpu - before.cpu),
            queued=max(0.0, self.queued - before.queued),
            main_cpu=max(0.0, self.main_cpu - before.main_cpu),
            main_queued=max(0.0, self.main_queued - before.main_queued),
            waited=self.waited - before.waited,
        )


class _Meter:
    """Reads what the kernel has counted for the workers and the main process."""

    def __init__(self, loader: Any, setting: Setting, batches: _Consumer) -> None:
        self._batches = batches
        self.pids = tuple(pid for _, pid in loader_report.of(loader).worker_pids())
        own = procfs.tasks("self")
        main = os.getpid()
        threads = setting.kind == "threads"
        self.tids = tuple(one for one in own if one != main) if threads else ()

    def read(self) -> _Reading:
        workers_cpu = workers_queued = cpu = queued = 0.0
        for pid in self.pids:
            for task in procfs.tasks(pid):
                spent = procfs.scheduled(pid, task)
                workers_cpu += spent[0]
                workers_queued += spent[1]
        main = os.getpid()
        main_cpu, main_queued = procfs.scheduled("self", main)
        for task in procfs.tasks("self"):
            spent = procfs.scheduled("self", task)
            cpu += spent[0]
            # Without workers these are the threads of torch and of native libraries.
            queued += 0.0 if self.pids or task == main else spent[1]
        return _Reading(
            time.perf_counter(),
            self._batches.taken,
            self._batches.waited,
            cpu + workers_cpu,
            queued + workers_queued,
            main_cpu,
            main_queued,
        )


class _AtRandom(torch.utils.data.Sampler[int]):
    """Positions at random, without end: a trial does not find in memory what another has read."""

    def __init__(self, count: int, seed: int) -> None:
        self.count = count
        self.seed = seed

    def __iter__(self) -> Iterator[int]:
        dice = random.Random(self.seed)
        while True:
            yield dice.randrange(self.count)


class _Again:
    """A batch sampler, epoch after epoch."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            empty = True
            for one in self.batch_sampler:
                empty = False
                yield one
            if empty:
                return
