"""The trainer's other threads at a fork: the child lacks them, but has the locks they hold.

Their frames are not walked from Python. Those threads keep running meanwhile and may end, and
asking a frame of an ended thread for its caller has crashed the interpreter. `faulthandler` writes
all stacks in one go, while no other thread can run.
"""

from __future__ import annotations

import faulthandler
import os
import re
import threading

from holdfast import kernel
from holdfast.autopsy.evidence import TrainerThread

MAX_FRAMES, MAX_THREADS = 20, 20
MAX_DUMP_BYTES = 1 << 20  # bytes of all stacks
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = '  File "'


def other_threads() -> tuple[TrainerThread, ...]:
    """The other Python threads of this process, without our own, and where they are."""
    here = threading.get_ident()
    names = {
        thread.ident: thread.name
        for thread in threading.enumerate()
        if thread.ident not in (None, here) and not thread.name.startswith("holdfast-")
    }
    if not names:
        return ()
    stacks = _stacks(_dump())
    found = [TrainerThread(name, stacks.get(ident or 0, ())) for ident, name in names.items()]
    return tuple(found[:MAX_THREADS])


def _stacks(dump: str) -> dict[int, tuple[str, ...]]:
    """The frames of each thread, innermost first."""
    found: dict[int, list[str]] = {}
    frames: list[str] = []
    for line in dump.splitlines():
        thread = _THREAD.match(line)
        if thread is not None:
            frames = found.setdefault(int(thread[1], 16), [])
        elif line.startswith(_FRAME) and len(frames) < MAX_FRAMES:
            frames.append(line.strip())
    return {ident: tuple(frames) for ident, frames in found.items()}


def _dump() -> str:
    """All stacks as `faulthandler` writes them; "" if no file descriptor is left for it."""
    try:
        fd = kernel.memory_file("holdfast-threads")
    except OSError:
        return ""
    try:
        faulthandler.dump_traceback(fd, all_threads=True)
        return os.pread(fd, MAX_DUMP_BYTES, 0).decode(errors="replace")
    finally:
        os.close(fd)
