"""Append lines to a file so that a kill at any moment costs only the line being written.

All lines go in one write to a file opened for appending, so several processes may append to the
same file. A process that dies in the middle of it leaves a line without a newline. The next writer
starts a new line, so that only the incomplete line is lost.
"""

from __future__ import annotations

import os
import time
from types import ModuleType

from holdfast import kernel

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None

LOCKS = fcntl is not None
"""Whether files can be locked on this platform."""


def append(path: str | os.PathLike[str], lines: bytes, *, sync: bool = False) -> None:
    """Append whole lines, each with its newline. Raises OSError if not all of them were written;
    with `sync`, also if they are not on the disk."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
    if fcntl is None:
        file = os.open(path, flags | getattr(os, "O_BINARY", 0))
    else:
        file = kernel.open_file(path, flags)
    try:
        _lock(file)
        size = os.fstat(file).st_size
        if size and os.lseek(file, size - 1, os.SEEK_SET) and os.read(file, 1) != b"\n":
            lines = b"\n" + lines  # the last writer died while writing
        written = os.write(file, lines)
        if written != len(lines):
            raise OSError(f"only {written} of {len(lines)} bytes were written to {os.fspath(path)}")
        if sync:
            os.fsync(file)
    finally:
        os.close(file)


def _lock(file: int) -> None:
    """Keep other writers out until the file is closed: one might die in the middle of a line after
    this one has looked at the end. After 50 ms, or where files cannot be locked, go on without."""
    for _ in range(50):
        try:
            lock(file)
            return
        except BlockingIOError:
            time.sleep(0.001)
        except OSError:
            return


def lock(file: int) -> None:
    """Lock a file, or raise BlockingIOError; another OSError where files cannot be locked."""
    if fcntl is None:
        raise OSError("no file locks on this platform")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def unlock(file: int) -> None:
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_UN)
