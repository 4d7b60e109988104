"""Faults on demand: named points in the worker where a test makes it die, hang or exit.

Switched on by the environment variable ``HOLDFAST_FAULTS``, read when a worker starts::

    HOLDFAST_FAULTS="before-send:SIGKILL@worker=0,task=3,generation=0"

Several faults are separated by ``;``. The action is a signal's name, ``exit=N``, ``hang``,
``raise``, or ``errno=NAME`` for an OSError. The conditions ``worker``, ``task`` and ``generation``
(how often it was replaced) default to any worker, any task, generation 0; ``generation=any``
repeats for every replacement; ``chance=0.1,seed=7`` strikes at random. With the variable unset the
points cost one comparison.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from dataclasses import dataclass

VARIABLE = "HOLDFAST_FAULTS"
POINTS = (
    "before-setup",
    "after-setup",
    "before-ready",
    "after-ready",
    "before-fetch",
    "after-fetch",
    "before-collate",
    "after-collate",
    "before-encode",
    "before-send",
    "mid-send",
    "after-send",
    "before-resume",
    "after-resume",
    "before-stop",
)
START_POINTS = ("make-nursery", "make-arena", "make-channel", "fork")
"""Before there is a worker: where the main process, and then the nursery, begin one."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: where, what, and when."""

    point: str
    action: str
    worker: int | None = None
    task: int | None = None
    generation: int | None = 0
    chance: float = 1.0
    seed: int = 0


class Faults:
    """The faults that may strike one worker process. Where there are none, use None: the points
    are on the way of every batch."""

    def __init__(self, faults: list[Fault], worker: int, generation: int) -> None:
        self._faults = [
            fault
            for fault in faults
            if fault.worker in (None, worker) and fault.generation in (None, generation)
        ]
        self._dice = random.Random(f"{[f.seed for f in faults]}-{worker}-{generation}")

    @classmethod
    def asked_for(cls, worker: int, generation: int) -> Faults | None:
        """What the environment wants for this process."""
        text = os.environ.get(VARIABLE)
        faults = cls(parse(text), worker, generation) if text else None
        return faults if faults is not None and faults._faults else None

    def strike(self, point: str, task: int | None = None) -> None:
        for fault in self._faults:
            if fault.point != point or fault.task not in (None, task):
                continue
            if fault.chance >= 1 or self._dice.random() < fault.chance:
                _act(fault.action)


def strike_start(point: str, worker: int, generation: int) -> None:
    """At one of the `START_POINTS`."""
    faults = Faults.asked_for(worker, generation)
    if faults is not None:
        faults.strike(point)


def parse(text: str) -> list[Fault]:
    """Read the value of ``HOLDFAST_FAULTS``; a mistake in it is a ValueError that quotes it."""
    return [_parse_one(part) for part in text.split(";") if part.strip()]


def _parse_one(text: str) -> Fault:
    head, _, conditions = text.strip().partition("@")
    point, _, action = head.partition(":")
    points = (*POINTS, *START_POINTS)
    if point not in points:
        raise ValueError(
            f"{VARIABLE}: no point {point!r} in {text!r}; there are {', '.join(points)}"
        )
    known = action in ("hang", "raise") or action.startswith("exit=")
    known |= action.startswith("errno=") and hasattr(errno, action[6:])
    if not known and action not in signal.Signals.__members__:
        raise ValueError(
            f"{VARIABLE}: no action {action!r} in {text!r}; a signal, exit=N, errno=NAME, hang, "
            "raise"
        )
    given = dict(part.split("=", 1) for part in conditions.split(",") if part)
    unknown = set(given) - {"worker", "task", "generation", "chance", "seed"}
    if unknown:
        raise ValueError(f"{VARIABLE}: no condition {', '.join(sorted(unknown))} in {text!r}")

    def number(name: str, default: int | None) -> int | None:
        value = given.get(name)
        return default if value is None else None if value == "any" else int(value)

    return Fault(
        point,
        action,
        number("worker", None),
        number("task", None),
        number("generation", 0),
        float(given.get("chance", 1)),
        int(given.get("seed", 0)),
    )


def _act(action: str) -> None:
    if action == "hang":
        while True:
            time.sleep(3600)
    if action == "raise":
        raise RuntimeError("a fault on demand")
    if action.startswith("errno="):
        number = getattr(errno, action[6:])
        raise OSError(number, os.strerror(number))
    if action.startswith("exit="):
        os._exit(int(action[5:]))
    os.kill(os.getpid(), signal.Signals[action])
