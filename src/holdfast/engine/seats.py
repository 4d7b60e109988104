"""The seats of a pool: one for each worker id. Processes come and go, the seat stays.

A seat is in one of these states. Its `deadline`, if it has one, is a time for `Ticked`.

| state    | meaning                                | event: action, next state                    |
| -------- | -------------------------------------- | -------------------------------------------- |
| STARTING | a process was ordered, not ready yet   | `WorkerReady`: RUNNING                       |
|          |                                        | `WorkerStalled`: `Dump`, DUMPING             |
| RUNNING  | the process answers items              | `WorkerStalled`: `Dump`, DUMPING             |
| DUMPING  | it stalled, and is to write its stack  | `WorkerWentOn`: RUNNING, or STARTING         |
|          |                                        | deadline: `Kill`, KILLING                    |
| LEAVING  | it has announced that it exits         | deadline: `Kill`, KILLING                    |
| KILLING  | SIGKILL was sent                       | deadline: `Abandon`, and no further deadline |
| PAUSED   | no process; one is to be started later | deadline: `Start`, STARTING, or EMPTY if the |
|          |                                        | seat is not needed any more                  |
| EMPTY    | no process, and nothing to do          | a task is sent to the seat: `Start`,         |
|          |                                        | STARTING                                     |

A worker that cannot be killed (`Limits.killable`) is abandoned where others are killed. In the
first five states the seat is *alive*. From each of these:

- `WorkerRetired`, `ResumptionFailed` and `WorkerStreamLost` lead to LEAVING. (`WorkerStreamLost` of
  a process that was never started leads to EMPTY.)
- `WorkerExited` leads to STARTING, if a replacement is started at once; to PAUSED, if it is started
  later; to EMPTY, if there is nothing left to do or the run has failed. `restarts` decides that.

The seat of a worker that is not needed at all, because a resumed epoch has nothing for it, goes
from STARTING to EMPTY when the epoch begins.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from holdfast.engine.events import Exit, IsolationTest, Item, Notice, PastNotice, Task


class SeatState(enum.Enum):
    STARTING = enum.auto()
    RUNNING = enum.auto()
    DUMPING = enum.auto()
    LEAVING = enum.auto()
    KILLING = enum.auto()
    PAUSED = enum.auto()
    EMPTY = enum.auto()


class Parting(enum.Enum):
    """Why a process has said that it exits."""

    SIZE = enum.auto()
    WAY = enum.auto()  # it could not continue its stream in the way it was told to


# Compared by identity below, because looking up an enum's member in a set takes longer.
_STARTING, _RUNNING = SeatState.STARTING, SeatState.RUNNING
_PAUSED, _EMPTY = SeatState.PAUSED, SeatState.EMPTY


@dataclass(slots=True)
class Seat:
    """A worker's place: it keeps its id while the processes in it come and go.

    Only the machine changes it; everything else may read it.
    """

    id: int
    generation: int = 0
    state: SeatState = SeatState.STARTING
    deadline: float | None = None
    ready: bool = False  # the process has started, whatever happened to it since
    parting: Parting | None = None
    ended: bool = False  # it takes no more tasks in this epoch
    exhausted: bool = False  # its replica has ended, in whichever epoch the replica is
    items: deque[Item] = field(default_factory=deque)  # sent and not answered
    answered: int = 0
    epoch: int = 0  # of its replica; the consumer may be in a later one
    epochs_done: int = 0
    batches_done: int = 0
    told: list[PastNotice] = field(default_factory=list)  # notices that were heard in it
    settled: int = 0  # after so many of these a task was answered,
    settled_earlier: int = 0  # and after so many before this epoch
    rehearsed: bool = False  # it is too large, and a rehearsal for its replacement is under way
    failed_starts: int = 0  # exits of its own doing since it was last ready
    killed_starts: int = 0  # exits by a kill from outside since it was last ready
    failed_catching_up: int = 0  # exits of its own doing since it last answered
    short_starts: list[Exit] = field(default_factory=list)
    """Starts since it was last ready that failed because a resource was exhausted."""
    stalls: int = 0  # in a row, at the item that it has to answer next
    renewals: int = 0  # of the nursery, when this process was started
    suspect: Hashable = None  # the sample that was being loaded at the last exits
    suspect_exits: list[Exit] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        """Whether there is a process, or one was ordered."""
        return self.state is not _PAUSED and self.state is not _EMPTY

    @property
    def at_work(self) -> bool:
        """Whether it was neither told to exit nor has announced that it does."""
        return self.state is _RUNNING or self.state is _STARTING

    @property
    def busy(self) -> bool:
        """Whether it owes an answer, or has still to start."""
        return self.at_work and (bool(self.items) or not self.ready)

    @property
    def isolation_test(self) -> IsolationTest | None:
        """The item it has to answer next, if that is an isolation test."""
        head = self.items[0] if self.items else None
        return head if isinstance(head, IsolationTest) else None

    @property
    def head(self) -> Task | None:
        """The task it has to answer next, or a sample of which it has to test alone."""
        head = self.items[0] if self.items else None
        if isinstance(head, IsolationTest):
            return head.task
        return head if isinstance(head, Task) else None

    @property
    def has_work(self) -> bool:
        """Whether it was given something that a process is started for."""
        return any(not isinstance(item, Notice) for item in self.items)

    @property
    def tries(self) -> int:
        """How many starts in a row have failed because a resource was exhausted."""
        return len(self.short_starts)

    def clear_suspicion(self) -> None:
        """No sample is suspected of the exits in this seat any more."""
        self.stalls = 0
        self.suspect = None
        self.suspect_exits.clear()
