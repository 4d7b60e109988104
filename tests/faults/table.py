"""What may go wrong, and what a user must see then: cause × phase × start method × dataset.

The rule, in words. Whatever ends a worker once costs nothing: the stream stays, bit for bit, that
of stock torch without faults, and `loader.incidents` says what happened (REDONE). What is not the
end of a worker is no incident at all: signals that are meant for the trainer, threads and children
left behind, the end of the loader (UNHARMED). What the user's code raises is raised by `next()`
where the batch would have been, and the neighbours arrive (RAISED). What ends a worker every time
is named: the sample (POISON), or all the deaths (LIMIT), or the start that never succeeds
(NO_START); of an element of a stream that kills without a trace, and cannot be tried alone, only the
deaths are known. The rows stand in `rows.txt`, with their outcome. `make test` leaves out those
marked "slow", whose cause, phase and kind of dataset are in others too; `make test-all` plays them
all, and adds a pairwise cover of all columns, whose outcomes follow from the rule.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from tests.faults.causes import CAUSES, DIES, GOES_ON, RAISES, STALLS, Cause
from tests.faults.datasets import KINDS, Kind

REDONE, UNHARMED, RAISED = "redone", "unharmed", "raised"
POISON, LIMIT, NO_START = "poison", "limit", "no start"

BATCH = 3  # samples in a batch
ROUNDS = 5  # batches of each worker
PREFETCH = 2
POSITION = 1  # of the breaking sample in its batch

POINT, OWN, OUTSIDE = "a fault point", "the user's own code", "a signal from outside"


@dataclass(frozen=True)
class Phase:
    """A moment in a worker's life, how it is hit, and what the incident must say of it."""

    name: str
    by: str
    steps: tuple[str, ...] = ()
    names: str = ""  # what it names: "sample", "last sample", "batch" or nothing
    starting: bool = False
    between_epochs: bool = False


_PHASES = (
    Phase("before-setup", POINT, ("boot",), starting=True),
    Phase("after-setup", POINT, ("start-up",), starting=True),
    Phase("before-ready", POINT, ("start-up",), starting=True),
    Phase("after-ready", POINT, ("idle",)),
    Phase("before-fetch", POINT, ("fetch",), "batch"),
    Phase("after-fetch", POINT, ("fetch",), "last sample"),
    Phase("before-collate", POINT, ("collate",), "batch"),
    Phase("after-collate", POINT, ("collate",), "batch"),
    Phase("before-encode", POINT, ("send",), "batch"),
    Phase("before-send", POINT, ("send",), "batch"),
    Phase("mid-send", POINT, ("send",), "batch"),
    Phase("after-send", POINT, ("send", "idle")),
    Phase("before-resume", POINT, ("idle",), between_epochs=True),
    Phase("after-resume", POINT, ("send", "idle"), between_epochs=True),
    Phase("before-stop", POINT),
    Phase("load", OWN, ("boot",), starting=True),
    Phase("init", OWN, ("start-up",), starting=True),
    Phase("sample", OWN, ("fetch",), "sample"),
    Phase("collate", OWN, ("collate",), "batch"),
    Phase("pickle", OWN, ("send",), "batch"),
    Phase("unpickle", OWN),
    Phase("working", OUTSIDE, ("fetch", "collate", "send", "idle")),
    Phase("between epochs", OUTSIDE, ("idle",), between_epochs=True),
)
PHASES = {phase.name: phase for phase in _PHASES}
_NO_TASK = {"before-setup", "after-setup", "before-ready", "after-ready"}
_NO_TASK |= {"before-resume", "after-resume", "before-stop"}


