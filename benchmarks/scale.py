"""Days of training with a thousand workers, simulated: what failures and decisions cost.

    python -m benchmarks.scale                         # prints the table, a few minutes
    python -m benchmarks.scale --write docs/scale.md --plot docs/images/scale.png

The machine is the real one, and decides everything. Workers, their deaths, the consumer and the
clock are simulated: time passes from event to event. Eight workers share a host, and a host that
fails takes all of them with it. Each run is compared with one in which nothing fails and all
batches take as long as before. Every batch has to be delivered once, in order, or the simulation
ends with an error.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
import time
import tracemalloc
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.page import put
from holdfast.engine import events as ev
from holdfast.engine.machine import Machine

WORKERS = (8, 64, 256, 1000)
DAYS = 2.0
PREFETCH = 2
ON_A_HOST = 8
MAKING = 120.0  # seconds for a batch: long videos
LOAD = 0.9  # how much of what all workers can make the consumer takes
DAY = 86_400.0
# Unexpected interruptions of a training run of 54 days on 16,384 GPUs, 8 in a host, in Meta's
# report on Llama 3 (2024): 419.
PUBLISHED = 419 / 54 / (16_384 / 8)  # for a host, in a day


@dataclass(frozen=True)
class Case:
    """What goes wrong, and how long it takes to get another worker."""

    name: str
    failures: float  # of a host in a day
    start: float  # seconds


CASES = (
    Case("as published, workers start in 10 s", PUBLISHED, 10.0),
    Case("100 times that, 10 s", 100 * PUBLISHED, 10.0),
    Case("100 times that, 5 minutes", 100 * PUBLISHED, 300.0),
)


@dataclass
class Worker:
    generation: int = 0
    alive: bool = False
    ready: bool = False
    busy: bool = False
    inbox: deque[ev.Item] = field(default_factory=deque)


@dataclass(frozen=True)
class Outcome:
    workers: int
    case: Case
    deaths: int
    delivered: int
    seconds: float  # simulated
    cost: float  # seconds in the machine, for an event
    events: int
    recoveries: list[float]  # seconds from a death until the lost batch had been made


class Simulation:
    """One run, until the consumer has got so many batches."""

    def __init__(self, workers: int, case: Case, batches: int, seed: int = 7) -> None:
        self.case = case
        self.batches = batches
        self.now = 0.0
        self.machine = Machine(
            workers=workers, prefetch=PREFETCH, restarts=ev.RestartPolicy(None, 60.0), largest=1
        )
        self.workers = [Worker() for _ in range(workers)]
        self.events = self.drawn = self.due = self.delivered = self.deaths = 0
        self.spent = 0.0
        self.recoveries: list[float] = []
        self._lost: dict[int, float] = {}  # tasks that were begun when their worker died: when
        self._agenda: list[tuple[float, int, str, int, int]] = []
        self._seed = seed
        self._failures = random.Random(seed)
        self._step = MAKING / workers / LOAD

    def run(self) -> Outcome:
        for host in range(0, len(self.workers), ON_A_HOST):
            self._fail_later(host)
        self._tell(ev.RoomChanged(None))
        self._tell(ev.Began())
        self._draw()
        self._tell(ev.ASKED)
        while self.delivered < self.batches:
            due = self.machine.deadline()
            if due is not None and (not self._agenda or due <= self._agenda[0][0]):
                self.now = max(self.now, due)
                self._tell(ev.Ticked(self.now))
            else:
                self.now, _, what, number, generation = heapq.heappop(self._agenda)
                self._happen(what, number, generation)
        return Outcome(
            len(self.workers),
            self.case,
            self.deaths,
            self.delivered,
            self.now,
            self.spent / self.events,
            self.events,
            self.recoveries,
        )

    def _later(self, seconds: float, what: str, number: int, generation: int = 0) -> None:
        entry = (self.now + seconds, len(self._agenda) + self.events, what, number, generation)
        heapq.heappush(self._agenda, entry)

    def _happen(self, what: str, number: int, generation: int) -> None:
        if what == "host":
            for worker in range(number, min(number + ON_A_HOST, len(self.workers))):
                self._die(worker)
            self._fail_later(number)
        elif what == "step":
            self._tell(ev.ASKED)
            self._draw()
        elif self.workers[number].generation == generation and self.workers[number].alive:
            if what == "ready":
                self.workers[number].ready = True
                self._tell(ev.WorkerReady(number, generation))
            else:
                self._answer(number, generation)
            self._begin(number)

    # -- the consumer ---------------------------------------------------------------------

    def _draw(self) -> None:
        while self.due > 0:
            self.due -= 1
            self.drawn += 1
            self._tell(ev.Drawn(self.drawn - 1))

    def _take(self, what: object) -> None:
        assert isinstance(what, ev.Delivery), f"the run ended: {what}"
        assert what.task.index == self.delivered, "a batch was lost, repeated or out of order"
        self.delivered += 1
        self._tell(ev.UNPACKED)
        self._later(self._step, "step", 0)

    # -- workers --------------------------------------------------------------------------

    def _begin(self, worker: int) -> None:
        one = self.workers[worker]
        if not (one.ready and one.inbox) or one.busy:
            return
        one.busy = True
        item = one.inbox[0]
        task = item.task if isinstance(item, ev.IsolationTest) else item
        assert isinstance(task, ev.Task)
        # The same for the same batch, whichever worker makes it and however often.
        seconds = random.Random(self._seed * 1_000_003 + task.number).lognormvariate(-0.02, 0.2)
        self._later(MAKING * seconds, "made", worker, one.generation)

    def _answer(self, worker: int, generation: int) -> None:
        one = self.workers[worker]
        item, one.busy = one.inbox.popleft(), False
        if isinstance(item, ev.IsolationTest):
            self._tell(ev.Survived(worker, generation))
        elif isinstance(item, ev.Task):
            died = self._lost.pop(item.number, None)
            if died is not None:
                self.recoveries.append(self.now - died)
            self._tell(ev.BatchReady(worker, generation, item.number, None, 1))

    def _die(self, worker: int) -> None:
        one = self.workers[worker]
        if not one.alive:
            return
        self.deaths += 1
        head = one.inbox[0] if one.busy else None
        if isinstance(head, ev.Task):
            self._lost.setdefault(head.number, self.now)
        exit = ev.Exit(
            self.now,
            "killed",
            "SIGKILL",
            task=head.number if isinstance(head, ev.Task) else None,
            position=0,
            step="fetch" if one.busy else "idle",
            seconds=1.0,
        )
        generation = one.generation
        one.alive = one.ready = one.busy = False
        one.inbox.clear()
        self._tell(ev.WorkerExited(worker, generation, exit))

    def _fail_later(self, host: int) -> None:
        if self.case.failures:
            self._later(self._failures.expovariate(self.case.failures / DAY), "host", host)

    # -- the machine ----------------------------------------------------------------------

    def _tell(self, event: ev.Event) -> None:
        began = time.thread_time()
        actions = self.machine.handle(event)
        self.spent += time.thread_time() - began
        self.events += 1
        taken: object = None
        for action in actions:
            if isinstance(action, ev.Dispatch):
                self.workers[action.worker].inbox.append(action.item)
                self._begin(action.worker)
            elif isinstance(action, ev.Draw):
                self.due += action.count
            elif isinstance(action, ev.Deliver):
                taken = action.what
            elif isinstance(action, ev.Start):
                one = self.workers[action.worker]
                one.generation, one.alive = action.generation, True
                self._later(self.case.start, "ready", action.worker, action.generation)
        if taken is not None:
            self._take(taken)


def memory(workers: int) -> int:
    """Bytes that the machine has after every worker has died once."""
    tracemalloc.start()
    try:
        simulation = Simulation(workers, Case("", 24.0, 10.0), 10 * workers)
        simulation.run()
        kept = tracemalloc.take_snapshot().filter_traces(
            [tracemalloc.Filter(True, "*/holdfast/engine/*")]
        )
    finally:
        tracemalloc.stop()
    return sum(one.size for one in kept.traces)


def measure(days: float) -> list[tuple[Outcome, float, int]]:
    """Each outcome, the share of the time that was lost, and bytes of the machine."""
    found = []
    for workers in WORKERS:
        batches = int(days * DAY / MAKING * workers * LOAD)
        nbytes = memory(workers)
        undisturbed: dict[float, Outcome] = {}  # by how long a start takes
        for case in CASES:
            if case.start not in undisturbed:
                nothing = Case("", 0.0, case.start)
                undisturbed[case.start] = Simulation(workers, nothing, batches).run()
            one = Simulation(workers, case, batches).run()
            lost = 1 - undisturbed[case.start].seconds / one.seconds
            found.append((one, lost, nbytes))
            print(row(one, lost, nbytes), flush=True)
    return found


def row(one: Outcome, lost: float, nbytes: int) -> str:
    recovery = statistics.median(one.recoveries) if one.recoveries else None
    cells = (
        f"{one.workers:,}",
        one.case.name,
        f"{one.deaths:,}",
        "–" if recovery is None else f"{recovery:,.0f} s",
        f"{max(0.0, lost):.2%}",
        f"{one.cost * 1e6:.1f} µs",
        f"{one.cost * one.events / one.seconds:.3%}",
        f"{nbytes / one.workers / 1024:.1f} KiB",
    )
    return f"| {' | '.join(cells)} |"


HEAD = (
    "| workers | failures | workers lost | until a lost batch was made again | throughput lost "
    "| a decision | of one core | memory for each worker |\n"
    "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
)


def plot(path: Path, found: list[tuple[Outcome, float, int]]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(16, 3.6), layout="constrained")
    for case in CASES:
        mine = [(one, lost, nbytes) for one, lost, nbytes in found if one.case is case]
        workers = [one.workers for one, _, _ in mine]
        axes[0].plot(workers, [one.cost * 1e6 for one, _, _ in mine], "o-", label=case.name)
        axes[1].plot(workers, [100 * max(0.0, lost) for _, lost, _ in mine], "o-")
        again = [one for one, _, _ in mine if one.recoveries]
        recovered = [statistics.median(one.recoveries) for one in again]
        axes[3].plot([one.workers for one in again], recovered, "o-")
        if case is CASES[0]:
            axes[2].plot(workers, [nbytes / 1024 for _, _, nbytes in mine], "ko-")
    titles = (
        "a decision, µs",
        "throughput lost, %",
        "memory of the machine, KiB",
        "until a lost batch was made again, s",
    )
    for axis, title in zip(axes, titles, strict=True):
        axis.set(xscale="log", xlabel="workers", title=title)
    axes[0].set_ylim(bottom=0)
    axes[1].set_ylim(bottom=0)
    axes[3].set_ylim(bottom=0)
    axes[2].set(yscale="log")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--days", type=float, default=DAYS)
    parser.add_argument("--write", type=Path, metavar="PAGE")
    parser.add_argument("--plot", type=Path, metavar="PNG")
    asked = parser.parse_args()
    print(HEAD)
    found = measure(asked.days)
    if asked.write is not None:
        put(asked.write, "scale", "\n".join([HEAD, *(row(*one) for one in found)]))
    if asked.plot is not None:
        plot(asked.plot, found)


if __name__ == "__main__":
    main()
