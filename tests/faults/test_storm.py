"""A storm: random signals at random workers at random moments, and the stream does not notice.

`HOLDFAST_STORM_SEED` repeats a storm's decisions (not the moments they fall on);
`HOLDFAST_STORM_SECONDS` makes the long one longer.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data

import holdfast
from holdfast.engine.background import CLOSED
from tests.faults.checker import History, check_conduct, check_stream, play, seeded
from tests.faults.datasets import KINDS, Collate, Init, Recipe
from tests.faults.witness import Witness, biting, check_in_flight
from tests.support.golden import asked_once
from tests.support.processes import kill

pytestmark = [pytest.mark.faults]

SEED = int(os.environ.get("HOLDFAST_STORM_SEED") or random.SystemRandom().randrange(1 << 32))
SECONDS = float(os.environ.get("HOLDFAST_STORM_SECONDS") or 120)
SIGNALS = [signal.SIGKILL] * 5 + [signal.SIGSEGV] * 4 + [signal.SIGSTOP]


@dataclass(frozen=True)
class Weather:
    """What one run of a storm blows upon."""

    kind: str
    workers: int
    persistent: bool
    payload: int
    batches: int  # of each worker
    method: str = "fork"
    thread: str = "main"

    @property
    def size(self) -> int:
        return self.batches * self.workers * 3

    @property
    def heavy(self) -> range:
        return range(0, self.size, 50) if self.payload else range(0)

    @property
    def batch_bytes(self) -> int:
        """The largest, which is also the first."""
        return 3 * Recipe(self.size, large=KINDS[self.kind].large).nbytes + self.payload

    @property
    def budget(self) -> int:
        return biting(self.batch_bytes, self.workers)

    def witness(self, file: Path) -> Witness:
        sample = (self.batch_bytes - self.payload) // 3
        sizes = [sample + self.payload * (n in self.heavy) for n in range(self.size)]
        return Witness(file, sizes)

    def arguments(self, witness: Witness | None = None) -> dict[str, Any]:
        kind = KINDS[self.kind]
        recipe = Recipe(
            self.size,
            large=kind.large,
            objects=kind.objects,
            payload=self.payload,
            heavy=frozenset(self.heavy),
            witness=None if witness is None else str(witness.file),
        )
        return {
            "dataset": kind.dataset(recipe),
            "batch_size": 3,
            "num_workers": self.workers,
            "persistent_workers": self.persistent,
            "collate_fn": Collate(as_list=kind.objects) if kind.own_collate else None,
            "worker_init_fn": Init(),
        }


@lru_cache(maxsize=16)
def golden(weather: Weather) -> History:
    def make() -> Any:
        seeded()
        return torch.utils.data.DataLoader(**weather.arguments(), multiprocessing_context="fork")

    epochs = 2 if weather.persistent else 1
    return asked_once("faults", weather, lambda: play(make, epochs=epochs, stock=True))


@dataclass
class Seat:
    """What a storm remembers of one worker's place."""

    generation: int = -1
    base: int = 0  # answers when this generation was first seen
    struck: bool = False
    # Signals since it last answered something; at first as if one had struck it already.
    chain: list[int] = field(default_factory=lambda: [int(signal.SIGKILL)])

    def look(self, generation: int, answered: int) -> None:
        if generation != self.generation:
            self.generation, self.base, self.struck = generation, answered, False
        elif answered > self.base and not self.struck:
            self.chain.clear()

    def may_be_struck(self, number: int) -> bool:
        again = number == signal.SIGKILL and self.chain == [signal.SIGKILL]
        return not self.struck and (not self.chain or again)

    def strike(self, number: int) -> None:
        self.struck = True
        self.chain.append(number)


@dataclass
class Storm:
    """Strikes the workers of one iterator from a thread of its own.

    A sample that ends two workers in a row by a crash is poisoned, three deaths in a row before a
    worker is ready are a failed start, and one that is stopped while it boots has two minutes: all
    are right, and not what is tested here. So a worker that was struck is left alone until its
    replacement has answered something; SIGKILL may strike twice.
    """

    dice: random.Random
    pace: float  # seconds between two strikes, on average
    nursery_too: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    struck: Counter[str] = field(default_factory=Counter)
    thread: threading.Thread | None = None

    def interfere(self, iterator: Any, epoch: int, number: int) -> None:
        if (epoch, number) == (0, 0):
            self.thread = threading.Thread(target=self._blow, args=(iterator._pool,), name="storm")
            self.thread.start()

    def over(self) -> None:
        self.done.set()
        if self.thread is not None:
            self.thread.join()

    def _blow(self, pool: Any) -> None:
        machine = pool.machine
        seats = [Seat() for _ in range(machine.workers)]
        while not self.done.wait(min(1.0, self.dice.expovariate(1 / self.pace))):
            if pool.background.stage is CLOSED:
                return
            for worker, seat in enumerate(seats):
                seat.look(machine.generation(worker), machine.seats[worker].answered)
            worker = self.dice.randrange(machine.workers)
            number = self.dice.choice(SIGNALS)
            if self.nursery_too and self.dice.random() < 0.05:
                if all(seat.may_be_struck(number) and not seat.chain for seat in seats):
                    self._strike(
                        "nursery", pool.driver.resources.nursery.pid, signal.SIGKILL, *seats
                    )
            elif seats[worker].may_be_struck(number):
                self._strike(
                    number.name, pool.driver.resources.slots[worker].pid, number, seats[worker]
                )

    def _strike(self, name: str, pid: int | None, number: int, *seats: Seat) -> None:
        if pid is None:
            return
        try:
            kill(pid, number=number)
        except ProcessLookupError:
            return
        self.struck[name] += 1
        for seat in seats:
            seat.strike(number)


