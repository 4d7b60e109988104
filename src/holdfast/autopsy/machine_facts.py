"""The machine we run on: the figures that remedies name."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from holdfast import kernel
from holdfast.autopsy.readers import HERE, Roots, cgroup, procfs

PLACEHOLDERS: dict[str, str] = {
    "cgroup_path": "/sys/fs/cgroup/YOUR_GROUP",
    "cpus": "CPUS",
    "fewer_workers": "FEWER",
    "logbook": "LOGBOOK",
    "max_map_count": "65530",
    "memory_available": "what `free -h` shows",
    "memory_limit": "what your limit is",
    "memory_total": "what `free -h` shows",
    "memory_wanted": "MORE",
    "nofile_hard": "$(ulimit -Hn)",
    "nofile_soft": "what `ulimit -n` shows",
    "nofile_wanted": "$(ulimit -Hn)",
    "nproc_hard": "$(ulimit -Hu)",
    "nproc_soft": "what `ulimit -u` shows",
    "nproc_wanted": "$(ulimit -Hu)",
    "overcommit": "0, 1 or 2",
    "pid": "PID",
    "pids_max": "what pids.max says",
    "sample": "INDEX",
    "shm_free": "what `df` shows",
    "shm_total": "what `df` shows",
    "shm_wanted": "8",
    "stall_later": "1800",
    "stall_sooner": "60",
    "swap_total": "what `free -h` shows",
    "trainer": "TRAINERS_PID",
}
"""Every name a remedy may use, as the docs show it."""

_GIB = 1 << 30


@dataclass(frozen=True)
class MachineFacts:
    """What matters for data loading. None means unknown or unlimited."""

    place: str = ""  # docker, kubernetes or slurm; empty if none of these
    cpus: int | None = None
    memory: procfs.Meminfo | None = None
    memory_limit: int | None = None
    cgroup_path: str | None = None
    oom_group: bool | None = None
    shm: procfs.Fill | None = None
    limits: procfs.Limits | None = None
    pids_max: int | None = None
    max_map_count: int | None = None
    overcommit: int | None = None
    kernel: str = ""
    python: str = ""

    @classmethod
    def read(
        cls, roots: Roots = HERE, environment: Mapping[str, str] | None = None
    ) -> MachineFacts:
        confined = cgroup.confinement("self", roots)
        return cls(
            place=_place(os.environ if environment is None else environment, roots),
            cpus=_cpus(confined.cpus),
            memory=procfs.meminfo(roots),
            memory_limit=confined.memory_limit,
            cgroup_path=confined.path,
            oom_group=confined.oom_group,
            shm=procfs.fill(roots.shm),
            limits=procfs.limits("self", roots),
            pids_max=confined.pids_max,
            max_map_count=procfs.setting("vm/max_map_count", roots),
            overcommit=procfs.setting("vm/overcommit_memory", roots),
            kernel=platform.release(),
            python=platform.python_version(),
        )

    def facts(self, *, workers: int | None = None, **more: object) -> dict[str, str]:
        """The values for a remedy's names; what is unknown stays a placeholder."""
        known: dict[str, object] = {"cpus": self.cpus, "cgroup_path": self.cgroup_path}
        known["max_map_count"], known["overcommit"] = self.max_map_count, self.overcommit
        if self.memory is not None:
            known["memory_total"] = in_words(self.memory.total)
            known["memory_available"] = in_words(self.memory.available)
            known["swap_total"] = in_words(self.memory.swap_total)
            limit = min(self.memory_limit or self.memory.total, self.memory.total)
            known["memory_wanted"] = _more(limit)
        if self.memory_limit is not None:
            known["memory_limit"] = in_words(self.memory_limit)
        elif self.cgroup_path is not None:
            known["memory_limit"] = "none"
        if self.shm is not None:
            known["shm_total"], known["shm_free"] = (
                in_words(self.shm.total),
                in_words(self.shm.free),
            )
            known["shm_wanted"] = max(8, _more(self.shm.total))
        if self.limits is not None:
            for name, pair in (("nofile", self.limits.files), ("nproc", self.limits.processes)):
                for kind, value in zip(("soft", "hard"), pair, strict=True):
                    known[f"{name}_{kind}"] = "unlimited" if value is None else value
                known[f"{name}_wanted"] = _raised(*pair)
        known["pids_max"] = self.pids_max
        if workers is not None:
            known["fewer_workers"] = max(1, workers // 2)
        elif self.cpus is not None:
            known["fewer_workers"] = max(1, self.cpus // 2)
        given = {**known, **more}
        return PLACEHOLDERS | {
            name: str(value) for name, value in given.items() if value is not None
        }

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def in_words(count: int) -> str:
    """A number of bytes for people: "64 MiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if size >= 10 or unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _more(limit: int) -> int:
    """Half as much again, in whole GiB."""
    return max(1, -(-limit * 3 // (2 * _GIB)))


def _raised(soft: int | None, hard: int | None) -> int | str:
    """The hard limit; twice as much if the soft limit is there already, which needs root."""
    if hard is None:
        return "unlimited"
    return 2 * hard if soft == hard else hard


def _cpus(quota: float | None) -> int | None:
    allowed = kernel.cores()
    return max(1, min(allowed, int(quota))) if quota else allowed


def _place(environment: Mapping[str, str], roots: Roots) -> str:
    if "KUBERNETES_SERVICE_HOST" in environment:
        return "kubernetes"
    if "SLURM_JOB_ID" in environment:
        return "slurm"
    if os.path.exists(roots.proc / "self" / "root" / ".dockerenv"):
        return "docker"
    return ""
