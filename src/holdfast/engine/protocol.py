"""What pool and worker say to each other, in one place for both sides.

When a worker starts it is given a `Blueprint`, which all workers of a pool have in common, a
`Setup` of its own, and descriptors (`Equipment`). From then on the pool sends *orders*, pickled:
what to do, the number of the task, what belongs to it, and which parts of the arena are free again.
The worker sends *messages*: one letter, then what belongs to it.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from holdfast.engine.continuation import Plan
from holdfast.memory.ladder import Allowance
from holdfast.samples.policy import Policy

__all__ = [
    "BATCH",
    "CONTENT",
    "ENDED",
    "ERROR",
    "FOUND",
    "GROWN",
    "HEAD",
    "MEMORY",
    "NOTHING_LEFT",
    "POINT",
    "RAISED",
    "READY",
    "REFUSED",
    "REMARK",
    "REPORT",
    "RESUMED",
    "RETIRED",
    "SIZES",
    "SURVIVED",
    "TAKEN_UP",
    "Blueprint",
    "Equipment",
    "Order",
    "Probe",
    "Setup",
    "order",
]


# -- when a worker starts -----------------------------------------------------------------


@dataclass(frozen=True)
class Blueprint:
    """What all workers of a pool have in common; under spawn it is pickled once."""

    dataset: Any
    iterable: bool
    auto_collation: bool
    collate_fn: Callable[[Any], Any]
    drop_last: bool
    worker_init_fn: Callable[[int], Any] | None
    base_seed: int
    num_workers: int
    batch_index: Any  # what an iterable dataset is asked with, for every batch
    policy: Policy | None = None  # for bad samples; None to let them raise

    @property
    def on_bad_sample(self) -> Any:
        return None if self.policy is None else self.policy.on_bad_sample


@dataclass(frozen=True)
class Probe:
    """What a process does that looks for a leak, instead of a worker's work."""

    orders: tuple[bytes, ...]  # whose tasks to make of a map-style dataset, again and again
    batches: int  # between two looks


@dataclass(frozen=True)
class Setup:
    """What one worker process is told when it starts."""

    worker: int
    generation: int
    shared_seed: int | None
    held: tuple[tuple[int, int], ...]  # parts of the arena the consumer still uses
    answered: int
    passed: int  # epochs the replica has been in before this one
    replica: int  # batches it has made in this one
    exhausted: bool
    random_state: bytes | None  # before the first item it will be asked for
    epoch_state: bytes | None  # when the replica's epoch began, if that was not its first
    allowance: Allowance
    accused: bool = False  # a sample that it will come to may have killed its predecessor
    plan: Plan | None = None  # how to take up a stream; None for the first worker of a seat
    marks: bool = False  # whether its batches leave fingerprints
    states: bool = False  # whether the dataset is asked for its state after every batch,
    rests: bool = False  # and at the end of an epoch
    region: int = 0  # which black box it has,
    regions: int = 1  # of so many
    rehearsal: int | None = None  # it only tries to take up, growing by no more than these bytes
    probe: Probe | None = None  # it only looks for a leak

    @property
    def beside(self) -> bool:
        """Whether this process is no worker: see `beside`."""
        return self.rehearsal is not None or self.probe is not None


@dataclass(frozen=True)
class Equipment:
    """The file descriptors a worker gets, and whom it must not outlive."""

    channel: int
    arena: int
    blackboxes: int
    parent: int
    lifeline: int
    dump: int | None = None  # where it cannot open the black boxes for itself


# -- from the pool ------------------------------------------------------------------------

Order = Literal[
    "task", "briefed", "several", "trial", "resume", "released", "retire", "shrink", "ask", "stay"
]
"""A task as torch gives it, or with a brief on bad samples; several of these at once; one sample to
be loaded alone; another epoch; nothing to do, but parts of the arena are free again; to go, because
of its size; to give back what it does not use; to ask whether it may go; and not to go, though it
is too large."""


def order(kind: Order, number: int, content: Any, released: Sequence[int]) -> bytes:
    """For a worker, which reads it with `pickle.loads`; `released` are offsets in its arena."""
    return pickle.dumps((kind, number, content, released), 5)


# -- from a worker ------------------------------------------------------------------------

READY: Final = b"R"
REFUSED: Final = b"X"  # it cannot begin
RAISED: Final = b"G"  # it is above its memory limit from the start: `SIZES`
MEMORY: Final = b"M"  # how large it is now: `POINT`
FOUND: Final = b"F"  # which lines hold growing memory, or why that is not known, pickled
REMARK: Final = b"K"  # something the user should know, once: what about and the words, pickled
RETIRED: Final = b"L"  # it goes, because of its size
GROWN: Final = (
    b"W"  # it would, if its stream can be continued: `SIZES`, the last random state but one
)
TAKEN_UP: Final = b"U"  # a `Finding`, pickled: how it has taken up a stream
REPORT: Final = b"P"  # bad samples of the batch whose answer comes next
SURVIVED: Final = b"T"  # the sample on trial did not end it

# Answers to items: `HEAD`, the dataset's state, the content.
BATCH: Final = b"B"
ERROR: Final = b"E"
NOTHING_LEFT: Final = b"N"  # all samples of the batch were bad
ENDED: Final = b"S"  # the replica of an iterable dataset has nothing more
RESUMED: Final = b"A"

HEAD: Final = struct.Struct("<qIQ")  # task, size of the dataset's state, fingerprint
CONTENT: Final = 1 + HEAD.size  # where what follows the head begins
SIZES: Final = struct.Struct("<qq")  # private bytes, and how many are allowed
POINT: Final = struct.Struct("<dqqqqqq")  # the fields of a `Point`
