"""Children of this process: who is there, and whether they all go away."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support import warm

# Helpers of Python's own that outlive any loader.
_PYTHONS_OWN = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")


def children(pid: int | None = None) -> set[int]:
    """Living children of `pid` (default: this process); zombies, Python's own helpers and the
    processes from which our tests fork their commands left out."""
    found = set()
    tasks = Path(f"/proc/{pid or os.getpid()}/task")
    try:
        names = os.listdir(tasks)
    except OSError:  # it has just gone, and so has no children
        names = []
    for name in names:
        with contextlib.suppress(OSError):
            found |= {int(child) for child in (tasks / name / "children").read_text().split()}
    return {child for child in found - warm.standing if _is_a_worker(child)}


def descendants(pid: int | None = None) -> set[int]:
    found = children(pid)
    for child in tuple(found):
        found |= descendants(child)
    return found


def alive(pid: int) -> bool:
    """Running, and not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] not in "ZX"


def _is_a_worker(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return alive(pid) and not any(name in command for name in _PYTHONS_OWN)


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether `condition` comes true within that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@contextlib.contextmanager
def nobody_left_behind(seconds: float = 20.0) -> Iterator[None]:
    """The block may start processes, but all of them must be gone soon after it."""
    before = descendants()
    yield
    if not eventually(lambda: descendants() <= before, seconds):
        left = descendants() - before
        names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in left}
        raise AssertionError(f"processes left behind: {names}")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())
