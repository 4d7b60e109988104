"""A made-up machine, on which the rates of settings are known: trials of it take no time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.tuning.measurement import Setting, Slice, Trial, Trouble
from holdfast.tuning.search import Conditions, Search

MIB = 1 << 20


@dataclass
class Machine:
    """`cpu` and `asleep` are seconds that a batch takes, `load` other programs that want processors."""

    cores: float = 4
    cpu: float = 0.01
    asleep: float = 0.0
    disk: float = 0.0  # of `asleep`
    lock: bool = False  # the dataset keeps Python's lock
    worker_bytes: int = 8 * MIB
    batch_bytes: int = 1000
    memory: int | None = None  # beyond which trials are ended
    main: float = 0.0001  # seconds that the main process takes for a batch
    load: float = 0.0
    noise: float = 0.02
    uneven: bool = False  # batches that take longer now and then, which a larger prefetch evens out
    broken: Callable[[Setting], Trouble | None] = lambda _: None
    dice: random.Random = field(default_factory=lambda: random.Random(1))

    def try_out(self, setting: Setting) -> Trial:
        trouble = self.broken(setting)
        if trouble is not None:
            return Trial(setting, trouble=trouble)
        used = setting.workers * self.worker_bytes if setting.kind == "processes" else 0
        if self.memory is not None and used > self.memory:
            return Trial(setting, trouble=Trouble("memory", "it was ended"))
        slices = tuple(self._slice(setting) for _ in range(6))
        return Trial(
            setting,
            slices,
            first_batch=0.1 if setting.start in ("", "fork") else 3.0,
            worker_bytes=self.worker_bytes if setting.kind == "processes" else 0,
            batch_bytes=self.batch_bytes,
            disk=self.disk,
            read_bytes=100.0 * MIB if self.disk else 0.0,
            lock=1.0 if self.lock and setting.kind == "threads" else 0.0,
        )

    def _slice(self, setting: Setting) -> Slice:
        workers = max(1, setting.workers)
        whole = self.cpu + self.asleep
        if self.uneven and setting.workers:
            whole *= 1 + 1 / setting.prefetch
        wanted = workers * self.cpu / whole  # processors
        parallel = 1.0 if self.lock and setting.kind == "threads" else self.cores
        wanted = min(wanted, 1.0) if parallel == 1.0 else wanted
        quick = min(workers / whole, parallel / (self.cpu or 1e-9), 1 / self.main)
        # Processors are shared fairly with other programs.
        got = min(1.0, self.cores / (wanted + self.load)) if self.load else 1.0
        rate = quick if got == 1.0 else min(quick, got * wanted / (self.cpu or 1e-9))
        rate *= 1 + self.noise * self.dice.uniform(-1, 1)
        if setting.step:
            rate = min(rate, 1 / setting.step)
        seconds = 0.2
        batches = rate * seconds
        cpu = batches * (self.cpu + self.main)
        queued = max(0.0, workers - batches * whole / seconds) * seconds if self.load else 0.0
        main = batches * self.main
        return Slice(
            seconds, batches, cpu, queued if setting.workers else 0.0,  # type: ignore[arg-type]
            main, 0.0 if setting.workers else queued, 0.0,
        )  # fmt: skip


def searched(machine: Machine, seconds: float = 60.0, **conditions: object) -> Search:
    """All trials of a search on this machine, each of which takes a second and a half."""
    search = Search(Conditions(cores=machine.cores, seconds=seconds, **conditions))  # type: ignore[arg-type]
    left = seconds
    while left > 0:
        setting = search.next(left)
        if setting is None:
            return search
        search.add(machine.try_out(setting))
        left -= 1.5
        assert len(search.trials) < 100
    return search
