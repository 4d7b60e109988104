"""Adding lines to a file so that a kill at any moment costs the line being written, and no other.

All of it goes in one write to a file opened for appending, so several processes may add to the same
one. A process that died in the middle of that leaves a line without an end; the next one to come
begins a new line, so that only the torn one is lost.
"""

from __future__ import annotations

import os

from holdfast import kernel

__all__ = ["append"]


def append(path: str | os.PathLike[str], lines: bytes, *, sync: bool = False) -> None:
    """Add whole lines, each with its end. Raises OSError if they are not all written; with `sync`,
    if they are not on the disk."""
    file = kernel.open_file(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            lines = b"\n" + lines  # somebody died while writing
        written = os.write(file, lines)
        if written != len(lines):
            raise OSError(f"only {written} of {len(lines)} bytes were written to {os.fspath(path)}")
        if sync:
            os.fsync(file)
    finally:
        os.close(file)
