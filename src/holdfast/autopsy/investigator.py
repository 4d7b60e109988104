"""Reads what is known about the death of a worker process, and judges it.

A counter only means something compared with its earlier value, and a dead process has no memory to
measure. So counters and sizes are noted every few seconds while all is well, which takes some
microseconds per worker.

A counter may be read after a kill and before the death is reported. So counters are compared with
those of at least `_SETTLED` seconds ago, less the kills that explained earlier deaths. If more
workers died than the kernel counted, it cannot be known which of them it killed.

The evidence of a death is collected in three steps: what a successor would overwrite (`remains`),
what changes from one moment to the next (`gather`), and what takes up to a tenth of a second to
read, above all the kernel's log (`examine`). The last step may run in another thread while the pool
goes on.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

from holdfast.autopsy import thread_notes
from holdfast.autopsy.blackbox import NotedSize
from holdfast.autopsy.evidence import (
    Evidence,
    Kills,
    MemorySample,
    TrainerThread,
    signal_name,
)
from holdfast.autopsy.logbook import Logbook
from holdfast.autopsy.machine_facts import MachineFacts
from holdfast.autopsy.readers import HERE, Roots, cgroup, kernel_log, procfs
from holdfast.autopsy.trainer_threads import other_threads
from holdfast.autopsy.verdict import Run, Verdict, judge
from holdfast.shared_deque import copy_of

INTERVAL = 5.0  # seconds between two measurements
_MINUTE = 12  # measurements that are kept
_SETTLED = 2.0  # seconds
_GLANCE = 0.05  # seconds over which CPU time is compared
_FROM_KERNEL = {"SIGKILL", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"}
_FOR_ALL = (15, 1, 2)  # SIGTERM, SIGHUP, SIGINT: sent to whole process groups
_NO_SIGNALS: Mapping[int, float] = MappingProxyType({})
_PATIENCE = 120.0  # seconds a batch system may take from SIGTERM to SIGKILL


@dataclass(frozen=True)
class _Counters:
    at: float
    groups: dict[str, int]
    machine: int | None


@dataclass
class _LiveWorker:
    """A living worker."""

    pid: int
    groups: tuple[cgroup.Group, ...]
    seen: Evidence
    """What was seen of it so far."""
    looked: float = 0.0  # when its size was last measured
    group_signals: Mapping[int, float] = field(default_factory=dict)  # sent to all, and when

    def saw(self, **facts: Any) -> None:
        self.seen = replace(self.seen, **facts)


@dataclass
class Investigator:
    """One for each pool."""

    start_method: str
    workers: int
    logbook: Logbook | None = None
    roots: Roots = HERE
    stall_timeout: float | None = None
    _workers: dict[int, _LiveWorker] = field(default_factory=dict)
    _counters: deque[_Counters] = field(default_factory=lambda: deque(maxlen=_MINUTE))
    _memory: deque[MemorySample] = field(default_factory=lambda: deque(maxlen=_MINUTE))
    _explained: deque[float] = field(default_factory=lambda: deque(maxlen=1000))
    """The times of deaths that a counted kill has explained."""
    _next_look: float = field(default_factory=lambda: time.monotonic() + 1)

    def __post_init__(self) -> None:
        self._machine: MachineFacts | None = None
        self._threads: int | None = None
        self._neighbours: tuple[TrainerThread, ...] = ()

    def before_fork(self) -> None:
        """Workers are about to be forked from this process: note the threads they will lack."""
        self._threads = procfs.threads("self", self.roots)
        self._neighbours = other_threads()

    def begin(self) -> None:
        """Note the counters before any worker has died. Once is enough."""
        if self._counters:
            return
        self._began = time.monotonic()
        self._own_groups = cgroup.groups("self", "memory", self.roots)
        refused = cgroup.confinement("self", self.roots).pids_refused
        self._refused = refused or 0
        self._counters.append(self._count(time.monotonic()))

    # -- while they live -------------------------------------------------------------------

    def born(self, worker: int, pid: int) -> None:
        groups = cgroup.groups(pid, "memory", self.roots) or self._own_groups
        seen = Evidence(
            pid=pid,
            start_method=self.start_method,
            threads_at_fork=self._threads,
            neighbours=self._neighbours,
            since=time.monotonic(),
        )
        self._workers[worker] = _LiveWorker(pid, groups, seen)
        self._meet(groups)

    def _meet(self, groups: tuple[cgroup.Group, ...]) -> None:
        """What a control group has counted before its first worker concerns no worker."""
        for path, count in cgroup.kills_of(groups).items():
            for one in self._counters:
                one.groups.setdefault(path, count)

    def sent(self, worker: int) -> None:
        """The user kills a worker through its process handle."""
        if worker in self._workers:
            self._workers[worker].saw(sent_by_us=True)

    def sample_counters(self, now: float) -> None:
        """Note sizes and counters, if the interval has passed."""
        if now < self._next_look:
            return
        self._next_look = now + INTERVAL
        for live in self._workers.values():
            size = procfs.size(live.pid, self.roots)
            if size is None:
                continue
            live.looked = now
            live.saw(
                worker_bytes=size.resident,
                worker_descriptors=procfs.descriptors(live.pid, self.roots),
                worker_threads=procfs.threads(live.pid, self.roots),
            )
            groups = cgroup.groups(live.pid, "memory", self.roots)
            if groups and groups != live.groups:
                live.groups = groups
                self._meet(groups)
        self._counters.append(self._count(now))
        sample = self._measure()
        self._memory.append(sample)
        if self.logbook is not None:
            record = asdict(sample)
            record["trainer_bytes"] = record.pop("trainer")
            self.logbook.memory(record)

    def before_kill(self, worker: int, progress: Callable[[], object]) -> bool:
        """We are about to kill a worker for lack of progress: see what it is doing. False if it
        makes progress meanwhile."""
        live = self._workers.get(worker)
        if live is None:
            return True
        shown = progress()
        before = procfs.activity(live.pid, self.roots)
        time.sleep(_GLANCE)
        after = procfs.activity(live.pid, self.roots)
        threads = procfs.threads(live.pid, self.roots)
        if progress() != shown:
            return False
        live.saw(
            activity=after,
            busy=None if before is None or after is None else after.ticks > before.ticks,
            alone=None if threads is None else threads == 1,
        )
        return True

    def reaped(
        self,
        worker: int,
        *,
        cpu: float,
        cpu_limit: float | None,
        handlers: bool | None = None,
        group: Mapping[int, float] = _NO_SIGNALS,
    ) -> None:
        """Note what only the process that reaps a worker can know."""
        live = self._workers.get(worker)
        if live is not None:
            live.saw(cpu_seconds=cpu, cpu_limit=cpu_limit, handlers=handlers)
            live.group_signals = group

    # -- before it is decided what comes next -----------------------------------------------

    def killed_for_memory(self, worker: int) -> bool:
        """Whether the kernel's counters allow that it killed this worker, which died of SIGKILL.
        Quick, and so less certain than the verdict."""
        live = self._workers.get(worker)
        kills = self._kills(None if live is None else live.groups, self._dead_siblings())
        return bool(kills.machine if kills.group is None else kills.group)

    def stalled_on_inherited_lock(self, worker: int, stack: str) -> bool:
        """Whether the verdict on this stall will be `fork-lock-deadlock`."""
        live = self._workers.get(worker)
        if live is None:
            return False
        evidence = replace(
            live.seen, stalled=True, sent_by_us=True, stack=thread_notes.split(stack)[1]
        )
        return judge(evidence).cause == "fork-lock-deadlock"

    # -- when one is dead ------------------------------------------------------------------

    def remains(
        self, worker: int, *, stalled: bool, stderr: str | None, size: NotedSize | None
    ) -> Evidence:
        """What was seen of a worker while it lived, and what it has left behind.

        `size` is what the worker noted in its black box, more often than we measure.
        """
        live = self._workers.pop(worker, None)
        if live is None:
            found = Evidence(start_method=self.start_method, threads_at_fork=self._threads)
        else:
            found = replace(
                live.seen,
                control_groups=live.groups,
                neighbours=live.seen.neighbours if stalled else (),
            )
            found = self._group_signal(found, live.group_signals)
        if size is not None and (live is None or size.at >= live.looked):
            private = max(0, size.resident - size.shared)
            found = replace(found, worker_bytes=size.resident, worker_private=private)
        return replace(found, stderr=stderr)

    def gather(self, evidence: Evidence) -> Evidence:
        """Add what will not be the same in a moment."""
        confined = cgroup.confinement("self", self.roots)
        limits = procfs.limits("self", self.roots)
        pending = procfs.pending_signals("self", self.roots)
        for number in _FOR_ALL:
            if number in pending:  # to the whole process group, and not handled here yet
                evidence = replace(evidence, group_signal=signal_name(number), group_signal_ago=0.0)
                break
        return replace(
            evidence,
            siblings=self._dead_siblings(),
            memory=(*copy_of(self._memory), self._measure()),
            shm=procfs.fill(self.roots.shm),
            descriptors=procfs.descriptors("self", self.roots),
            descriptor_limit=None if limits is None else limits.files[0],
            threads=procfs.threads("self", self.roots),
            pids_current=confined.pids_current,
            pids_max=confined.pids_max,
            pids_refused=max(0, (confined.pids_refused or 0) - self._refused) or None,
            oom_group=confined.oom_group,
        )

    def examine(self, evidence: Evidence) -> tuple[Evidence, Verdict]:
        """Add what takes long to read, and judge. Call it for one death after the other, in the
        order they died: a counted kill that explains one death does not explain the next."""
        if evidence.signal in _FROM_KERNEL and not evidence.sent_by_us:
            evidence = self._ask_kernel(evidence)
        verdict = judge(evidence, self._here(), self._run())
        if verdict.cause == "oom-killed":
            self._explained.append(time.monotonic())
        return evidence, verdict

    def _group_signal(self, evidence: Evidence, signals: Mapping[int, float]) -> Evidence:
        """The last signal that the nursery got too: it went to the whole process group."""
        got = {at: number for number, at in signals.items()}
        ago = time.monotonic() - max(got, default=-math.inf)
        if ago > _PATIENCE:
            return evidence
        last = signal_name(got[max(got)])
        return replace(evidence, group_signal=last, group_signal_ago=max(0.001, ago))

    def _ask_kernel(self, evidence: Evidence) -> Evidence:
        kills = self._kills(evidence.control_groups, evidence.siblings)
        # Running a command takes time: only if there is no other source.
        ask = evidence.signal == "SIGKILL" and kills.group is None and self.roots == HERE
        since = self._began if evidence.since is None else evidence.since
        log = kernel_log.read(self.roots, since=since, commands=ask)
        lines = () if log is None else log.lines
        about = kernel_log.about(evidence.pid, lines) if evidence.pid is not None else ()
        victims = [re.search(r"[Kk]ill(?:ed)? process (\d+) \(", line) for line in lines[-50:]]
        return replace(
            evidence,
            kills=kills,
            kernel_readable=log is not None,
            kernel_lines=about[-2:],
            kernel_victims=tuple(int(match[1]) for match in victims if match),
        )

    def _kills(self, groups: tuple[cgroup.Group, ...] | None, siblings: int) -> Kills:
        """How far the counters moved that count a worker in these control groups. `siblings` other
        workers were dead when its evidence was gathered; their exits may have been told since."""
        now = time.monotonic()
        base = self._base(now)
        groups = self._own_groups if groups is None else groups
        current = self._count(now, groups)
        used = sum(1 for at in copy_of(self._explained) if at >= base.at)
        mine = [str(group.path) for group in groups]
        moved = {
            path: current.groups[path] - base.groups[path]
            for path in mine  # innermost first
            if path in current.groups and path in base.groups
        }
        # The kernel counts a kill in the victim's own group. If only a counter above it has moved,
        # the victim was another process.
        own = next(iter(moved.values()), None)
        group = None if own is None else max(0, own - used)
        machine = None
        if current.machine is not None and base.machine is not None:
            machine = max(0, current.machine - base.machine - used)
        where = next(iter(moved), None) if group else None
        return Kills(group, where, machine, 1 + siblings)

    def _base(self, now: float) -> _Counters:
        """The newest counters that are certainly from before the death."""
        settled = [one for one in copy_of(self._counters) if now - one.at >= _SETTLED]
        return settled[-1] if settled else self._counters[0]

    def _dead_siblings(self) -> int:
        """How many workers are dead but not reported to us yet."""
        return sum(
            bool(procfs.is_dead(live.pid, self.roots)) for live in list(self._workers.values())
        )

    def _count(self, now: float, dead: tuple[cgroup.Group, ...] = ()) -> _Counters:
        chains = {self._own_groups, dead, *(one.groups for one in list(self._workers.values()))}
        found: dict[str, int] = {}
        for chain in chains:
            found |= cgroup.kills_of(chain)
        return _Counters(now, found, procfs.machine_kills(self.roots))

    def _measure(self) -> MemorySample:
        trainer = procfs.size("self", self.roots)
        confined = cgroup.confinement("self", self.roots)
        machine = procfs.meminfo(self.roots)
        return MemorySample(
            time.time(),
            None if trainer is None else trainer.resident,
            {
                worker: live.seen.worker_bytes
                for worker, live in self._workers.items()
                if live.seen.worker_bytes is not None
            },
            confined.memory_usage,
            confined.memory_limit,
            None if machine is None else machine.available,
            None if machine is None else machine.swap_free,
        )

    def _run(self) -> Run:
        book = None if self.logbook is None else self.logbook.given
        return Run(self.workers, os.getpid(), book, self.stall_timeout)

    def _here(self) -> MachineFacts:
        if self._machine is None:
            self._machine = MachineFacts.read(self.roots)
        return self._machine