@dataclass(frozen=True)
class Case:
    """One row. What is left out is as most users have it."""

    cause: str
    phase: str
    method: str = "fork"
    kind: str = "map"
    persistent: bool = False
    thread: str = "main"
    payload: int = 0
    workers: int = 2
    always: bool = False

    def __str__(self) -> str:
        words = [self.cause, self.phase, self.method, self.kind]
        for field in fields(self)[4:]:
            value = getattr(self, field.name)
            if value != field.default:
                words.append(field.name if value is True else f"{field.name} {value}")
        return " | ".join(words)

    @property
    def breaks(self) -> Cause:
        return CAUSES[self.cause]

    @property
    def at(self) -> Phase:
        return PHASES[self.phase]

    @property
    def dataset(self) -> Kind:
        return KINDS[self.kind]

    # Which batch is hit: one that is handed out only after the first next(), so that a test can
    # learn the worker's pid before.

    @property
    def task(self) -> int:
        return PREFETCH * self.workers + 1

    @property
    def worker(self) -> int:
        return self.task % self.workers

    @property
    def size(self) -> int:
        return ROUNDS * self.workers * BATCH

    @property
    def order(self) -> list[int]:
        """What the sampler gives: not in the order of numbers, so that an index is not a place."""
        return [(7 * place + 3) % self.size for place in range(self.size)]

    def number(self, position: int) -> int:
        """The sample at that position of the batch that is hit."""
        if self.dataset.iterable:
            place = self.task // self.workers * BATCH + position
            return self.worker + self.workers * place
        return self.order[self.task * BATCH + position]

    @property
    def stall_timeout(self) -> float:
        """For rows that stall on purpose: many times what a healthy worker needs for one step.

        A small sample takes a millisecond. A large one takes 80, and so does a start of another
        kind than a fork, on a machine with three of these rows at once.
        """
        large = self.dataset.large or self.payload >= 20_000_000
        return 1.0 if large or self.method != "fork" else 0.1

    @property
    def fault(self) -> str:
        """The value of HOLDFAST_FAULTS."""
        if self.at.by != POINT:
            return ""
        when = [f"worker={self.worker}"]
        if self.phase not in _NO_TASK:
            when.append(f"task={self.task}")
        if self.always:
            when.append("generation=any")
        return f"{self.phase}:{self.breaks.action}@{','.join(when)}"

    @property
    def outcome(self) -> str:
        """The rule above, in code."""
        if self.phase == "before-stop" or self.breaks.verdict == GOES_ON:
            return UNHARMED
        if self.breaks.verdict == RAISES:
            return RAISED
        if not self.always:
            return REDONE
        if self.at.starting:
            return NO_START
        without_a_trace = self.cause == "SIGKILL" and self.dataset.iterable
        return POISON if self.at.steps == ("fetch",) and not without_a_trace else LIMIT

    @property
    def possible(self) -> bool:
        """Whether this combination exists at all."""
        cause, phase, kind = self.breaks, self.at, self.dataset
        if phase.by == POINT and cause.action is None:
            return False
        if phase.by == OUTSIDE and (cause.action not in _OUTSIDE or self.always):
            return False
        if phase.between_epochs and not self.persistent:
            return False
        if self.phase == "mid-send":  # only a large state makes a message of several packets
            return self.kind == "iterable, state" and self.payload >= 200_000
        if self.phase == "load":
            return self.method != "fork" and cause.verdict in (DIES, STALLS)
        if self.phase == "collate" and not kind.own_collate:
            return False
        if self.phase in ("pickle", "unpickle") and not kind.objects:
            return False
        if self.phase == "unpickle":
            return self.cause == "ValueError"
        if self.phase == "init" and cause.verdict == RAISES:
            return False  # test_start_up.py
        if self.cause == "StopIteration" and kind.iterable:
            return False  # the iterator's own way to end
        return not (kind.large and self.payload)


_OUTSIDE = {
    "SIGKILL",
    "SIGSEGV",
    "SIGABRT",
    "SIGBUS",
    "SIGFPE",
    "SIGILL",
    "SIGSTOP",
    "SIGTERM",
    "SIGINT",
}


# -- the rows -------------------------------------------------------------------------------

_FILE = Path(__file__).with_name("rows.txt")


def _rows() -> tuple[list[tuple[Case, str]], frozenset[Case]]:
    """All of them, and those that take too long for `make test`."""
    rows, slow = [], set()
    for line in _FILE.read_text().splitlines()[2:]:
        cause, phase, method, kind, outcome, *more = (cell.strip() for cell in line.split("|"))
        given = dict(part.partition("=")[::2] for cell in more for part in cell.split(",") if part)
        case = Case(
            cause,
            phase,
            method,
            kind,
            persistent="persistent" in given,
            thread=given.get("thread", "main"),
            payload=int(given.get("payload", 0)),
            workers=int(given.get("workers", 2)),
            always="always" in given,
        )
        rows.append((case, outcome))
        if "slow" in given:
            slow.add(case)
    return rows, frozenset(slow)


ROWS, SLOW = _rows()


def known_fault(case: Case) -> str | None:
    """Why a row does not do yet what the table says; shown by the suite until it is mended."""
    return None


def marked(case: Case) -> list[pytest.MarkDecorator]:
    reason = known_fault(case)
    marks = [] if reason is None else [pytest.mark.xfail(strict=True, reason=reason)]
    return [*marks, pytest.mark.slow] if case in SLOW else marks
