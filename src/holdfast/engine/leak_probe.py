"""Which lines leak: a process beside the workers loads samples and traces what they leave behind.

A worker that was replaced because it leaks cannot be traced afterwards. Its successor will leak as
well, but must not be traced either: allocations take several times as long then, and to look at all
that was allocated takes seconds, in which the trainer would wait for its batch. So the nursery
forks one process more. It becomes the same worker as far as the dataset can tell (id, seeds,
``worker_init_fn``), makes batches that are thrown away, and looks after equal numbers of them
(`memory.leaks`). It makes those that workers were asked for last, or begins the stream anew.

It runs when no other process needs the processor. So on a machine that is busy all the time it may
not get far, which is why it has much time; of the processor's time it takes little. It also gives
up when it has grown by more than its share of the free memory, and says what it has seen by then.
A sample that it waits for is ended by the parent (`beside`).
"""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Sequence
from typing import Any, Final, Protocol

from holdfast.engine.protocol import Blueprint, Probe
from holdfast.memory.housekeeping import Housekeeper
from holdfast.memory.leaks import Failed, Findings, Tracer

__all__ = ["LONGEST", "ROUNDS", "find"]

LONGEST: Final = 600.0  # seconds in all
PROCESSOR: Final = 60.0  # seconds of the processor
COMPARED: Final = 3
ROUNDS: Final = COMPARED + 2  # one to warm up, and one to compare the others with


class Prober(Protocol):
    """The process, as far as this needs it."""

    blueprint: Blueprint
    dataset: Any
    fetcher: Any
    keeper: Housekeeper

    def make_fetcher(self) -> None: ...


def find(prober: Prober, probe: Probe) -> Findings | Failed | None:
    """What piles up; None if that cannot be said."""
    asked = _asked(prober, probe.orders)
    if not asked:
        return None
    tracer = Tracer(probe.batches, COMPARED, prober.dataset)
    try:
        return _trace(prober, tracer, asked)
    finally:
        tracer.close()


def _trace(
    prober: Prober, tracer: Tracer, asked: list[tuple[Any, ...]]
) -> Findings | Failed | None:
    number, fresh, began = 0, True, time.monotonic()
    while True:
        if not _make(prober, asked[number % len(asked)], number):
            if fresh:
                return None  # there is nothing in it
            try:
                prober.make_fetcher()
            except BaseException:
                return None
            fresh = True
            continue
        number, fresh = number + 1, False
        try:
            found = tracer.step()
            if found is not None or not _may_go_on(prober, began):
                return found or tracer.end()
        except MemoryError:
            return None
        except Exception:
            return Failed(traceback.format_exc())


def _asked(prober: Prober, orders: Sequence[bytes]) -> list[tuple[Any, ...]]:
    """What batches to make."""
    if prober.blueprint.iterable:
        return [(prober.blueprint.batch_index,)]
    found = []
    for message in orders:
        kind, number, content, _ = pickle.loads(message)
        for one, _, index in content if kind == "several" else [(kind, number, content)]:
            if one in ("task", "briefed"):
                found.append(index if one == "briefed" else (index,))
    return found


def _make(prober: Prober, asked: tuple[Any, ...], number: int) -> bool:
    """Make a batch and drop it; False at the end of a stream. One that raises is as good: a worker
    answers with the error, and goes on."""
    try:
        prober.fetcher.fetch(number, *asked)
    except StopIteration:
        return not prober.blueprint.iterable
    except BaseException:
        pass
    return True


def _may_go_on(prober: Prober, began: float) -> bool:
    now = time.monotonic()
    slow = now - began > LONGEST or time.process_time() > PROCESSOR
    return not slow and prober.keeper.look(now)
