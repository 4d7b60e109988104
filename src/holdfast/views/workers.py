"""Loader workers of any PyTorch program on this machine, ours and torch's, seen from outside.

Both kinds have the process name ``pt_data_worker``; ours have a black box that says what they are
doing. Worker threads, and actors of a Ray cluster, are in a file that their trainer writes
(`autopsy.worker_status`). Needs no permissions beyond those of their user: what cannot be read is
left out.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.autopsy.blackbox import NAME, NURSERY, Note, read_from_outside
from holdfast.autopsy.readers import HERE, Roots, procfs, text
from holdfast.autopsy.worker_status import STATUS_NAME, read_status

_WORKER = "pt_data_worker"
_TICKS = os.sysconf("SC_CLK_TCK")
SMAPS_TIME_SHARE = 0.01
"""The fraction of time that may be spent reading smaps, which takes long for large processes."""
USES = 10  # readings after which all descriptors of a process are looked at again


@dataclass(frozen=True)
class Memory:
    """Bytes: resident, private to the process, and shared with others."""

    resident: int
    private: int
    shared: int


@dataclass(frozen=True)
class Worker:
    """One worker, or a trainer, at one moment. None means unknown."""

    pid: int  # of a thread its number; of an actor the pid on its node; 0 if that is not known
    trainer: int
    ours: bool
    number: int | None
    state: str
    cpu: float | None  # of one core, since the last reading
    memory: Memory | None
    growth: float | None  # private bytes per second since it was first seen
    descriptors: int | None
    threads: int | None
    note: Note | None
    wchan: str | None
    command: str  # or where it is, if it is no process
    method: str = ""  # "thread" or "ray", if it is no process


@dataclass
class _Seen:
    """What is remembered of a process from one reading to the next."""

    started: str
    ticks: int
    at: float
    first: tuple[float, int] | None = None  # when, and its private bytes
    last: tuple[float, int] | None = None
    memory: Memory | None = None
    read_again: float = 0.0


@dataclass
class _Files:
    """The descriptors of a process, and those of them that are looked for."""

    entries: list[str]
    found: list[str]
    uses: int  # after which all are looked at again


class WorkerMonitor:
    """Reads all workers again and again; rates are differences between readings."""

    def __init__(
        self, pid: int | None = None, roots: Roots = HERE, share: float = SMAPS_TIME_SHARE
    ) -> None:
        self.pid = pid
        self.roots = roots
        self.share = share
        self._seen: dict[int, _Seen] = {}
        self._files: dict[tuple[int, str], _Files] = {}

    def refresh(self) -> list[Worker]:
        """The workers, grouped behind their trainers."""
        parents = dict(self._parents())
        workers = [pid for pid in parents if self._is_called(pid, _WORKER)]
        found = {pid: self._trainer_of(pid, parents) for pid in workers}
        if self.pid is not None:
            found = {
                pid: trainer
                for pid, trainer in found.items()
                if self.pid in (pid, *_upwards(pid, parents))
            }
        others = {
            trainer: some
            for trainer in parents
            if (self.pid is None or self.pid in (trainer, *_upwards(trainer, parents)))
            and (some := self._not_processes(trainer))
        }
        rows: list[Worker] = []
        for trainer in sorted({*found.values(), *others}):
            mine = sorted(pid for pid, its in found.items() if its == trainer)
            seen = [row for pid in mine if (row := self._row(pid, trainer)) is not None]
            seen += others.get(trainer, [])
            head = self._row(trainer, trainer)
            if seen and head is not None:
                rows += [replace(head, ours=seen[0].ours), *sorted(seen, key=_order)]
        self._seen = {pid: seen for pid, seen in self._seen.items() if pid in parents}
        self._files = {key: files for key, files in self._files.items() if key[0] in parents}
        return rows

    # -- which processes ----------------------------------------------------------------------

    def _parents(self) -> Iterator[tuple[int, int]]:
        for entry in os.listdir(self.roots.proc):
            fields = self._stat(int(entry)) if entry.isdigit() else None
            if fields is not None:
                yield int(entry), int(fields[1])

    def _is_called(self, pid: int, name: str) -> bool:
        return (text(self.roots.proc / str(pid) / "comm") or "").strip() == name

    def _trainer_of(self, pid: int, parents: dict[int, int]) -> int:
        """The process that uses the worker: its parent, or for ours the nursery's parent."""
        parent = parents[pid]
        return parents.get(parent, parent) if self._is_called(parent, NURSERY) else parent

    # -- what they are doing ------------------------------------------------------------------

    def _row(self, pid: int, trainer: int) -> Worker | None:
        fields = self._stat(pid)
        activity = procfs.activity(pid, self.roots)
        if fields is None or activity is None:
            return None
        now = time.monotonic()
        seen = self._seen.get(pid)
        if seen is None or seen.started != fields[19]:
            seen = self._seen[pid] = _Seen(fields[19], activity.ticks, now)
            cpu = None
        else:
            passed = now - seen.at
            cpu = (activity.ticks - seen.ticks) / _TICKS / passed if passed > 0 else None
            seen.ticks, seen.at = activity.ticks, now
        self._measure(pid, seen, now)
        known = self._blackbox(pid) if pid != trainer else None
        return Worker(
            pid=pid,
            trainer=trainer,
            ours=known is not None or self._is_called(int(fields[1]), NURSERY),
            number=known[0] if known else None,
            state=activity.state,
            cpu=cpu,
            memory=seen.memory,
            growth=_growth(seen),
            descriptors=procfs.descriptors(pid, self.roots),
            threads=procfs.threads(pid, self.roots),
            note=known[1] if known else None,
            wchan=activity.wchan,
            command=self._command(pid),
        )

    def _not_processes(self, trainer: int) -> list[Worker]:
        """The threads and actors that this process has written about."""
        rows: list[Worker] = []
        for path in self._descriptors(trainer, STATUS_NAME):
            method, workers = read_status(path, trainer) or ("", [])
            rows += [
                Worker(
                    pid=one.number or 0,
                    trainer=trainer,
                    ours=True,
                    number=one.worker,
                    state="",
                    cpu=None,
                    memory=None,
                    growth=None,
                    descriptors=None,
                    threads=None,
                    note=one.note,
                    wchan=None,
                    command=one.place,
                    method=method,
                )
                for one in workers
            ]
        return rows

    def _measure(self, pid: int, seen: _Seen, now: float) -> None:
        if now < seen.read_again:
            return
        begun = time.monotonic()
        sizes = procfs.rollup(pid, self.roots)
        cost = time.monotonic() - begun
        seen.read_again = now + cost / self.share
        if sizes is None:
            return
        private = sum(sizes.get(f"Private_{kind}", 0) for kind in ("Clean", "Dirty"))
        shared = sum(sizes.get(f"Shared_{kind}", 0) for kind in ("Clean", "Dirty"))
        seen.memory = Memory(sizes.get("Rss", 0), private, shared)
        seen.last = (now, private)
        if seen.first is None:
            seen.first = seen.last

    def _blackbox(self, pid: int) -> tuple[int, Note] | None:
        for path in self._descriptors(pid, NAME):
            try:
                found = read_from_outside(path, self._offset(pid, os.path.basename(path)))
            except OSError:
                continue  # closed meanwhile, or not permitted
            if found is not None:
                return found
        return None

    def _descriptors(self, pid: int, name: str) -> list[str]:
        """The files of a process whose name contains this, youngest first. All are looked at only
        if others are open than before, and now and then: a descriptor may have been used again."""
        folder = f"{self.roots.proc}/{pid}/fd"
        try:
            entries = os.listdir(folder)
        except OSError:
            return []
        known = self._files.get((pid, name))
        if known is None or known.entries != entries or not known.uses:
            known = self._files[pid, name] = _Files(entries, entries, USES)
        known.uses -= 1
        known.found = [entry for entry in known.found if name in _file(f"{folder}/{entry}")]
        return [f"{folder}/{entry}" for entry in sorted(known.found, key=int, reverse=True)]

    def _offset(self, pid: int, descriptor: str) -> int:
        written = text(self.roots.proc / str(pid) / "fdinfo" / descriptor) or ""
        match = re.search(r"^pos:\s+(\d+)", written, re.MULTILINE)
        return int(match[1]) if match else 0

    def _stat(self, pid: int) -> list[str] | None:
        fields = procfs.stat(pid, self.roots) or []
        return fields if len(fields) > 19 and fields[0] not in "ZX" else None

    def _command(self, pid: int) -> str:
        path: Path = self.roots.proc / str(pid) / "cmdline"
        return " ".join((text(path) or "").replace("\0", " ").split())  # -c may have newlines


def _file(descriptor: str) -> str:
    try:
        return os.readlink(descriptor)
    except OSError:  # closed meanwhile, or not permitted
        return ""


def _upwards(pid: int, parents: dict[int, int]) -> Iterator[int]:
    while (pid := parents.get(pid, 0)) > 0:
        yield pid


def _order(worker: Worker) -> tuple[int, int]:
    return (worker.number if worker.number is not None else 0, worker.pid)


def _growth(seen: _Seen) -> float | None:
    """Bytes per second between the first reading and the last; None with only one."""
    if seen.first is None or seen.last is None:
        return None
    passed = seen.last[0] - seen.first[0]
    return (seen.last[1] - seen.first[1]) / passed if passed >= 1 else None
