"""How much memory is free for us, in our control groups and on the machine.

A control group's usage includes cached files, which the kernel drops when it needs the memory. With
them every group that reads a dataset looks full, so they are subtracted. Memory files (our batches,
and /dev/shm) are not subtracted: the kernel cannot drop them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast import loader_identity
from holdfast.autopsy.readers import HERE, Roots, cgroup, number, procfs

ENOUGH = 32 << 30


@dataclass(frozen=True)
class MemoryReading:
    """How much memory may be used, and how much of that is free. None is unknown."""

    limit: int | None = None
    free: int | None = None
    confined: bool = False  # the limit is a control group's
    oom_group: bool = False  # the kernel kills all of the group at once

    @property
    def fill(self) -> float:
        """The part in use, from 0 to 1; 0 if nothing is known. Limits above `ENOUGH` count as
        `ENOUGH`: on a large machine some free GiB suffice, however small a part they are."""
        if not self.limit or self.free is None:
            return 0.0
        return min(1.0, max(0.0, 1 - self.free / min(self.limit, ENOUGH)))


def read(roots: Roots = HERE) -> MemoryReading:
    """The reading of the control group, or of the machine, that has the least free memory."""
    groups = cgroup.groups("self", "memory", roots)
    # The first version of control groups has no such file.
    oom_group = any(number(one.path / "memory.oom.group") for one in groups if one.version == 2)
    found = [
        MemoryReading(room.limit, max(0, room.limit - room.used), True, oom_group)
        for room in cgroup.rooms(groups)
    ]
    machine = procfs.meminfo(roots)
    if machine is not None:
        found.append(MemoryReading(machine.total, machine.available, False, oom_group))
    return min(found, key=lambda one: one.free or 0, default=MemoryReading(oom_group=oom_group))


_LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",  # torchrun, and what is built on it
    "OMPI_COMM_WORLD_LOCAL_SIZE",  # mpirun
    "LOCAL_SIZE",  # DeepSpeed's launcher
    "SLURM_NTASKS_PER_NODE",
)
_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")


def ranks(environment: Mapping[str, str] | None = None) -> int:
    """How many trainers share this machine, from the variables that launchers set."""
    found = os.environ if environment is None else environment
    for name in _LOCAL_SIZES:
        value = found.get(name, "")
        if value.isdigit() and int(value) > 0:
            return int(value)
    tasks = re.findall(r"(\d+)(?:\(|,|$)", found.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if tasks:  # "4(x2),3": on the fullest of the machines
        return max(map(int, tasks))
    if found.get("MASTER_ADDR") in _THIS_MACHINE:  # so all ranks are here: Lightning's launcher
        return loader_identity.rank(environment).of or 1
    return 1


def private(pid: int | str, roots: Roots = HERE) -> int | None:
    """Private bytes of a process, without files and memory files. Takes 20 ms per GB."""
    found = procfs.rollup(pid, roots)
    if found is None:
        return None
    # What is private and clean is files. `Pss_File` cannot be subtracted: it is a part of what many
    # processes share too, tens of megabytes with the CUDA builds of torch.
    written = found.get("Private_Dirty", 0)
    return max(0, min(written - found.get("Pss_Shmem", 0), found.get("Pss_Anon", written)))
