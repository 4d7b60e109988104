"""A `faulthandler` dump, cut down to what the user wrote."""

from __future__ import annotations

import traceback
from types import FrameType

from holdfast.code_origin import OURS, of_file


def dump_of(frame: FrameType | None, name: str) -> str:
    """The stack of a living thread with this name, as `faulthandler` would write it. None for a
    thread that has ended."""
    frames = [] if frame is None else reversed(traceback.extract_stack(frame))
    lines = [f'  File "{one.filename}", line {one.lineno} in {one.name}' for one in frames]
    return "\n".join((f"Thread {name} (most recent call first):", *lines))


def tidy(dump: str, ours: str = OURS) -> str:
    """Leave out the engine's own frames, their callers, and the list of extension modules.

    Frames come innermost first. In a forked worker the outer ones even belong to the trainer at the
    time of the fork; from our first frame on, nothing concerns the user.
    """
    kept: list[str] = []
    below_us = False
    for line in dump.splitlines():
        if line.startswith("  File "):
            below_us = below_us or line.startswith(f'  File "{ours}')
            if below_us:
                continue
        else:
            below_us = False
            if line.startswith("Extension modules:"):
                continue
        kept.append(line)
    return "\n".join(kept).strip()


def innermost(dump: str) -> str:
    """The innermost frame of the thread that got the signal, or "".

    A dump begins with the youngest thread, which is usually not the one that matters.
    """
    return next(iter(frames(dump)), "")


def users(dump: str) -> str:
    """The innermost frame of that thread that the user wrote, or ""."""
    return next((one for one in frames(dump) if of_file(file_of(one)) == "user"), "")


def file_of(frame: str) -> str:
    """The file that a line such as ``File "x.py", line 3 in f`` names."""
    return frame.split('"')[1]


def frames(dump: str) -> list[str]:
    """The frames of the thread that got the signal, innermost first."""
    _, marked, current = dump.partition("Current thread ")
    own = current.partition("\nThread ")[0] if marked else dump
    return [line.strip() for line in own.splitlines() if line.startswith('  File "')]
