"""Threads of a worker that ended with an error, noted where its last stack will be.

Such a thread does no harm at once, but a sample that waits for it an hour later hangs. The note is
written where the `faulthandler` dump goes, in memory that survives the worker.
"""

from __future__ import annotations

import os
import threading

_MARK = "holdfast-note: "
_MAX_NOTES = 20  # of one worker, at most
_MAX_NOTE_BYTES = 300  # bytes


def install(fd: int) -> None:
    """Note the exceptions that end threads of this process; the previous hook runs as well."""
    before = threading.excepthook
    left = _MAX_NOTES

    def hook(args: threading.ExceptHookArgs) -> None:
        nonlocal left
        if left > 0:
            left -= 1
            name = args.thread.name if args.thread is not None else "unknown"
            words = f"thread {name!r} ended with {args.exc_type.__name__}: {args.exc_value}"
            line = _MARK + " ".join(words.split())
            os.write(fd, line.encode(errors="replace")[:_MAX_NOTE_BYTES] + b"\n")
        before(args)

    threading.excepthook = hook


def split(dump: str) -> tuple[tuple[str, ...], str]:
    """The notes of a dump, and the rest of it."""
    notes, rest = [], []
    for line in dump.splitlines():
        if line.startswith(_MARK):
            notes.append(line[len(_MARK) :])
        else:
            rest.append(line)
    return tuple(notes), "\n".join(rest).strip()
