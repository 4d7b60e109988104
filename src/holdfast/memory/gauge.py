"""What memory is left for us, in our control groups and on the machine.

The use of a control group counts files that the kernel has read and would drop at once; with those
every group that reads a dataset looks full. They are taken off. Memory files (our batches, and
/dev/shm) are not among them: nothing can drop those.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.autopsy.readers import HERE, Roots, cgroup, number, process

__all__ = ["Reading", "private", "ranks", "read"]


ENOUGH = 32 << 30


@dataclass(frozen=True)
class Reading:
    """How much may be used, how much of it is, and what happens beyond. None is unknown."""

    limit: int | None = None
    free: int | None = None
    confined: bool = False  # the limit is a control group's
    oom_group: bool = False  # the kernel kills all of the group at once

    @property
    def fill(self) -> float:
        """The part in use, from 0 to 1; 0 if nothing is known. On large machines a few GiB are
        enough to be far from the end, whatever part of the whole they are."""
        if not self.limit or self.free is None:
            return 0.0
        return min(1.0, max(0.0, 1 - self.free / min(self.limit, ENOUGH)))


def read(roots: Roots = HERE) -> Reading:
    """Wherever the least is left: one of our control groups, or the machine."""
    flags = [
        number(group.path / "memory.oom.group") for group in cgroup.groups("self", "memory", roots)
    ]
    oom_group = any(flags)
    found = [
        Reading(room.limit, max(0, room.limit - room.used), True, oom_group)
        for room in cgroup.rooms("self", roots)
    ]
    machine = process.meminfo(roots)
    if machine is not None:
        found.append(Reading(machine.total, machine.available, False, oom_group))
    return min(found, key=lambda one: one.free or 0, default=Reading(oom_group=oom_group))


def ranks(environment: Mapping[str, str] | None = None) -> int:
    """How many trainers share this machine, as launchers tell it."""
    environment = os.environ if environment is None else environment
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        value = environment.get(name, "")
        if value.isdigit() and int(value) > 0:
            return int(value)
    return 1


def private(pid: int | str, roots: Roots = HERE) -> int | None:
    """Bytes only this process has, without files and memory files. Costs 20 ms per GB."""
    found = process.rollup(pid, roots)
    if found is None:
        return None
    ours = found.get("Private_Clean", 0) + found.get("Private_Dirty", 0)
    return max(0, ours - found.get("Pss_Shmem", 0) - found.get("Pss_File", 0))
