"""Threads of a worker that ended with an error, noted where its last stack will be.

Such a thread harms nobody at once; the sample that waits for it an hour later does. The note goes
to the place of the `faulthandler` dump, in memory that survives the worker.
"""

from __future__ import annotations

import os
import threading

__all__ = ["install", "split"]

_MARK = "holdfast-note: "
_NOTES = 20  # of one worker, at most
_LONGEST = 300  # bytes


def install(fd: int) -> None:
    """Note what ends threads of this process; what was done about it before still is."""
    before = threading.excepthook
    left = _NOTES

    def hook(args: threading.ExceptHookArgs) -> None:
        nonlocal left
        if left > 0:
            left -= 1
            name = args.thread.name if args.thread is not None else "unknown"
            words = f"thread {name!r} ended with {args.exc_type.__name__}: {args.exc_value}"
            line = _MARK + " ".join(words.split())
            os.write(fd, line.encode(errors="replace")[:_LONGEST] + b"\n")
        before(args)

    threading.excepthook = hook


def split(dump: str) -> tuple[tuple[str, ...], str]:
    """The notes, and what else stands in a dump."""
    notes, rest = [], []
    for line in dump.splitlines():
        if line.startswith(_MARK):
            notes.append(line[len(_MARK) :])
        else:
            rest.append(line)
    return tuple(notes), "\n".join(rest).strip()
