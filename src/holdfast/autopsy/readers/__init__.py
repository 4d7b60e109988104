"""Readers of system files: each takes its root as an argument and never fails.

What cannot be read is ``None``: in a container, without permissions, in a namespace without
``/sys`` there is less evidence, and the verdict is less certain. That is not an error.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Roots:
    """Where the system's files are; tests make up their own."""

    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")
    kmsg: Path = Path("/dev/kmsg")
    shm: Path = Path("/dev/shm")


HERE = Roots()
_CHUNK_BYTES = 64 << 10


def is_folder(path: Path) -> bool:
    return os.path.isdir(path)  # unlike Path.is_dir, does not raise without permission


def text(path: Path | str) -> str | None:
    """The content of a small file, if it is there and may be read. Many are read while a batch is
    waited for, and Python's own file objects would take twice as long."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        parts = [os.read(fd, _CHUNK_BYTES)]
        while parts[-1]:
            parts.append(os.read(fd, _CHUNK_BYTES))
    except OSError:
        return None
    finally:
        os.close(fd)
    return b"".join(parts).decode(errors="replace")


def number(path: Path | str) -> int | None:
    """The one number in a file; None also for "max" and the like."""
    try:
        return int((text(path) or "").strip())
    except ValueError:
        return None
