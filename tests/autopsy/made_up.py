"""Made-up /proc and cgroup trees."""

from __future__ import annotations

from pathlib import Path

from holdfast.autopsy.readers import Roots

MOUNTS_V1 = """\
30 20 0:26 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
31 20 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
32 20 0:28 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
33 20 0:29 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
MOUNTS_V2 = "30 20 0:26 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"
MEMINFO = """\
MemTotal:       16000000 kB
MemFree:          100000 kB
MemAvailable:    2000000 kB
SwapTotal:       4000000 kB
SwapFree:        1000000 kB
"""
LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max processes             1000                 unlimited            processes
Max open files            1024                 4096                 files
"""


class Tree:
    """A system that says what it is told to."""

    def __init__(self, folder: Path) -> None:
        self.roots = Roots(folder / "proc", folder / "cgroup", folder / "kmsg", folder / "shm")
        self.roots.shm.mkdir(parents=True)
        (self.roots.proc / "self" / "ns").mkdir(parents=True)
        (self.roots.proc / "self" / "ns" / "pid").symlink_to("pid:[4026531836]")

    def proc(self, name: str, content: str) -> None:
        _write(self.roots.proc / name, content)

    def cgroup(self, name: str, content: str) -> None:
        _write(self.roots.cgroup / name, content)

    def process(
        self,
        pid: int | str,
        *,
        state: str = "S",
        ticks: int = 0,
        wchan: str = "0",
        pages: int = 1000,
        pending: int = 0,
        caught: int = 0,
    ) -> None:
        head = f"{pid if isinstance(pid, int) else 1} (odd) name) {state} 1"
        self.proc(f"{pid}/stat", f"{head} {' '.join(['0'] * 9)} {ticks} 0 0 0 20 0 1")
        self.proc(f"{pid}/wchan", wchan)
        self.proc(f"{pid}/statm", f"{pages * 2} {pages} {pages // 4} 1 0 1 0")
        self.proc(
            f"{pid}/status",
            f"Name:\tx\nThreads:\t3\nSigPnd:\t{0:016x}\nShdPnd:\t{pending:016x}\n"
            f"SigCgt:\t{caught:016x}\n",
        )
        self.proc(f"{pid}/limits", LIMITS)

    def v1(self, pid: int | str, path: str) -> None:
        self.proc("self/mountinfo", MOUNTS_V1)
        self.proc(f"{pid}/cgroup", f"4:memory:{path}\n3:cpu,cpuacct:{path}\n2:pids:{path}\n0::/\n")

    def v2(self, pid: int | str, path: str) -> None:
        self.proc("self/mountinfo", MOUNTS_V2)
        self.proc(f"{pid}/cgroup", f"0::{path}\n")


def _write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
