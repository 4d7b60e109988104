"""The messages between a pool and its worker processes, for both sides.

A worker is started with a `Blueprint`, which is the same for all workers of a pool, a `Setup` of
its own, and descriptors (`Equipment`). After that the pool sends *orders*, pickled: what to do, the
number of the task, its content, and which blocks of the arena are free again. The worker sends
*messages*: one letter for the kind, then the content.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from holdfast.limits.worker_limit import Allowance
from holdfast.worker.interface import WorkerSetup

# -- when a worker starts -----------------------------------------------------------------


@dataclass(frozen=True)
class Probe:
    """What a leak probe does: a process that searches for a leak."""

    orders: tuple[bytes, ...]  # for a map-style dataset: makes their tasks, again and again
    batches: int  # in each round, after which the memory is compared


@dataclass(frozen=True, kw_only=True)
class Setup(WorkerSetup):
    """The arguments of one worker process."""

    held: tuple[tuple[int, int], ...]  # blocks of the arena that the consumer still uses
    allowance: Allowance
    takes_over: bool = False  # whether it uses memory that its predecessor has left in the arena
    accused: bool = False  # it will load a sample that may have killed its predecessor
    region: int = 0  # the number of its black box, see `autopsy.blackbox`
    regions: int = 1  # how many black boxes there are
    probe: Probe | None = None  # it is a leak probe
    counts: bool = False  # whether it counts where its time goes, for a logbook

    @property
    def beside(self) -> bool:
        """Whether this process is not a worker: see `auxiliary`."""
        return self.rehearsal is not None or self.probe is not None


@dataclass(frozen=True)
class Equipment:
    """The file descriptors of a worker, and the pid of its parent, which it must not outlive."""

    channel: int
    arena: int
    blackboxes: int
    parent: int
    lifeline: int
    dump: int | None = None  # for its stack, where it cannot open the black boxes itself


# -- from the pool ------------------------------------------------------------------------

Order = Literal[
    "task",
    "hinted",
    "several",
    "test",
    "resume",
    "tell",
    "released",
    "retire",
    "shrink",
    "ask",
    "stay",
]
"""What the worker is to do:

- task: make a batch. hinted: the same, with hints on bad samples. several: several of these.
- test: load one sample alone (an isolation test).
- resume: begin another epoch.
- tell: hear a notice.
- released: nothing, but blocks of its arena are free again.
- retire: exit because of its size. ask: report that it is too large, and where it is. stay: go on,
  although it is too large.
- shrink: return memory that it does not use.
"""


def order(kind: Order, number: int, content: Any, released: Sequence[int]) -> bytes:
    """An order, which the worker reads with `pickle.loads`. `released` are offsets in its arena."""
    return pickle.dumps((kind, number, content, released), 5)


# -- from a worker ------------------------------------------------------------------------

READY: Final = b"R"
REFUSED: Final = b"X"  # it cannot start
RAISED: Final = b"G"  # it is above its memory limit from the start: `SIZES`
MEMORY: Final = b"M"  # its size: `POINT`
FOUND: Final = b"F"  # which lines hold growing memory, or why that is not known, pickled
REMARK: Final = b"K"  # something to log once: its subject and the text, pickled
RETIRED: Final = b"L"  # it exits because of its size
GROWN: Final = b"W"  # it is too large: `SIZES`, and the random state before the last one
TAKEN_UP: Final = b"U"  # how it has continued a stream: a `ResumptionResult`, pickled
REPORT: Final = b"P"  # bad samples of the batch whose answer comes next
SURVIVED: Final = b"T"  # it has survived an isolation test

# An answer to an item is the kind, `HEAD`, the dataset's state, and the content.
HEAD: Final = struct.Struct("<qIQ")  # task, size of the dataset's state, fingerprint
CONTENT: Final = 1 + HEAD.size  # the offset of what follows the head
SIZES: Final = struct.Struct("<qq")  # private bytes, and how many are allowed
POINT: Final = struct.Struct("<dqqqqqq")  # the fields of a `Point`
