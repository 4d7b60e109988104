"""Error and warning texts with what may differ between two equal runs taken out."""

from __future__ import annotations

import os
import re

import torch

_LOADER_CODE = (
    os.path.join(os.path.dirname(torch.__file__), "utils", "data") + os.sep,
    f"{os.sep}holdfast{os.sep}",
)
_FORK = re.compile(
    r"^(?!.*/holdfast/).*: DeprecationWarning: This process \(pid=\d+\) is multi-threaded, use of fork\(\) may lead to "
    r"deadlocks in the child\.\n(  .*\n)?",
    re.MULTILINE,
)
_FRAME = re.compile(r'^ +(\| +)?File "(?P<file>[^"]+)", line \d+, in ')


def without_loader_frames(text: str) -> str:
    """`text` without those traceback frames that lie in torch's or in holdfast's own loader
    code."""
    kept: list[str] = []
    skipping = False
    for line in text.split("\n"):
        frame = _FRAME.match(line)
        if frame:
            skipping = any(part in frame["file"] for part in _LOADER_CODE)
        elif not line.startswith("    "):
            skipping = False
        if not skipping:
            kept.append(line)
    return "\n".join(kept)


def without_warnings_of_forks(text: str) -> str:
    """`text` without what Python 3.12 and later say to a program that forks while other threads run. A loader of
    torch's has threads while it is used, as ours has; so both give rise to it, wherever the program itself forks."""
    return _FORK.sub("", text)


def normalised(text: str) -> str:
    """Comparable between two runs: no loader frames, no addresses, no process numbers."""
    text = without_loader_frames(text)
    text = re.sub(r"0x[0-9a-f]+", "0x…", text)
    return re.sub(r"\bpid(\(s\))? \d+", r"pid\1 …", text)