def blow(
    enough: Callable[[float, int], bool],
    seed: int,
    weather: Callable[[random.Random], Weather],
    folder: Path,
    *,
    pace: float = 0.05,
    nursery_too: bool = False,
) -> None:
    """Storms, one after the other, until it is enough for this many seconds and incidents."""
    dice = random.Random(seed)
    began = time.monotonic()
    struck: Counter[str] = Counter()
    incidents = runs = 0
    while not enough(time.monotonic() - began, incidents):
        now = weather(dice)
        about = f"HOLDFAST_STORM_SEED={SEED} (run {runs}: seed {seed}, {now})"
        storm = Storm(random.Random(dice.random()), pace, nursery_too)
        witness = now.witness(folder / f"begun-{runs}")

        def make(now: Weather = now, witness: Witness = witness) -> Any:
            seeded()
            return holdfast.DataLoader(
                **now.arguments(witness),
                memory_budget=now.budget,
                multiprocessing_context=None if now.method == "fork" else now.method,
                max_restarts=None,
                stall_timeout=0.5 if now.method == "fork" else 2.0,
            )

        def interfere(
            iterator: Any, epoch: int, number: int, storm: Storm = storm, now: Weather = now
        ) -> None:
            storm.interfere(iterator, epoch, number)
            if (epoch, number) == (1 if now.persistent else 0, -1):
                storm.over()

        try:
            history = play(
                make,
                epochs=2 if now.persistent else 1,
                thread=now.thread,
                interfere=interfere,
                witness=witness,
            )
            check_stream(history, golden(now))
            check_conduct(history, innocent=set(), intensity=None, deadline=60)
            check_in_flight(witness.seen, budget=now.budget, batch=now.batch_bytes)
        except BaseException as error:
            raise AssertionError(f"{about}: {error}; struck so far {dict(storm.struck)}") from error
        finally:
            storm.over()
        struck += storm.struck
        incidents += len(history.incidents)
        runs += 1
    print(f"{runs} runs, {incidents} incidents, struck {dict(struck)}")
    assert incidents > 0


def after(seconds: float) -> Callable[[float, int], bool]:
    return lambda took, incidents: took > seconds


def small(dice: random.Random) -> Weather:
    return Weather(
        kind=dice.choice(["map", "iterable, state", "map, own collate", "iterable"]),
        workers=2,
        persistent=dice.random() < 0.5,
        payload=dice.choice([0, 200_000]),
        batches=dice.choice([40, 100]),
        thread=dice.choice(["main", "other"]),
    )


def any_fork(dice: random.Random) -> Weather:
    kind = dice.choice(list(KINDS))
    return Weather(
        kind=kind,
        workers=dice.choice([1, 2, 4]),
        persistent=dice.random() < 0.5,
        payload=0 if KINDS[kind].large else dice.choice([0, 20_000, 200_000, 5_000_000]),
        batches=40 if KINDS[kind].large else dice.choice([50, 100, 200]),
        thread=dice.choice(["main", "other"]),
    )


def any_spawned(dice: random.Random) -> Weather:
    return Weather(
        kind=dice.choice(["map", "iterable", "iterable, state"]),
        workers=dice.choice([1, 2]),
        persistent=True,
        payload=dice.choice([0, 200_000]),
        batches=600,
        method=dice.choice(["spawn", "forkserver"]),
    )


@pytest.mark.slow
@pytest.mark.timeout(120, method="thread")
def test_a_short_storm_leaves_no_trace_in_the_stream(tmp_path: Path) -> None:
    blow(lambda took, incidents: incidents >= 12, SEED, small, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300, method="thread")
@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
def test_a_long_storm_leaves_no_trace_in_the_stream(tmp_path: Path) -> None:
    blow(after(SECONDS), SEED + 1, any_fork, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300, method="thread")
@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
def test_a_storm_that_also_strikes_the_nursery_leaves_no_trace_in_the_stream(
    tmp_path: Path,
) -> None:
    blow(after(SECONDS), SEED + 2, any_fork, tmp_path, nursery_too=True)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300, method="thread")
def test_a_storm_over_spawned_workers_leaves_no_trace_in_the_stream(tmp_path: Path) -> None:
    blow(after(SECONDS / 2), SEED + 3, any_spawned, tmp_path, pace=0.3)
