"""Workers without processes, on a clock that is moved by hand: deterministic, and in microseconds.

`FakeDriver` implements `engine.driver.Driver` under the real pool, supervisor and machine. A fake
worker takes a while to start and a while for each item. The test says what goes wrong with it: it
finds no room, hangs, ignores that it is to dump its stack, or does not die. Time passes in `poll`
only, up to the next moment in which something happens. The background thread is not started; a test
that needs it calls `Pool.service`.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.autopsy.blackbox import Note
from holdfast.autopsy.catalogue import UNKNOWN
from holdfast.autopsy.evidence import Evidence
from holdfast.autopsy.incident import Incident
from holdfast.autopsy.readers import Roots
from holdfast.autopsy.tally import Tally
from holdfast.autopsy.verdict import Verdict
from holdfast.engine import events as ev
from holdfast.engine.checkpoint import WorkerCheckpoint
from holdfast.engine.driver import DriverOptions, Handle, Progress, Urgent
from holdfast.engine.epoch import Taken
from holdfast.engine.loader_records import LoaderRecords
from holdfast.engine.machine import Machine
from holdfast.engine.pool import Pool
from holdfast.engine.supervisor import Supervisor
from holdfast.limits.budget import Budget, Share
from holdfast.worker.sample_seeding import NO_SEEDS

__all__ = ["Consumer", "FakeBatch", "FakeDriver", "Worker"]

NEVER = float("inf")


@dataclass(frozen=True)
class FakeBatch:
    """Implements `Batch`."""

    content: tuple[int, Any]  # the epoch, and the index
    nbytes: int

    def unpack(self) -> tuple[int, Any]:
        return self.content


@dataclass
class Worker:
    """One worker, from its start to its end."""

    generation: int
    next: float  # when something happens to it
    ready: bool = False
    inbox: deque[ev.Item] = field(default_factory=deque)
    begun: bool = False  # with the first item of its inbox
    exits: str = ""  # as what, when its time has come
    active: float = 0.0
    since: float = 0.0
    heard: list[Any] = field(default_factory=list)  # what it was told


class Nothing:
    nbytes = 0


@dataclass
class FakeDriver:
    """Implements `Driver`, and is its own `WorkerMethod`. Set the faults at any time."""

    boot: float = 0.01  # seconds
    each: float = 0.1  # seconds for an item
    nbytes: int = 1  # of a batch
    slow: dict[int, float] = field(default_factory=dict)  # workers: seconds for an item
    sizes: dict[int, int] = field(default_factory=dict)  # workers: bytes of their own
    no_room: int = 0  # so many starts fail from now on
    hangs: set[int] = field(default_factory=set)  # task numbers, once each
    kills: set[int] = field(default_factory=set)  # task numbers, whenever they are loaded
    deaf: bool = False  # to a dump
    immortal: bool = False
    limits: ev.Limits = field(default_factory=ev.Limits)
    now: float = 0.0
    living: dict[int, Worker] = field(default_factory=dict)
    done: list[tuple[float, str, int]] = field(default_factory=list)  # when, what, to which worker
    urged: list[tuple[float, str, int]] = field(default_factory=list)
    heard: dict[tuple[int, Any], list[Any]] = field(default_factory=dict)
    """By epoch and index: what the worker had been told when it made the batch."""
    backlog: bool = False
    spin: None = None
    name: str = "fake"
    room: None = None
    kept: Nothing = field(default_factory=Nothing)

    def driver(self, options: DriverOptions) -> FakeDriver:
        return self

    def called(self, worker: int) -> str:
        return f"fake {worker}"

    def connect(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor

    @property
    def clock(self) -> Callable[[], float]:
        return lambda: self.now

    # -- orders ---------------------------------------------------------------------------

    def start(self, order: ev.Start) -> None:
        assert order.worker not in self.living, "two at a time"
        self._note("start", order.worker)
        if self.no_room:
            self.no_room -= 1
            self._exit(order.worker, order.generation, "start-failed", errno=errno.EAGAIN)
            return
        self.living[order.worker] = Worker(
            order.generation, self.now + self.boot, active=self.now, since=self.now,
            heard=[notice.change for notice in order.told],
        )  # fmt: skip

    def send(self, worker: int, item: ev.Item, hint: Any) -> None:
        if worker in self.living:  # else its start has just failed
            process = self.living[worker]
            process.inbox.append(item)
            process.active = self.now
            if process.ready and not process.begun and not process.exits:
                process.next = self.now

    def flush(self) -> None:
        pass

    def urge(self, worker: int, kind: Urgent, content: object = None) -> bool:
        self.urged.append((self.now, kind, worker))
        if kind == "retire":
            self.retire(worker)
        return worker in self.living and self.living[worker].ready

    def rehearse(self, order: ev.Rehearse) -> None:
        self.supervisor.tell(ev.Rehearsed(order.worker, order.generation, None))

    def find_leak(self, worker: int, batches: int, nbytes: int) -> bool:
        return False

    def dump(self, worker: int, generation: int) -> None:
        self._end("dump", worker, generation, heeded=not (self.deaf or self.immortal))

    def kill(self, worker: int, generation: int) -> None:
        assert self.limits.killable
        self._end("kill", worker, generation, heeded=not self.immortal)

    def terminate(self, worker: int, generation: int) -> None:
        if self.living[worker].generation == generation:
            self.strike(worker)

    def abandon(self, worker: int, generation: int) -> None:
        self._note("abandon", worker)
        self._exit(worker, generation, "unkillable")

    def renew(self) -> None:
        self._note("renew", -1)

    def release(self) -> None:
        pass

    def _note(self, what: str, worker: int) -> None:
        self.done.append((round(self.now, 6), what, worker))

    def _end(self, how: str, worker: int, generation: int, heeded: bool) -> None:
        process = self.living[worker]
        assert process.generation == generation, "out of date"
        self._note(how, worker)
        if heeded:
            process.exits, process.next = "stalled", self.now

    # -- waiting --------------------------------------------------------------------------

    def hear(self, worker: int) -> bool:
        process = self.living.get(worker)
        if process is None or process.next > self.now:
            return False
        return self._happen(worker, process)

    def poll(self, timeout: float) -> None:
        moments = [process.next for process in self.living.values()]
        self.now = max(self.now, min([self.now + timeout, *moments]))

    def take_in(self, found: None) -> bool:
        heard = False
        for worker, process in sorted(self.living.items()):
            if process.next <= self.now and self.living.get(worker) is process:
                heard |= self._happen(worker, process)
        return heard

    def prepare_watch(self, batches: bool) -> None:
        pass

    def watch(self, timeout: float) -> None:
        raise AssertionError("there is no background thread")

    def wake(self) -> None:
        pass

    def tick(self, now: float) -> None:
        pass

    # -- facts ----------------------------------------------------------------------------

    def checkpoint(self, worker: int, seat: ev.SeatPosition, back: int) -> WorkerCheckpoint:
        return WorkerCheckpoint(seat)

    def place(self, worker: int) -> str:
        return "a simulated process"

    def progress(self, worker: int) -> Progress:
        process = self.living.get(worker)
        if process is None:
            return Progress(Note(None, None, "idle", 0.0), 0, 0.0)
        step = "idle" if process.ready else "boot"
        item = process.inbox[0] if process.begun else None
        number = item.number if isinstance(item, ev.Task) else None
        note = Note(number, 0, "fetch" if process.begun else step, process.since)
        return Progress(note, 0, process.active)

    def size(self, worker: int) -> int | None:
        return self.sizes.get(worker)

    def tally(self) -> Tally:
        return Tally()

    def own_bytes(self) -> dict[int, int]:
        return {}

    def shared_bytes(self) -> int:
        return 0

    def handle(self, worker: int) -> Handle:
        alive = worker in self.living
        return Handle(100 + worker if alive else None, None if alive else -9)

    def settle(self, report: ev.Report) -> None:
        pass

    def gather(self, evidence: Evidence) -> Evidence:
        return evidence

    def examine(self, evidence: Evidence) -> tuple[Evidence, Verdict]:
        return evidence, Verdict(UNKNOWN, "low")

    def stop(self, deadline: float) -> None:
        self.living.clear()

    def close(self) -> None:
        pass

    def disown(self) -> None:
        pass

    # -- what happens ---------------------------------------------------------------------

    def strike(self, worker: int) -> None:
        """It is killed from outside."""
        self._exit(worker, self.living[worker].generation, "killed", signal="SIGKILL")

    def retire(self, worker: int) -> None:
        """It has grown too large, and exits."""
        process = self.living[worker]
        self.supervisor.tell(ev.WorkerRetired(worker, process.generation, self.now))
        process.exits, process.next = "exited", self.now

    def _exit(self, worker: int, generation: int, kind: str, **facts: Any) -> None:
        process = self.living.pop(worker, None)
        head = process.inbox[0] if process is not None and process.begun else None
        if isinstance(head, ev.Task):
            facts |= {"task": head.number, "position": 0, "step": "fetch"}
        elif isinstance(head, ev.IsolationTest):
            facts |= {"task": head.task.number, "position": head.sample, "step": "fetch"}
        exit = ev.Exit(self.now, kind, **facts)
        evidence = Evidence(pid=None if process is None else 100 + worker)
        self.supervisor.tell(ev.WorkerExited(worker, generation, exit, evidence))

    def _happen(self, worker: int, process: Worker) -> bool:
        """Tell what happens to this worker now; whether it sent a message."""
        generation, tell = process.generation, self.supervisor.tell
        if process.exits:
            self._exit(worker, generation, process.exits)
            return False
        if process.ready and not process.begun:
            self._begin(worker, process)
            return False
        process.active = process.since = self.now
        if not process.ready:
            process.ready = True
            process.next = self.now if process.inbox else NEVER
            tell(ev.WorkerReady(worker, generation))
            return True
        item, process.begun = process.inbox.popleft(), False
        process.next = self.now if process.inbox else NEVER
        if isinstance(item, ev.Task):
            batch = FakeBatch((item.epoch, item.index), self.nbytes)
            self.heard[batch.content] = [*process.heard]
            tell(ev.BatchReady(worker, generation, item.number, batch, self.nbytes))
        elif isinstance(item, ev.IsolationTest):
            tell(ev.Survived(worker, generation))
        elif isinstance(item, ev.Notice):
            process.heard.append(item.change)
            tell(ev.Told(worker, generation))
        else:
            tell(ev.Resumed(worker, generation))
        return True

    def _begin(self, worker: int, process: Worker) -> None:
        """It begins the first item of its inbox."""
        item = process.inbox[0]
        task = item.task if isinstance(item, ev.IsolationTest) else item
        process.begun, process.since = True, self.now
        process.next = self.now + self.slow.get(worker, self.each)
        if not isinstance(task, ev.Task):
            return
        if task.number in self.kills:
            self._exit(worker, process.generation, "crashed", signal="SIGSEGV")
        elif task.number in self.hangs:
            self.hangs.remove(task.number)
            process.next = NEVER


class Consumer:
    """A real pool over fake workers, used as an iterator uses it. Close it at the end."""

    def __init__(
        self,
        driver: FakeDriver,
        workers: int = 2,
        prefetch: int = 2,
        *,
        budget: Budget | None = None,
        stall_timeout: float | None = 5.0,
        worker_memory_limit: int | str | None = None,
        roots: Roots | None = None,
        machine: Machine | None = None,
        **options: Any,
    ) -> None:
        """`options` are those of the machine, unless that is given."""
        options.setdefault("restarts", ev.RestartPolicy(None, 60.0))
        self.driver = driver
        self.machine = machine or Machine(
            workers=workers, prefetch=prefetch, limits=driver.limits, **options
        )
        self.incidents: list[Incident] = []
        self.sampler: Iterator[int] = iter(())
        nowhere = Path("/nonexistent")
        self.pool = Pool(
            driver,
            self.machine,
            Share(budget or Budget(None)),
            LoaderRecords(on_incident=self.incidents.append),
            dataset=None,
            auto_collation=False,
            seeds=NO_SEEDS,
            stall_timeout=stall_timeout,
            worker_memory_limit=worker_memory_limit,
            users_sampler=False,
            roots=Roots(proc=nowhere, cgroup=nowhere) if roots is None else roots,
        )

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.background.close_now()

    def begin(self, length: int, *, again: bool = False) -> None:
        """An epoch."""
        self.sampler = iter(range(length))
        if again:
            self.pool.resume(NO_SEEDS, self._draw, None)
        else:
            self.pool.fill(self._draw, None)

    def _draw(self) -> int:
        return next(self.sampler)

    def next(self) -> Taken:
        """Wait for it, on the driver's clock."""
        with self.pool.lock:
            taken = self.pool.next(self._draw, 0)
            self.pool.supervisor.epoch.taken = None
            self.pool.unpacked()
        return taken

    def rest(self) -> list[Any]:
        """What is left of the epoch, to its end."""
        found = []
        while isinstance(taken := self.next(), ev.Delivery):
            result = taken.result
            found.append(result.unpack() if isinstance(result, FakeBatch) else result)
        assert taken is ev.END, taken
        return found

    @property
    def told(self) -> list[str]:
        """What was done about each death, in the words of its incident."""
        self.pool.deaths.examine_pending()
        return [one.action for one in self.incidents]
