"""What a decision costs, for 2, 64 and 1,000 workers.

    python -m benchmarks.machine

The machine alone, in one process: each batch is asked for, drawn, made, delivered and unpacked.
Every hundredth batch costs its worker's life. Medians of some rounds, in microseconds per event.
"""

from __future__ import annotations

import statistics
import time
from collections import deque

from holdfast.engine import events as ev
from holdfast.engine.machine import Machine

WORKERS = (2, 64, 1000)
PREFETCH = 2
BATCHES = 20_000
ROUNDS = 5
DEATHS = 100  # one for so many batches


def play(workers: int, in_order: bool, room: int | None) -> tuple[float, int]:
    """Seconds in the machine, and how many events that were."""
    machine = Machine(
        workers=workers,
        prefetch=PREFETCH,
        in_order=in_order,
        restarts=ev.RestartPolicy(None, 60.0),
        largest=100,
    )
    orders: deque[tuple[int, ev.Task]] = deque()
    generations = [0] * workers
    due = made = events = 0
    asked: ev.Deliver | None = None
    spent = 0

    def tell(event: ev.Event) -> None:
        nonlocal due, asked, events, spent
        began = time.perf_counter_ns()
        actions = machine.handle(event)
        spent += time.perf_counter_ns() - began
        events += 1
        for action in actions:
            if isinstance(action, ev.Dispatch):
                assert isinstance(action.item, ev.Task)
                orders.append((action.worker, action.item))
            elif isinstance(action, ev.Draw):
                due += action.count
            elif isinstance(action, ev.Deliver):
                asked = action
            elif isinstance(action, ev.Start):
                generations[action.worker] = action.generation

    tell(ev.RoomChanged(room))
    tell(ev.Began())
    for worker in range(workers):
        tell(ev.WorkerReady(worker, 0))
    events = spent = 0
    while made < BATCHES:
        while due > 0:
            due -= 1
            tell(ev.Drawn(None))
        tell(ev.ASKED)
        while asked is None:
            worker, task = orders.popleft()
            made += 1
            if made % DEATHS == 0:
                again = [one for one in orders if one[0] != worker]
                orders.clear()
                orders.extend(again)
                exit = ev.Exit(float(made), "killed", "SIGKILL")
                tell(ev.WorkerExited(worker, generations[worker], exit))
                tell(ev.WorkerReady(worker, generations[worker]))
            else:
                tell(ev.BatchReady(worker, generations[worker], task.number, None, 100))
        asked = None
        tell(ev.UNPACKED)
    return spent / 1e9, events


def main() -> None:
    print(f"{'workers':>7}  {'order':>11}  {'budget':>7}  µs per event")
    for workers in WORKERS:
        for in_order in (True, False):
            for room in (None, workers * 100):
                rounds = [play(workers, in_order, room) for _ in range(ROUNDS)]
                each = statistics.median(seconds / events * 1e6 for seconds, events in rounds)
                order = "in order" if in_order else "as it comes"
                budget = "none" if room is None else "half"
                print(f"{workers:>7}  {order:>11}  {budget:>7}  {each:.2f}", flush=True)


if __name__ == "__main__":
    main()
