"""The seats of a pool: one for each worker id, which processes enter and leave.

A seat is in one of these states. Where a state has a deadline, it says what follows then.

| state    | meaning                               | at its deadline   | else                  |
| -------- | ------------------------------------- | ----------------- | --------------------- |
| STARTING | a process was ordered, not ready yet  |                   | `WorkerReady`: RUNNING|
| RUNNING  | it answers items                      |                   |                       |
| DUMPING  | it stalled, and is to write its stack | `Kill`, KILLING   |                       |
| LEAVING  | it has said that it exits             | `Kill`, KILLING   |                       |
| KILLING  | SIGKILL was sent                      | `Abandon`         |                       |
| PAUSED   | no process: another is started later  | `Start`, STARTING |                       |
| EMPTY    | no process, and nothing for one to do |                   | a task: STARTING      |

From the first five, which are *alive*: `WorkerStalled` leads from STARTING and RUNNING to DUMPING;
`WorkerRetired`, `WentAstray` and `StreamLost` lead to LEAVING; `WorkerExited` leads to STARTING,
PAUSED or EMPTY, whichever `restarts` decides. A pause that ends when there is nothing left to do
leads to EMPTY.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from holdfast.engine.vocabulary import Exit, Item, Resumption, Task, Trial

__all__ = ["Parting", "Seat", "SeatState"]


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
    WAY = enum.auto()  # it has not got to where its stream was


# By identity below: to look up an enum's member in a set takes longer.
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
    ready: bool = False  # the process has come through its start, whatever was done to it since
    parting: Parting | None = None
    ended: bool = False  # takes no more tasks in this epoch
    exhausted: bool = False  # its replica has nothing more, whichever epoch it is in
    items: deque[Item] = field(default_factory=deque)  # sent and not answered
    answered: int = 0
    epoch: int = 0  # of its replica; the consumer may be in a later one
    passed: int = 0
    replica: int = 0
    rehearsed: bool = False  # it has grown too large, and it is being tried whether it may go
    failed_starts: int = 0  # by itself, since it was last ready,
    killed_starts: int = 0  # and from outside
    failed_catching_up: int = 0  # by itself, since it last answered
    unborn: list[Exit] = field(default_factory=list)  # since it was last ready
    stalls: int = 0  # in a row, at what it has to answer next
    renewals: int = 0  # of the nursery, before it was started
    victim: Hashable = None  # the sample at which the last exits were,
    strikes: list[Exit] = field(default_factory=list)  # and these

    @property
    def alive(self) -> bool:
        """Whether there is a process, or one was ordered."""
        return self.state is not _PAUSED and self.state is not _EMPTY

    @property
    def at_work(self) -> bool:
        """Whether it has not been told to go, and has not said that it does."""
        return self.state is _RUNNING or self.state is _STARTING

    @property
    def busy(self) -> bool:
        """Whether it owes an answer, or its start."""
        return self.at_work and (bool(self.items) or not self.ready)

    @property
    def trial(self) -> Trial | None:
        """What it is asked for next, if that is a sample alone."""
        head = self.items[0] if self.items else None
        return head if isinstance(head, Trial) else None

    @property
    def head(self) -> Task | None:
        """The task it has to answer next, or of which it has a sample on trial."""
        head = self.items[0] if self.items else None
        if isinstance(head, Trial):
            return head.task
        return head if isinstance(head, Task) else None

    @property
    def next_seed(self) -> int | None:
        """That of the epoch it is to begin next."""
        head = self.items[0] if self.items else None
        return head.seed if isinstance(head, Resumption) else None

    @property
    def tries(self) -> int:
        """How often in a row its start has failed for lack of something."""
        return len(self.unborn)

    def absolve(self) -> None:
        """What was there when processes died in this seat is not suspected of it any more."""
        self.stalls = 0
        self.victim = None
        self.strikes.clear()
