"""Children of this process: who is there, and whether they all go away."""

from __future__ import annotations

import contextlib
import os
import signal
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


def kill(*victims: int | None, number: int = signal.SIGKILL) -> None:
    """Signal processes, but only such as we started. Raises ProcessLookupError for one that is gone, or is not one of
    ours (any more)."""
    for pid in victims:
        if pid is None:
            raise ProcessLookupError("it is being replaced")
        if not signal_if(pid, is_ours, number):
            raise ProcessLookupError(f"{pid} is no descendant of this process")


def signal_if(pid: int, meant: Callable[[int], bool], number: int = signal.SIGKILL) -> bool:
    """Signal this process if `meant` says that it is the one; whether it was.

    A pid may have been given to another process since it was read. So a pidfd is opened first: `meant` then looks at
    the process that the signal reaches.
    """
    handle = os.pidfd_open(pid)
    try:
        if not meant(pid):
            return False
        signal.pidfd_send_signal(handle, number)
        return True
    finally:
        os.close(handle)


def in_session(leader: int) -> Callable[[int], bool]:
    """For `signal_if`: whether a process belongs to the session of that process."""
    return lambda pid: os.getsid(pid) == leader


def is_ours(pid: int) -> bool:
    """Whether it is a descendant of this process."""
    above = parent(pid)
    while above is not None and above > 1:
        if above == os.getpid():
            return True
        above = parent(above)
    return False


def parent(pid: int) -> int | None:
    """None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rsplit(")", 1)[1].split()[1])


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
def no_process_left_behind(seconds: float = 20.0) -> Iterator[None]:
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
