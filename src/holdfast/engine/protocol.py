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

from holdfast.memory.ladder import Allowance
from holdfast.samples.policy import Policy

__all__ = [
    "BATCH",
    "CONTENT",
    "ENDED",
    "ERROR",
    "FOUND",
    "HEAD",
    "MEMORY",
    "NOTHING_LEFT",
    "POINT",
    "RAISED",
    "READY",
    "REFUSED",
    "REPORT",
    "RESUMED",
    "RETIRED",
    "SIZES",
    "SURVIVED",
    "Blueprint",
    "Equipment",
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
class Setup:
    """What one worker process is told when it starts."""

    worker: int
    workers: int
    generation: int
    shared_seed: int | None
    held: tuple[tuple[int, int], ...]  # parts of the arena the consumer still uses
    answered: int
    passed: int  # epochs the replica has been in before this one
    replica: int  # batches it has made in this one
    exhausted: bool
    random_state: bytes | None  # before the first item it will be asked for
    epoch_state: bytes | None  # when the replica's epoch began, if that was not its first
    resting_state: bytes | None  # of a dataset with state_dict, before that epoch
    dataset_state: bytes | None  # of a dataset or iterator with state_dict, after the last batch
    allowance: Allowance
    trace: int = 0  # batches between two looks for what piles up; 0 not to look


@dataclass(frozen=True)
class Equipment:
    """The file descriptors a worker gets, and whom it must not outlive."""

    channel: int
    arena: int
    blackboxes: int
    parent: int
    lifeline: int


# -- from the pool ------------------------------------------------------------------------

Order = Literal["task", "briefed", "trial", "resume", "released", "retire", "shrink"]
"""A task as torch gives it, or with a brief on bad samples; one sample to be loaded alone; another
epoch; nothing to do, but parts of the arena are free again; and to go, because of its size."""


def order(kind: Order, number: int, content: Any, released: Sequence[int]) -> bytes:
    """For a worker, which reads it with `pickle.loads`; `released` are offsets in its arena."""
    return pickle.dumps((kind, number, content, released), 5)


# -- from a worker ------------------------------------------------------------------------

READY: Final = b"R"
REFUSED: Final = b"X"  # it cannot begin
RAISED: Final = b"G"  # it is above its memory limit from the start: `SIZES`
MEMORY: Final = b"M"  # how large it is now: `POINT`
FOUND: Final = b"F"  # which lines hold growing memory, or why nobody knows, pickled
RETIRED: Final = b"L"  # it goes, because of its size
REPORT: Final = b"P"  # bad samples of the batch whose answer comes next
SURVIVED: Final = b"T"  # the sample on trial did not end it

# Answers to items: `HEAD`, the dataset's state, the content.
BATCH: Final = b"B"
ERROR: Final = b"E"
NOTHING_LEFT: Final = b"N"  # all samples of the batch were bad
ENDED: Final = b"S"  # the replica of an iterable dataset has nothing more
RESUMED: Final = b"A"

HEAD: Final = struct.Struct("<qI")  # task, size of the dataset's state
CONTENT: Final = 1 + HEAD.size  # where what follows the head begins
SIZES: Final = struct.Struct("<qq")  # private bytes, and how many are allowed
POINT: Final = struct.Struct("<dqqqqqq")  # the fields of a `Point`
