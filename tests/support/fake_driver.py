"""Workers without processes, on a clock that is moved by hand: deterministic, and in microseconds.

A fake worker takes a while to start and a while for each item. What goes wrong with it is said by
the test: it may find no room, hang, not hear that it is to dump its stack, or not even die. Pool and
watch are not here; `Consumer` does of theirs what concerns the supervisor.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from holdfast.engine import vocabulary as v
from holdfast.engine.driver import Urgent
from holdfast.engine.epoch import Epoch
from holdfast.engine.machine import Machine
from holdfast.engine.supervisor import Supervisor
from holdfast.memory.budget import Budget, Share

__all__ = ["Consumer", "FakeDriver", "Worker", "supervised"]


@dataclass
class Worker:
    """One process, from its start to its end."""

    generation: int
    ready_at: float
    inbox: deque[v.Item] = field(default_factory=deque)
    ready: bool = False
    busy_until: float | None = None  # with the first of its inbox
    since: float = 0.0  # it has been at that
    exits_at: float | None = None  # it has been told to, in some way


@dataclass
class FakeDriver:
    """Implements `Driver`. Set the faults before or between `step`s."""

    boot: float = 0.01  # seconds
    each: float = 0.1  # seconds for an item
    stall_timeout: float = 5.0
    nbytes: int = 1  # of a batch
    slow: dict[int, float] = field(default_factory=dict)  # workers: seconds for an item
    no_room: int = 0  # so many starts fail from now on
    hangs: set[int] = field(default_factory=set)  # task numbers, once each
    kills: set[int] = field(default_factory=set)  # task numbers, whenever they are loaded
    deaf: bool = False  # to a dump
    immortal: bool = False
    now: float = 0.0
    living: dict[int, Worker] = field(default_factory=dict)
    done: list[tuple[float, str, int]] = field(default_factory=list)  # when, what, to whom
    reports: list[v.Report] = field(default_factory=list)
    supervisor: Supervisor = field(init=False)

    # -- what the supervisor asks for -----------------------------------------------------

    def start(self, order: v.Start) -> None:
        assert order.worker not in self.living, "two at a time"
        self._note("start", order.worker)
        if self.no_room:
            self.no_room -= 1
            self._exit(order.worker, order.generation, "start-failed", errno=errno.EAGAIN)
            return
        self.living[order.worker] = Worker(order.generation, self.now + self.boot)

    def send(self, worker: int, item: v.Item, hint: Any) -> None:
        if worker in self.living:  # else its start has just failed
            self.living[worker].inbox.append(item)

    def flush(self) -> None:
        pass

    def urge(self, worker: int, kind: Urgent, content: object = None) -> None:
        self._note(kind, worker)

    def rehearse(self, order: v.Rehearse) -> None:
        self.supervisor.tell(v.Rehearsed(order.worker, order.generation, None))

    def dump(self, worker: int, generation: int) -> None:
        self._end("dump", worker, generation, heeded=not (self.deaf or self.immortal))

    def kill(self, worker: int, generation: int) -> None:
        self._end("kill", worker, generation, heeded=not self.immortal)

    def abandon(self, worker: int, generation: int) -> None:
        self._note("abandon", worker)
        self._exit(worker, generation, "unkillable")

    def renew(self) -> None:
        self._note("renew", -1)

    def report(self, report: v.Report, sample: Any) -> None:
        self.reports.append(report)

    def forget(self, worker: int, recycled: bool) -> None:
        self._note("forget", worker)

    def _note(self, what: str, worker: int) -> None:
        self.done.append((round(self.now, 6), what, worker))

    def _end(self, how: str, worker: int, generation: int, heeded: bool) -> None:
        assert self.living[worker].generation == generation, "out of date"
        self._note(how, worker)
        if heeded:
            self.living[worker].exits_at = self.now

    def _exit(self, worker: int, generation: int, kind: str, **facts: Any) -> None:
        process = self.living.pop(worker, None)
        head = process.inbox[0] if process is not None and process.inbox else None
        if isinstance(head, v.Task) and process is not None and process.busy_until is not None:
            facts |= {"task": head.number, "position": 0, "step": "fetch"}
        elif isinstance(head, v.Trial):
            facts |= {"task": head.task.number, "position": head.sample, "step": "fetch"}
        exit = v.Exit(self.now, kind, **facts)
        self.supervisor.tell(v.WorkerExited(worker, generation, exit))

    # -- what happens ---------------------------------------------------------------------

    def strike(self, worker: int) -> None:
        """It is killed from outside."""
        self._exit(worker, self.living[worker].generation, "killed", signal="SIGKILL")

    def retire(self, worker: int) -> None:
        """It has grown too large, and goes."""
        generation = self.living[worker].generation
        self.supervisor.tell(v.WorkerRetired(worker, generation, self.now))
        self.living[worker].exits_at = self.now

    def step(self) -> None:
        """Go on to the next moment in which something happens, and tell of that."""
        moments = [self._next(process) for process in self.living.values()]
        wanted = self.supervisor.machine.deadline()
        known = [moment for moment in (*moments, wanted) if moment is not None]
        assert known, "nothing will ever happen"
        self.now = max(self.now, min(known))
        if wanted is not None and wanted <= self.now:
            self.supervisor.tell(v.Ticked(self.now))
        for worker, process in sorted(self.living.items()):
            moment = self._next(process)
            if moment is not None and moment <= self.now and self.living.get(worker) is process:
                self._happen(worker, process)

    def _next(self, process: Worker) -> float | None:
        if process.exits_at is not None:
            return process.exits_at
        if not process.ready:
            return process.ready_at
        if process.busy_until is None:
            return self.now if process.inbox else None
        if process.busy_until == float("inf"):
            condemned = process.since < 0
            return None if condemned else process.since + self.stall_timeout
        return process.busy_until

    def _happen(self, worker: int, process: Worker) -> None:
        generation, tell = process.generation, self.supervisor.tell
        if process.exits_at is not None:
            self._exit(worker, generation, "stalled" if process.since < 0 else "exited")
        elif not process.ready:
            process.ready = True
            tell(v.WorkerReady(worker, generation))
        elif process.busy_until is None:
            self._begin(worker, process)
        elif process.busy_until == float("inf"):
            process.since = -1.0
            tell(v.WorkerStalled(worker, generation, self.now))
        else:
            process.busy_until = None
            item = process.inbox.popleft()
            if isinstance(item, v.Task):
                answer = (item.epoch, item.index)
                tell(v.BatchReady(worker, generation, item.number, answer, self.nbytes))
            elif isinstance(item, v.Trial):
                tell(v.Survived(worker, generation))
            else:
                tell(v.Resumed(worker, generation))

    def _begin(self, worker: int, process: Worker) -> None:
        item = process.inbox[0]
        task = item.task if isinstance(item, v.Trial) else item
        process.busy_until = self.now + self.slow.get(worker, self.each)
        process.since = self.now
        if not isinstance(task, v.Task):
            return
        if task.number in self.kills:
            self._exit(worker, process.generation, "crashed", signal="SIGSEGV")
        elif task.number in self.hangs:
            self.hangs.remove(task.number)
            process.busy_until = float("inf")


def supervised(
    driver: FakeDriver,
    workers: int = 2,
    prefetch: int = 2,
    *,
    budget: Budget | None = None,
    **options: Any,
) -> Consumer:
    options.setdefault("restarts", v.RestartPolicy(None, 60.0))
    machine = Machine(workers=workers, prefetch=prefetch, **options)
    driver.supervisor = Supervisor(machine, Share(budget), Epoch(None), driver)
    return Consumer(driver)


class Consumer:
    """Draws from a sampler and takes what is delivered, as the pool does."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self.supervisor = driver.supervisor
        self.sampler: Iterator[int] = iter(())
        self.supervisor.tell(v.Began())

    def begin(self, length: int, *, again: bool = False) -> None:
        """An epoch."""
        self.sampler = iter(range(length))
        if again:
            self.supervisor.epoch = Epoch(None)
            self.supervisor.tell(v.EpochBegan(None))
        self.draw()

    def draw(self) -> None:
        epoch = self.supervisor.epoch
        while epoch.due > 0:
            epoch.due -= 1
            index = next(self.sampler, None)
            self.supervisor.tell(v.DRAINED if index is None else v.Drawn(index))

    def next(self) -> v.Delivery | v.End | v.GaveUp:
        """Wait for it, on the driver's clock."""
        epoch = self.supervisor.epoch
        if epoch.delivered is None:
            self.supervisor.tell(v.ASKED)
        while epoch.delivered is None:
            self.driver.step()
            self.draw()
        taken, epoch.delivered = epoch.delivered, None
        self.draw()
        return taken

    def rest(self) -> list[Any]:
        """What is left of the epoch, to its end."""
        found = []
        while isinstance(taken := self.next(), v.Delivery):
            found.append(taken.result)
        assert taken is v.END, taken
        return found
