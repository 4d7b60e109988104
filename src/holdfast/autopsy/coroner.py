"""When a worker has died, the pool's coroner reads what is left of it and gives a verdict.

A counter only means something compared with its earlier value, and a dead process has no memory to
measure. So the coroner notes counters and sizes every few seconds while all is well, which takes
some microseconds per worker.

The coroner may read a counter after a kill and before the death is reported. So counters are
compared with those of at least `_SETTLED` seconds ago, less the kills that explained earlier
deaths. If more workers died than the kernel counted, it cannot be known which of them it killed.

What changes from one moment to the next is read at once (`receive`). The rest, above all the
kernel's log, takes up to a tenth of a second (`examine`); another thread may do that while the pool
goes on.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

from holdfast.autopsy import thread_notes
from holdfast.autopsy.blackbox import Size
from holdfast.autopsy.evidence import (
    Evidence,
    Kills,
    MemorySample,
    Neighbour,
    signal_name,
)
from holdfast.autopsy.logbook import Logbook
from holdfast.autopsy.machine import Machine
from holdfast.autopsy.neighbours import neighbours
from holdfast.autopsy.readers import HERE, Roots, cgroup, filesystem, kernel_log, process
from holdfast.autopsy.verdict import Run, Verdict, judge

__all__ = ["Body", "Coroner", "Examination"]

INTERVAL = 5.0  # seconds between two measurements
_MINUTE = 12  # measurements that are kept
_SETTLED = 2.0  # seconds
_GLANCE = 0.05  # seconds over which CPU time is compared
_FROM_KERNEL = {"SIGKILL", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"}
_FOR_ALL = (15, 1, 2)  # SIGTERM, SIGHUP, SIGINT: sent to whole process groups
_NO_SIGNALS: Mapping[int, float] = MappingProxyType({})
_PATIENCE = 120.0  # seconds a batch system may take from SIGTERM to SIGKILL


@dataclass(frozen=True)
class Examination:
    """What was found out about one death."""

    verdict: Verdict
    evidence: Evidence


@dataclass(frozen=True)
class _Counters:
    at: float
    groups: dict[str, int]
    machine: int | None


@dataclass
class _Patient:
    """A living worker."""

    pid: int
    groups: tuple[cgroup.Group, ...]
    threads_at_fork: int | None = None  # of the trainer, when this worker was forked from it
    neighbours: tuple[Neighbour, ...] = ()  # what those threads were doing
    since: float = field(default_factory=time.monotonic)
    resident: int | None = None
    looked: float = 0.0
    descriptors: int | None = None
    threads: int | None = None
    activity: process.Activity | None = None  # just before we killed it
    busy: bool | None = None
    alone: bool | None = None
    sent: bool = False  # the user killed it through its process handle
    cpu: float | None = None  # seconds, when it was reaped
    cpu_limit: float | None = None
    handlers: bool | None = None
    group: Mapping[int, float] = field(default_factory=dict)  # signals to the process group: when


@dataclass(frozen=True)
class Body:
    """A dead worker, with what was read immediately."""

    evidence: Evidence
    patient: _Patient | None


@dataclass
class Coroner:
    """One for each pool."""

    start_method: str
    workers: int
    logbook: Logbook | None = None
    roots: Roots = HERE
    stall_timeout: float | None = None
    _patients: dict[int, _Patient] = field(default_factory=dict)
    _counters: deque[_Counters] = field(default_factory=lambda: deque(maxlen=_MINUTE))
    _memory: deque[MemorySample] = field(default_factory=lambda: deque(maxlen=_MINUTE))
    _explained: deque[float] = field(default_factory=lambda: deque(maxlen=1000))
    """The times of deaths that a counted kill has explained."""
    _next_look: float = field(default_factory=lambda: time.monotonic() + 1)

    def __post_init__(self) -> None:
        self._machine: Machine | None = None
        self._threads: int | None = None
        self._neighbours: tuple[Neighbour, ...] = ()

    def before_fork(self) -> None:
        """Workers are about to be forked from this process: note the threads they will lack."""
        self._threads = process.threads("self", self.roots)
        self._neighbours = neighbours()

    def begin(self) -> None:
        """Note the counters before any worker has died."""
        self._began = time.monotonic()
        self._own_groups = cgroup.groups("self", "memory", self.roots)
        refused = cgroup.confinement("self", self.roots).pids_refused
        self._refused = refused or 0
        self._counters.append(self._count(time.monotonic()))

    # -- while they live -------------------------------------------------------------------

    def born(self, worker: int, pid: int) -> None:
        groups = cgroup.groups(pid, "memory", self.roots) or self._own_groups
        self._patients[worker] = _Patient(pid, groups, self._threads, self._neighbours)
        self._meet(groups)

    def _meet(self, groups: tuple[cgroup.Group, ...]) -> None:
        """What a control group has counted before its first worker concerns no worker."""
        for path, count in cgroup.kills_of(groups).items():
            for one in self._counters:
                one.groups.setdefault(path, count)

    def left(self, worker: int) -> None:
        """A worker has ended as it should."""
        self._patients.pop(worker, None)

    @property
    def pids(self) -> dict[int, int]:
        """The workers that live."""
        return {worker: patient.pid for worker, patient in self._patients.items()}

    def sent(self, worker: int) -> None:
        """The user kills a worker through its process handle."""
        if worker in self._patients:
            self._patients[worker].sent = True

    def look(self, now: float) -> None:
        """Note sizes and counters, if the interval has passed."""
        if now < self._next_look:
            return
        self._next_look = now + INTERVAL
        for patient in self._patients.values():
            size = process.size(patient.pid, self.roots)
            if size is None:
                continue
            patient.resident, patient.looked = size.resident, now
            patient.descriptors = process.descriptors(patient.pid, self.roots)
            patient.threads = process.threads(patient.pid, self.roots)
            groups = cgroup.groups(patient.pid, "memory", self.roots)
            if groups and groups != patient.groups:
                patient.groups = groups
                self._meet(groups)
        self._counters.append(self._count(now))
        sample = self._measure()
        self._memory.append(sample)
        if self.logbook is not None:
            record = asdict(sample)
            record["trainer_bytes"] = record.pop("trainer")
            self.logbook.memory(record)

    def before_kill(self, worker: int) -> None:
        """We are about to kill a worker for lack of progress: see what it is doing."""
        patient = self._patients.get(worker)
        if patient is None:
            return
        before = process.activity(patient.pid, self.roots)
        time.sleep(_GLANCE)
        patient.activity = process.activity(patient.pid, self.roots)
        if before is not None and patient.activity is not None:
            patient.busy = patient.activity.ticks > before.ticks
        threads = process.threads(patient.pid, self.roots)
        patient.alone = None if threads is None else threads == 1

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
        patient = self._patients.get(worker)
        if patient is not None:
            patient.cpu, patient.cpu_limit = cpu, cpu_limit
            patient.handlers, patient.group = handlers, group

    # -- before it is decided what comes next -----------------------------------------------

    def killed_for_memory(self, worker: int) -> bool:
        """Whether the kernel's counters allow that it killed this worker, which died of SIGKILL.
        Quick, and so less certain than the verdict."""
        kills = self._kills(self._patients.get(worker), self._dead_siblings())
        return bool(kills.machine if kills.group is None else kills.group)

    def stalled_on_inherited_lock(self, worker: int, stack: str) -> bool:
        """Whether the verdict on this stall will be `fork-lock-deadlock`."""
        patient = self._patients.get(worker)
        if patient is None:
            return False
        evidence = Evidence(
            stalled=True,
            sent_by_us=True,
            stack=thread_notes.split(stack)[1],
            start_method=self.start_method,
            threads_at_fork=patient.threads_at_fork,
            neighbours=patient.neighbours,
            activity=patient.activity,
            busy=patient.busy,
            alone=patient.alone,
        )
        return judge(evidence).cause == "fork-lock-deadlock"

    # -- when one is dead ------------------------------------------------------------------

    def receive(
        self,
        worker: int,
        *,
        kind: str,
        signal: str | None,
        exitcode: int | None,
        stack: str,
        errno: int | None = None,
        size: Size | None = None,
        **known: Any,
    ) -> Body:
        """A death, stall or failed start; `known` is what the pool knows about it.

        `size` is what the worker noted in its black box, more often than we measure.
        """
        patient = self._patients.pop(worker, None)
        notes, stack = thread_notes.split(stack)
        stalled = kind in ("stalled", "unkillable")
        ours = stalled or (patient is not None and patient.sent)
        evidence = Evidence(
            signal=signal,
            exitcode=exitcode,
            pid=None if patient is None else patient.pid,
            disappeared=kind == "killed" and signal is None,
            stalled=stalled,
            survived_sigkill=kind == "unkillable",
            siblings=self._dead_siblings(),
            sent_by_us=ours,
            born=errno is None,
            errno=errno,
            stack=stack,
            thread_notes=notes,
            start_method=self.start_method,
            threads_at_fork=self._threads if patient is None else patient.threads_at_fork,
            neighbours=patient.neighbours if patient is not None and stalled else (),
            **known,
        )
        if patient is not None:
            evidence = replace(
                evidence,
                activity=patient.activity,
                busy=patient.busy,
                alone=patient.alone,
                cpu_seconds=patient.cpu,
                cpu_limit=patient.cpu_limit,
                handlers=patient.handlers,
                worker_descriptors=patient.descriptors,
                worker_threads=patient.threads,
            )
            if size is None or size.at < patient.looked:
                evidence = replace(evidence, worker_bytes=patient.resident)
        if size is not None and evidence.worker_bytes is None:
            evidence = replace(
                evidence,
                worker_bytes=size.resident,
                worker_private=max(0, size.resident - size.shared),
            )
        return Body(self._signals(self._surroundings(evidence), patient), patient)

    def examine(self, body: Body) -> Examination:
        """The verdict. Call it for one death after the other, in the order they died: a counted
        kill that explains one death does not explain the next."""
        evidence = body.evidence
        if evidence.signal in _FROM_KERNEL and not evidence.sent_by_us:
            evidence = self._ask_kernel(evidence, body.patient)
        verdict = judge(evidence, self._here(), self._run())
        if verdict.cause == "oom-killed":
            self._explained.append(time.monotonic())
        return Examination(verdict, evidence)

    def _surroundings(self, evidence: Evidence) -> Evidence:
        confined = cgroup.confinement("self", self.roots)
        limits = process.limits("self", self.roots)
        return replace(
            evidence,
            memory=(*self._memory, self._measure()),
            shm=filesystem.fill(self.roots.shm),
            descriptors=process.descriptors("self", self.roots),
            descriptor_limit=None if limits is None else limits.files[0],
            threads=process.threads("self", self.roots),
            pids_current=confined.pids_current,
            pids_max=confined.pids_max,
            pids_refused=max(0, (confined.pids_refused or 0) - self._refused) or None,
            oom_group=confined.oom_group,
        )

    def _signals(self, evidence: Evidence, patient: _Patient | None) -> Evidence:
        """A signal to the whole process group: pending in the trainer, or seen by the nursery."""
        pending = process.pending_signals("self", self.roots)
        for number in _FOR_ALL:
            if number in pending:
                return replace(evidence, group_signal=signal_name(number))
        now = time.monotonic()
        got = {} if patient is None else {at: number for number, at in patient.group.items()}
        ago = now - max(got, default=-math.inf)
        if ago > _PATIENCE:
            return evidence
        last = signal_name(got[max(got)])
        return replace(evidence, group_signal=last, group_signal_ago=max(0.001, ago))

    def _ask_kernel(self, evidence: Evidence, patient: _Patient | None) -> Evidence:
        kills = self._kills(patient, evidence.siblings)
        # Running a command takes time: only if there is no other source.
        ask = evidence.signal == "SIGKILL" and kills.group is None and self.roots == HERE
        since = self._began if patient is None else patient.since
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

    def _kills(self, patient: _Patient | None, siblings: int) -> Kills:
        """How far the counters moved that count this worker. `siblings` is how many other workers
        were dead when it was received; some of them may have been received since."""
        now = time.monotonic()
        base = self._base(now)
        current = self._count(now, patient)
        used = sum(1 for at in tuple(self._explained) if at >= base.at)
        mine = [str(group.path) for group in (patient.groups if patient else self._own_groups)]
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
        # A copy, here and below: another thread may be appending.
        settled = [one for one in tuple(self._counters) if now - one.at >= _SETTLED]
        return settled[-1] if settled else self._counters[0]

    def _dead_siblings(self) -> int:
        """How many workers are dead but not reported to us yet."""
        return sum(
            bool(process.is_dead(patient.pid, self.roots))
            for patient in list(self._patients.values())
        )

    def _count(self, now: float, dead: _Patient | None = None) -> _Counters:
        chains = {self._own_groups, *(one.groups for one in list(self._patients.values()))}
        if dead is not None:
            chains.add(dead.groups)
        found: dict[str, int] = {}
        for chain in chains:
            found |= cgroup.kills_of(chain)
        return _Counters(now, found, process.machine_kills(self.roots))

    def _measure(self) -> MemorySample:
        trainer = process.size("self", self.roots)
        confined = cgroup.confinement("self", self.roots)
        machine = process.meminfo(self.roots)
        return MemorySample(
            time.time(),
            None if trainer is None else trainer.resident,
            {
                worker: patient.resident
                for worker, patient in self._patients.items()
                if patient.resident is not None
            },
            confined.memory_usage,
            confined.memory_limit,
            None if machine is None else machine.available,
            None if machine is None else machine.swap_free,
        )

    def _run(self) -> Run:
        book = None if self.logbook is None else self.logbook.given
        return Run(self.workers, os.getpid(), book, self.stall_timeout)

    def _here(self) -> Machine:
        if self._machine is None:
            self._machine = Machine.look(self.roots)
        return self._machine
