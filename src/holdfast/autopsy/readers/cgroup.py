"""What the control groups say: kills for lack of memory, limits, use, tasks.

Limits and kills count for a group and all below it, so a worker's own group is not enough: every
group up to the root is read. In v1 each controller has its own tree; in v2 there is one tree. A
container sees its own group at the mount's root, whatever the path in ``/proc/PID/cgroup`` says.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from holdfast.autopsy.readers import HERE, Roots, is_folder, number, text

_UNLIMITED = 1 << 60  # v1 writes a number near 2**63 for "no limit"


@dataclass(frozen=True)
class Group:
    """A control group's folder."""

    path: Path
    version: int  # 1 or 2


@dataclass(frozen=True)
class Confinement:
    """The tightest limits that apply to a process, from its group and all above."""

    path: str | None = None  # the process's own memory group
    memory_limit: int | None = None
    memory_usage: int | None = None  # of the group that has the limit
    oom_group: bool | None = None
    pids_max: int | None = None
    pids_current: int | None = None
    pids_refused: int | None = None  # how often a fork was refused since the group was made
    cpus: float | None = None


@dataclass(frozen=True)
class Room:
    """A memory limit, and how much of it is used, without files that the kernel would drop."""

    limit: int
    used: int


def groups(pid: int | str, controller: str, roots: Roots = HERE) -> tuple[Group, ...]:
    """The group of a process for one controller and all above it, innermost first."""
    written = text(f"{roots.proc}/{pid}/cgroup")
    if written is None:
        return ()
    unified: str | None = None
    own: str | None = None
    for line in written.splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        if controller in parts[1].split(","):
            own = parts[2]
        elif parts[0] == "0" and not parts[1]:
            unified = parts[2]
    if own is not None:
        return _upwards(_mount(roots, controller), own, 1)
    if unified is not None:
        return _upwards(_mount(roots, None), unified, 2)
    return ()


def kills(pid: int | str, roots: Roots = HERE) -> dict[str, int] | None:
    """`oom_kill` of the process's group and of all above, by path; None if nothing can be read."""
    return kills_of(groups(pid, "memory", roots)) or None


def kills_of(chain: tuple[Group, ...]) -> dict[str, int]:
    """`oom_kill` of those memory groups where it can be read, by path."""
    found: dict[str, int] = {}
    for group in chain:
        name = "memory.oom_control" if group.version == 1 else "memory.events"
        count = _field(group.path / name, "oom_kill")
        if count is not None:
            found[str(group.path)] = count
    return found


def confinement(pid: int | str, roots: Roots = HERE) -> Confinement:
    """The limits that apply to a process."""
    memory = groups(pid, "memory", roots)
    limit = usage = None
    for group in memory:
        allowed, used = _memory(group)
        if allowed is not None and (limit is None or allowed < limit):
            limit, usage = allowed, used
    flags = [number(group.path / "memory.oom.group") for group in memory if group.version == 2]
    known = [flag for flag in flags if flag is not None]
    tasks = _tasks(groups(pid, "pids", roots))
    return Confinement(
        path=str(memory[0].path) if memory else None,
        memory_limit=limit,
        memory_usage=usage,
        oom_group=any(known) if known else None,
        pids_max=tasks[0],
        pids_current=tasks[1],
        pids_refused=tasks[2],
        cpus=_quota(groups(pid, "cpu", roots)),
    )


def rooms(chain: tuple[Group, ...]) -> list[Room]:
    """The memory limits of a process's groups. Any of them may be the one with the least room: a
    group further up is shared with other processes."""
    found = []
    for group in chain:
        limit, used = _memory(group)
        if limit is None or used is None:
            continue
        total = "total_" if group.version == 1 else ""
        cached = (f"{total}active_file", f"{total}inactive_file")
        used -= sum(_fields(group.path / "memory.stat", cached))
        found.append(Room(limit, max(0, used)))
    return found


def _memory(group: Group) -> tuple[int | None, int | None]:
    """A group's limit and use; without a limit, None for both."""
    v1 = group.version == 1
    limit = number(group.path / ("memory.limit_in_bytes" if v1 else "memory.max"))
    if limit is None or limit >= _UNLIMITED:
        return None, None
    return limit, number(group.path / ("memory.usage_in_bytes" if v1 else "memory.current"))


def _tasks(chain: tuple[Group, ...]) -> tuple[int | None, int | None, int | None]:
    """Tightest `pids.max`, with its group's use and refusals."""
    limit = current = refused = None
    for group in chain:
        allowed = number(group.path / "pids.max")
        if allowed is None or (limit is not None and allowed >= limit):
            continue
        limit, current = allowed, number(group.path / "pids.current")
        refused = _field(group.path / "pids.events", "max")
    return limit, current, refused


def _quota(chain: tuple[Group, ...]) -> float | None:
    found = []
    for group in chain:
        if group.version == 2:
            quota, _, period = (text(group.path / "cpu.max") or "max").strip().partition(" ")
            if quota.isdigit() and period.isdigit() and int(period):
                found.append(int(quota) / int(period))
        else:
            allowed = number(group.path / "cpu.cfs_quota_us")
            length = number(group.path / "cpu.cfs_period_us")
            if allowed is not None and allowed > 0 and length:
                found.append(allowed / length)
    return min(found, default=None)


def _upwards(mount: tuple[Path, PurePosixPath], own: str, version: int) -> tuple[Group, ...]:
    """From the process's group to the mount's root, those that exist."""
    return tuple(group for group in _chain(*mount, own, version) if is_folder(group.path))


@functools.lru_cache(maxsize=64)  # making paths takes longer than reading the files
def _chain(top: Path, root: PurePosixPath, written: str, version: int) -> tuple[Group, ...]:
    own = PurePosixPath(written)
    inside = own.relative_to(root) if own.is_relative_to(root) else PurePosixPath()
    if own.is_absolute() and not own.is_relative_to(root):
        inside = own.relative_to("/")
    chain = [top / inside, *(top / parent for parent in inside.parents)]
    return tuple(Group(path, version) for path in dict.fromkeys(chain))


@functools.cache
def _mount(roots: Roots, controller: str | None) -> tuple[Path, PurePosixPath]:
    """Where a controller's tree (None: that of v2) is mounted, and which group is its root."""
    for place, root in _mounts(roots, controller):
        if is_folder(place):
            return place, root
    if controller is not None:
        return roots.cgroup / controller, PurePosixPath("/")
    return roots.cgroup, PurePosixPath("/")


def _mounts(roots: Roots, controller: str | None) -> Iterator[tuple[Path, PurePosixPath]]:
    for line in (text(roots.proc / "self" / "mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        wanted = "cgroup2" if controller is None else "cgroup"
        if kind[0] != wanted or (controller and controller not in kind[2].split(",")):
            continue
        place = PurePosixPath(fields[4])
        if place.is_relative_to("/sys/fs/cgroup"):
            yield roots.cgroup / place.relative_to("/sys/fs/cgroup"), PurePosixPath(fields[3])


def _field(path: Path, name: str) -> int | None:
    """A number in a file of lines "name number"."""
    return next(iter(_fields(path, (name,))), None)


def _fields(path: Path, names: tuple[str, ...]) -> list[int]:
    """Those of these numbers that the file has."""
    written = f"\n{text(path) or ''}\n"
    found = []
    for name in names:
        value = written.partition(f"\n{name} ")[2].partition("\n")[0].strip()
        if value.isdigit():
            found.append(int(value))
    return found
