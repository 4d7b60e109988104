"""The threads beside the one that forks: what they do is not in the copy, what they hold is.

Their frames are not walked from Python. They run on whenever the walk pauses, and may end: to ask
a frame of an ended thread for its caller has crashed the interpreter. `faulthandler` writes all
stacks down in one go, while nobody else can run.
"""

from __future__ import annotations

import faulthandler
import os
import re
import threading

from holdfast import kernel
from holdfast.autopsy.evidence import Neighbour

__all__ = ["neighbours"]

FRAMES, THREADS = 20, 20
ENOUGH = 1 << 20  # bytes of all stacks
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = '  File "'


def neighbours() -> tuple[Neighbour, ...]:
    """The threads of Python's that run beside this one, but for our own, and where they are."""
    here = threading.get_ident()
    names = {
        thread.ident: thread.name
        for thread in threading.enumerate()
        if thread.ident not in (None, here) and not thread.name.startswith("holdfast-")
    }
    if not names:
        return ()
    stacks = _stacks(_dump())
    found = [Neighbour(name, stacks.get(ident or 0, ())) for ident, name in names.items()]
    return tuple(found[:THREADS])


def _stacks(dump: str) -> dict[int, tuple[str, ...]]:
    """The frames of each thread, innermost first."""
    found: dict[int, list[str]] = {}
    frames: list[str] = []
    for line in dump.splitlines():
        thread = _THREAD.match(line)
        if thread is not None:
            frames = found.setdefault(int(thread[1], 16), [])
        elif line.startswith(_FRAME) and len(frames) < FRAMES:
            frames.append(line.strip())
    return {ident: tuple(frames) for ident, frames in found.items()}


def _dump() -> str:
    """All stacks as `faulthandler` writes them; "" if there is no descriptor left to write to."""
    try:
        fd = kernel.memory_file("holdfast-threads")
    except OSError:
        return ""
    try:
        faulthandler.dump_traceback(fd, all_threads=True)
        return os.pread(fd, ENOUGH, 0).decode(errors="replace")
    finally:
        os.close(fd)
