"""Everything that is known about one death, stall or failed start.

Each field is ``None`` (or empty) if nothing could be read, which is not the same as zero: a counter
that did not move shows that the kernel killed no process; a counter that could not be read shows
nothing.
"""

from __future__ import annotations

import signal as signals
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from holdfast.autopsy.readers.cgroup import Group
from holdfast.autopsy.readers.procfs import Activity, Fill
from holdfast.explain.clues import Finding


@dataclass(frozen=True)
class Kills:
    """How far the kernel's counters of kills for memory moved since the last reading."""

    group: int | None = None
    """In the worker's control group, or the nearest readable one above it; None if none is."""
    group_path: str | None = None
    machine: int | None = None
    """In /proc/vmstat, which counts all groups of the machine."""
    deaths: int = 1
    """How many workers died in that time: a count of one explains only one of them."""


@dataclass(frozen=True)
class MemorySample:
    """How much memory each process had, in bytes."""

    time: float  # seconds since the epoch
    trainer: int | None = None
    workers: dict[int, int] = field(default_factory=dict)  # worker id -> resident
    usage: int | None = None  # of the control group that has the limit
    limit: int | None = None
    available: int | None = None
    swap_free: int | None = None


@dataclass(frozen=True)
class TrainerThread:
    """A thread of the trainer that was running when the workers were forked; they lack it."""

    name: str
    frames: tuple[str, ...] = ()
    """As `faulthandler` writes them, innermost first."""


@dataclass(frozen=True)
class Evidence:
    """The facts, without conclusions."""

    # How it ended.
    signal: str | None = None
    exitcode: int | None = None
    pid: int | None = None
    disappeared: bool = False  # its status was lost, with the process that would have read it
    nursery_end: str = ""  # how that process ended, in words; empty if that is not known
    nursery_error: str = ""  # its traceback, if it raised
    stalled: bool = False  # it was ended for lack of progress
    survived_sigkill: bool = False
    siblings: int = 0  # other workers that are dead too and not yet reported
    sent_by_us: bool = False  # holdfast sent the signal
    sent_by_itself: bool = False  # the worker noted in its black box that it was about to
    forked: bool = True
    errno: int | None = None  # of a fork that failed
    # What it was doing.
    step: str | None = None
    batch: int | None = None
    sample: Any = None
    ready: bool | None = None
    start_method: str | None = None
    threads_at_fork: int | None = None
    neighbours: tuple[TrainerThread, ...] = ()
    activity: Activity | None = None  # just before we killed it
    busy: bool | None = None  # whether its CPU time went up between two readings
    alone: bool | None = None  # whether it had only one thread then
    # What it left.
    stack: str = ""
    stderr: str | None = None  # the end of what it wrote there; None: it was not read
    thread_notes: tuple[str, ...] = ()
    handlers: bool | None = None  # whether faulthandler's handlers were installed; None: unknown
    # Where to look for it.
    control_groups: tuple[Group, ...] | None = None  # its own; None: it never ran
    since: float | None = None  # monotonic, when it was started
    # What the system says.
    kills: Kills = Kills()
    kernel_lines: tuple[str, ...] = ()
    kernel_readable: bool = False
    kernel_victims: tuple[int, ...] = ()  # pids the kernel's log says it killed for memory
    memory: tuple[MemorySample, ...] = ()  # oldest first
    worker_bytes: int | None = None  # its own, when last measured
    worker_private: int | None = None  # the part not shared with other processes
    worker_descriptors: int | None = None  # its own, when last read
    worker_threads: int | None = None
    shm: Fill | None = None
    descriptors: int | None = None  # the trainer's
    descriptor_limit: int | None = None
    threads: int | None = None
    pids_current: int | None = None
    pids_max: int | None = None
    pids_refused: int | None = None  # forks refused since the last reading
    oom_group: bool | None = None
    cpu_seconds: float | None = None  # used in its life, its children's included
    cpu_limit: float | None = None  # the hard limit, in seconds; None: unlimited or unknown
    group_signal: str | None = None  # a signal that was sent to the whole process group
    group_signal_ago: float = 0.0  # seconds before the death; 0: it is still being delivered
    # Of an actor of a Ray cluster.
    node: str = ""  # where it ran
    actor: str = ""  # its id
    silent: float | None = None  # seconds without progress
    ray_cause: str = ""  # what Ray's reason means, as a name in the catalogue
    said_by_ray: str = ""  # that reason
    # What was said.
    findings: tuple[Finding, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """What is known, for a logbook; unknown fields are left out."""
        # A sample may be anything, of any size.
        whole = asdict(replace(self, sample=None, control_groups=None))
        empty = {one.name: one.default for one in fields(self)}
        return {
            name: value
            for name, value in whole.items()
            if name not in _ELSEWHERE and getattr(self, name) != empty[name]
        }


_ELSEWHERE = {"sample", "stack", "findings", "control_groups", "since"}  # or of no use to a reader


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"  # a real-time signal without a name
