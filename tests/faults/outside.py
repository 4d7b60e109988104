"""What a test does to workers from outside: find them, kill them, freeze them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import alive, eventually, kill, parent

FREEZER = Path("/sys/fs/cgroup/freezer")


def pids(iterator: Any) -> list[int]:
    return [worker.pid for worker in iterator._workers]


def nursery(iterator: Any) -> int:
    """The process that all workers of an iterator are children of.

    A worker whose nursery has just died is for a moment a child of the process that
    adopts orphans, which is not ours: such a parent does not count.
    """
    found: set[int] = set()

    def one_parent_of_ours() -> bool:
        found.clear()
        for pid in pids(iterator):
            above = parent(pid)
            if above is None or parent(above) != os.getpid():
                return False
            found.add(above)
        return len(found) == 1

    assert eventually(one_parent_of_ours)
    return found.pop()


def kill_all(iterator: Any) -> None:
    """All workers of an iterator that live."""
    for pid in pids(iterator):
        try:
            kill(pid)
        except ProcessLookupError:
            pass  # it died a moment ago, and the loader has not noticed yet


def kill_and_see_it_dead(*victims: int) -> None:
    kill(*victims)
    assert eventually(lambda: not any(alive(pid) for pid in victims))


@contextmanager
def frozen() -> Iterator[Any]:
    """Gives a function that freezes a process: even SIGKILL does not end it, until thawed."""
    group = FREEZER / f"holdfast-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no freezer cgroup can be made here: {error}")
    state = group / "freezer.state"

    def freeze(pid: int) -> None:
        (group / "cgroup.procs").write_text(str(pid))
        state.write_text("FROZEN")
        assert eventually(lambda: state.read_text().strip() == "FROZEN")

    def thaw() -> None:
        state.write_text("THAWED")

    freeze.thaw = thaw  # type: ignore[attr-defined]
    try:
        yield freeze
    finally:
        thaw()
        assert eventually(lambda: not (group / "cgroup.procs").read_text().strip())
        group.rmdir()
