"""Which lines leak: an auxiliary process makes batches and traces the memory they leave behind.

A worker that was replaced because it leaks cannot be traced afterwards. Its successor must not be
traced either: allocations take several times as long while they are traced, and comparing
everything that was allocated takes seconds, in which the trainer would wait for its batch. So the
nursery forks one more process. To the dataset it is the same worker (same id, seeds and
``worker_init_fn``). It makes the batches that workers were asked for last, or begins the stream
anew, drops them, and takes a snapshot after equal numbers of them (`leak_tracer`).

It runs when no other process needs the CPU. On a machine that is always busy it may not get far, so
its time limit is long, and that on CPU time short. It also stops when it has grown by more than its
share of the free memory, and reports what it has found by then. If it hangs, the parent kills it
(`auxiliary`).
"""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Sequence
from typing import Any, Final

from holdfast.processes.protocol import Probe
from holdfast.worker.housekeeping import Housekeeper
from holdfast.worker.leak_tracer import Findings, Tracer, TracingFailed
from holdfast.worker.replica import Replica

LONGEST: Final = 600.0  # seconds in all
CPU: Final = 60.0  # seconds of CPU time
COMPARED: Final = 3
ROUNDS: Final = COMPARED + 2  # one to warm up, and one to compare the others with


def find(replica: Replica, keeper: Housekeeper, probe: Probe) -> Findings | TracingFailed | None:
    """What grows; None if that is not known."""
    asked = _asked(replica, probe.orders)
    if not asked:
        return None
    tracer = Tracer(probe.batches, COMPARED, replica.dataset)
    try:
        return _trace(replica, keeper, tracer, asked)
    finally:
        tracer.close()


def _trace(
    replica: Replica, keeper: Housekeeper, tracer: Tracer, asked: list[tuple[Any, ...]]
) -> Findings | TracingFailed | None:
    number, fresh, began = 0, True, (time.monotonic(), time.process_time())
    while True:
        if not _make(replica, asked[number % len(asked)], number):
            if fresh:
                return None  # the stream is empty
            try:
                replica.make_fetcher()
            except BaseException:
                return None
            fresh = True
            continue
        number, fresh = number + 1, False
        try:
            found = tracer.step()
            if found is not None or not _may_continue(keeper, began):
                return found or tracer.end()
        except MemoryError:
            return None
        except Exception:
            return TracingFailed(traceback.format_exc())


def _asked(replica: Replica, orders: Sequence[bytes]) -> list[tuple[Any, ...]]:
    """The arguments of the batches to make."""
    if replica.blueprint.iterable:
        return [(replica.blueprint.batch_index,)]
    found = []
    for message in orders:
        kind, number, content, _ = pickle.loads(message)
        for one, _, index in content if kind == "several" else [(kind, number, content)]:
            if one in ("task", "hinted"):
                found.append(index if one == "hinted" else (index,))
    return found


def _make(replica: Replica, asked: tuple[Any, ...], number: int) -> bool:
    """Make a batch and drop it; False at the end of a stream. A batch that raises counts too: a
    worker would send the error and continue."""
    fetcher: Any = replica.fetcher
    try:
        fetcher.fetch(number, *asked)
    except StopIteration:
        return not replica.blueprint.iterable
    except BaseException:
        pass
    return True


def _may_continue(keeper: Housekeeper, began: tuple[float, float]) -> bool:
    now, used = time.monotonic(), time.process_time()
    slow = now - began[0] > LONGEST or used - began[1] > CPU
    return not slow and keeper.may_continue(now)
