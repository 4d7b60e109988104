"""What /proc says about one process and about the machine, and how full a file system is.

A zombie has no memory and no descriptors, and a reaped process has no entry at all. So a worker's
size must be read while it lives.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from holdfast.autopsy.readers import HERE, Roots, is_folder, number, text

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
_FIRST_NAMESPACE = "pid:[4026531836]"  # a constant of the kernel
# Compiled before the fork: every worker needs the first, and every nursery the second.
_DATA = re.compile(r"^VmData:\s+(\d+) kB$", re.MULTILINE)
_CAUGHT = re.compile(r"^SigCgt:\s+([0-9a-f]+)$", re.MULTILINE)


@dataclass(frozen=True)
class Activity:
    """What a process was doing at one moment."""

    state: str  # R, S, D, T, t, Z … as ps shows it
    wchan: str | None  # the kernel function it sleeps in
    ticks: int  # CPU time used so far, in clock ticks


@dataclass(frozen=True)
class Size:
    """Bytes of a process's memory; shared memory is counted in full."""

    resident: int
    shared: int

    @property
    def private(self) -> int:
        return max(0, self.resident - self.shared)


@dataclass(frozen=True)
class Meminfo:
    """The machine's memory, in bytes."""

    total: int
    available: int
    swap_total: int
    swap_free: int


@dataclass(frozen=True)
class Limits:
    """Soft and hard limits of a process; None is unlimited."""

    files: tuple[int | None, int | None]
    processes: tuple[int | None, int | None]


def activity(pid: int | str, roots: Roots = HERE) -> Activity | None:
    fields = stat(pid, roots)
    if fields is None:
        return None
    wchan = (text(f"{roots.proc}/{pid}/wchan") or "").strip()
    return Activity(
        fields[0], wchan if wchan not in ("", "0") else None, int(fields[11]) + int(fields[12])
    )


def is_dead(pid: int | str, roots: Roots = HERE) -> bool | None:
    """Whether it is a zombie or gone; None if there is no /proc."""
    fields = stat(pid, roots)
    if fields is not None:
        return fields[0] in "ZX"
    return True if is_folder(roots.proc / "self") else None


def size(pid: int | str, roots: Roots = HERE) -> Size | None:
    fields = (text(f"{roots.proc}/{pid}/statm") or "").split()
    if len(fields) < 3 or not all(field.isdigit() for field in fields[:3]) or fields[0] == "0":
        return None
    return Size(int(fields[1]) * _PAGE, int(fields[2]) * _PAGE)


def data(pid: int | str, roots: Roots = HERE) -> int | None:
    """VmData, which RLIMIT_DATA limits: all private memory that can be written."""
    match = _DATA.search(_status(pid, roots))
    return int(match[1]) << 10 if match else None


def rollup(pid: int | str, roots: Roots = HERE) -> dict[str, int] | None:
    """A process's memory, private and shared, in bytes. Slow: the kernel walks all its pages."""
    written = text(f"{roots.proc}/{pid}/smaps_rollup")
    if not written:
        return None
    return {
        name: int(value) << 10
        for name, value in re.findall(r"^(\w+):\s+(\d+) kB$", written, re.MULTILINE)
    }


def meminfo(roots: Roots = HERE) -> Meminfo | None:
    fields = dict(
        re.findall(r"^(\w+):\s+(\d+) kB", text(roots.proc / "meminfo") or "", re.MULTILINE)
    )
    try:
        return Meminfo(
            *(
                int(fields[name]) << 10
                for name in ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree")
            )
        )
    except KeyError:
        return None


def machine_kills(roots: Roots = HERE) -> int | None:
    """How many processes the kernel has killed for memory since it started, in all groups."""
    match = re.search(r"^oom_kill (\d+)$", text(roots.proc / "vmstat") or "", re.MULTILINE)
    return int(match[1]) if match else None


def descriptors(pid: int | str, roots: Roots = HERE) -> int | None:
    """How many file descriptors a process has open."""
    try:
        return len(os.listdir(roots.proc / str(pid) / "fd"))
    except OSError:
        return None


def threads(pid: int | str, roots: Roots = HERE) -> int | None:
    match = re.search(r"^Threads:\s+(\d+)$", _status(pid, roots), re.MULTILINE)
    return int(match[1]) if match else None


def tasks(pid: int | str, roots: Roots = HERE) -> list[int]:
    """The threads of a process; empty if it is gone."""
    try:
        return [int(name) for name in os.listdir(roots.proc / str(pid) / "task")]
    except OSError:
        return []


def scheduled(pid: int | str, task: int, roots: Roots = HERE) -> tuple[float, float]:
    """Seconds in which a thread has run, and in which it was ready to run and had no processor."""
    fields = (text(f"{roots.proc}/{pid}/task/{task}/schedstat") or "").split()
    if len(fields) >= 2 and fields[0].isdigit() and fields[1].isdigit():
        return int(fields[0]) / 1e9, int(fields[1]) / 1e9
    found = stat(f"{pid}/task/{task}", roots)  # a kernel without that
    return (0.0, 0.0) if found is None else ((int(found[11]) + int(found[12])) / _TICKS, 0.0)


def pending_signals(pid: int | str, roots: Roots = HERE) -> frozenset[int]:
    """Signals that wait to be delivered to a process."""
    masks = re.findall(r"^(?:SigPnd|ShdPnd):\s+([0-9a-f]+)$", _status(pid, roots), re.MULTILINE)
    return frozenset().union(*map(_signals, masks))


def caught_signals(pid: int | str, roots: Roots = HERE) -> frozenset[int] | None:
    """Signals a process has handlers for. A zombie still has them."""
    match = _CAUGHT.search(_status(pid, roots))
    return None if match is None else _signals(match[1])


def _signals(mask: str) -> frozenset[int]:
    bits = int(mask, 16)
    return frozenset(bit + 1 for bit in range(64) if bits >> bit & 1)


def limits(pid: int | str, roots: Roots = HERE) -> Limits | None:
    written = text(f"{roots.proc}/{pid}/limits")
    if written is None:
        return None

    def row(name: str) -> tuple[int | None, int | None]:
        match = re.search(rf"^{name}\s+(\S+)\s+(\S+)", written, re.MULTILINE)
        values = match.groups() if match else ("", "")
        return tuple(int(value) if value.isdigit() else None for value in values)  # type: ignore[return-value]

    return Limits(row("Max open files"), row("Max processes"))


def in_first_namespace(roots: Roots = HERE) -> bool:
    """Whether our pids are those of the kernel's log; in most containers they are not."""
    try:
        return os.readlink(roots.proc / "self" / "ns" / "pid") == _FIRST_NAMESPACE
    except OSError:
        return False


def setting(name: str, roots: Roots = HERE) -> int | None:
    """A number under /proc/sys."""
    return number(roots.proc / "sys" / Path(name))


def stat(pid: int | str, roots: Roots = HERE) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on, without pid and name."""
    written = text(f"{roots.proc}/{pid}/stat")
    if written is None or ")" not in written:
        return None
    fields = written.rpartition(")")[2].split()  # the name may contain anything, also parentheses
    return fields if len(fields) > 12 else None


def _status(pid: int | str, roots: Roots) -> str:
    return text(f"{roots.proc}/{pid}/status") or ""


@dataclass(frozen=True)
class Fill:
    """Bytes of a file system."""

    total: int
    free: int

    @property
    def nearly_full(self) -> bool:
        return self.free < max(self.total // 100, 1 << 20)


def fill(path: Path) -> Fill | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return Fill(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)
