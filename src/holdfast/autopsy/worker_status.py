"""What workers are doing that are no processes of this machine, for other programs to read.

A worker process has its black box, which `holdfast top` finds through the process. Threads and
actors of a Ray cluster have none. So the trainer writes what it knows about them into a memory
file without a name, a few times per second at most, and `holdfast top` finds that file among the
trainer's descriptors. What the reader gets is either a whole text or none.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable
from typing import NamedTuple

from holdfast import kernel
from holdfast.autopsy.blackbox import Note

STATUS_NAME = "holdfast-worker-status"
EVERY = 0.5  # seconds between two writes, at least
LARGEST = 1 << 20  # bytes


class WorkerStatus(NamedTuple):
    """One worker."""

    worker: int
    number: int | None  # its pid on its machine, or the kernel's number of its thread
    place: str
    note: Note


class StatusFile:
    """The trainer's side. A run goes on without it."""

    def __init__(self, method: str) -> None:
        self._method = method
        self._next = 0.0
        self._size = 0
        self._fd: int | None = None
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                self._fd = kernel.memory_file(STATUS_NAME)

    def due(self, now: float) -> bool:
        return self._fd is not None and now >= self._next

    def write(self, rows: Iterable[WorkerStatus], now: float) -> None:
        self._next = now + EVERY
        if self._fd is None:
            return
        said = {"trainer": os.getpid(), "method": self._method, "workers": list(rows)}
        text = json.dumps(said).encode()
        self._size = max(self._size, len(text))
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, text.ljust(self._size), 0)  # spaces over the rest of a longer one

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def read_status(path: str, trainer: int) -> tuple[str, list[WorkerStatus]] | None:
    """The method and the workers, from the file of this trainer; None if it is being written, or is
    that of a process which `trainer` was forked from."""
    try:
        with open(path, "rb") as file:
            said = json.loads(file.read(LARGEST))
        if said["trainer"] != trainer:
            return None
        rows = [
            WorkerStatus(worker, number, place, Note(*note))
            for worker, number, place, note in said["workers"]
        ]
        return said["method"], rows
    except (OSError, ValueError, TypeError, KeyError):
        return None
