"""Trainers in control groups: what one needs at rest, the limit that follows, and a run under it."""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.shortage.datasets import KINDS
from tests.support import warm
from tests.support.groups import MemoryGroup, memory_group
from tests.support.processes import kill

SHM = Path("/dev/shm")
PATIENCE = 90.0
ROOM = 0.5
"""Of what stock torch piles up: so much there is beyond what a run needs at rest. With the whole of
it torch would pass, with half of it it cannot; and what holdfast needs is a part of the room, not of
what piles up."""


@dataclass(frozen=True)
class Done:
    """How a run ended."""

    returncode: int
    stdout: str
    stderr: str
    kills: int  # for lack of memory
    left: list[str]  # of its files in /dev/shm; removed by now


def run(command: list[str], group: MemoryGroup) -> Done:
    """A Python command in that group, to its end, or until it is killed because it takes too long. All who were ever in
    the group are remembered, for what they leave in /dev/shm."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    seen: set[int] = set()
    deadline = time.monotonic() + PATIENCE
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = warm.with_torch().start(
            command, out=out.fileno(), err=err.fileno(), env=environment, before=group.joining()
        )
        while not process.ended(0.02):
            seen |= group.pids()
            if time.monotonic() > deadline:
                kill(process.pid)
        out.seek(0)
        err.seek(0)
        return Done(process.code(), out.read(), err.read(), group.kills(), _remove_files_of(seen))


def _remove_files_of(pids: set[int]) -> list[str]:
    """torch's memory files are named after the process that made them. When all who know of one
    are killed at once it is not removed."""
    left = [path for pid in pids for path in SHM.glob(f"torch_{pid}_*")]
    for path in left:
        path.unlink(missing_ok=True)
    return [path.name for path in left]


@functools.cache
def rest(kind: str) -> int:
    """Bytes that a run with the harmless form of a dataset needs."""
    with memory_group() as group:
        command = ["-m", "tests.shortage.trainer", "rest", kind, str(group.path)]
        done = run([*command, str(group.version)], group)
    assert done.returncode == 0, done.stderr
    return int(json.loads(done.stdout)["used"])


def limit_for(kind: str) -> int:
    return rest(kind) + int(ROOM * KINDS[kind].piles_up)
