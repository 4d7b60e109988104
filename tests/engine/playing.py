"""A consumer and a driver for a machine that is played without either."""

from __future__ import annotations

import errno
from collections import deque
from typing import Any

from holdfast.engine import events as ev
from holdfast.engine import machine as m
from holdfast.engine.seats import SeatState

__all__ = ["UNLIMITED", "Player", "an_exit", "died"]

UNLIMITED = ev.RestartPolicy(None, 60.0)


def an_exit(
    at: float,
    sample: tuple[int, int | None] | None = None,
    *,
    outside: bool = False,
    unexplained: bool = False,
    memory: bool = False,
    after: float | None = None,
    inherited: bool = False,
    catching_up: bool = False,
    shortage: bool = False,
) -> ev.Exit:
    """A worker that ended by itself, or was killed: in the middle of `sample`, if that is given."""
    kind = "killed" if outside or unexplained else "stalled" if inherited else "exited"
    task, position = sample or (None, None)
    step = "replay" if catching_up else "idle" if sample is None else "fetch"
    return ev.Exit(
        at,
        "start-failed" if shortage else kind,
        signal="SIGKILL" if outside else None,
        exitcode=None if outside or unexplained or inherited else 1,
        errno=errno.EAGAIN if shortage else None,
        unexplained=unexplained,
        memory=memory,
        inherited=inherited,
        task=task,
        position=position,
        step=step,
        seconds=after,
    )


def died(
    worker: int,
    generation: int,
    at: float = 0.0,
    sample: tuple[int, int | None] | None = None,
    **how: Any,
) -> ev.WorkerExited:
    return ev.WorkerExited(worker, generation, an_exit(at, sample, **how))


class Player:
    """Does for the machine what pool and crew do; what it tells the workers is for the test."""

    def __init__(self, workers: int = 2, prefetch: int = 2, **options: Any) -> None:
        options.setdefault("restarts", UNLIMITED)
        self.machine = m.Machine(workers=workers, prefetch=prefetch, **options)
        self.due = 0
        self.delivered: deque[ev.Delivery | ev.End | ev.GaveUp] = deque()
        self.reports: list[ev.Report] = []
        self.forgotten: list[ev.Forget] = []

    def handle(self, event: ev.Event) -> list[ev.Action]:
        """What the workers are to be told."""
        rest: list[ev.Action] = []
        for action in self.machine.handle(event):
            if isinstance(action, ev.Draw):
                self.due += action.count
            elif isinstance(action, ev.Deliver):
                self.delivered.append(action.what)
            elif isinstance(action, ev.Report):
                self.reports.append(action)
            elif isinstance(action, ev.Forget):
                self.forgotten.append(action)
            else:
                rest.append(action)
        return rest

    def begin(self, position: ev.Position | None = None) -> list[ev.Action]:
        return self.handle(ev.Began(position))

    def draw(self, index: Any) -> list[ev.Action]:
        self.due -= 1
        return self.handle(ev.Drawn(index))

    def fill(self, indices: list[Any]) -> list[ev.Action]:
        """Draw what is due from `indices`; an empty list is a sampler with nothing more."""
        actions: list[ev.Action] = []
        while self.due > 0:
            if indices:
                actions += self.draw(indices.pop(0))
            else:
                self.due -= 1
                self.handle(ev.DRAINED)
        return actions

    def take(self) -> ev.Delivery | ev.End | ev.GaveUp | None:
        """What the consumer gets now; None if it has to wait."""
        if not self.delivered:
            self.handle(ev.ASKED)
        return self.delivered.popleft() if self.delivered else None

    def generation(self, worker: int) -> int:
        return self.machine.generation(worker)

    def state(self, worker: int) -> SeatState:
        return self.machine.seats[worker].state

    def deadline(self) -> float | None:
        return self.machine.deadline()

    def on_trial(self, worker: int) -> bool:
        return self.machine.seats[worker].isolation_test is not None

    def patience(self, worker: int) -> int:
        """How many times as long as usual it may be silent."""
        return 1 << self.machine.seats[worker].stalls

    @property
    def failure(self) -> ev.GaveUp | None:
        return self.machine.failure
