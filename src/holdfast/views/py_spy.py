"""What torch's workers are doing, from py-spy, if it is installed and permitted.

py-spy runs for one process at a time, in the background, so that the view never waits.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

_TIMEOUT = 3.0  # seconds that one run of py-spy may take
_INTERVAL = 0.5  # seconds between two runs
_LIBRARIES = ("/multiprocessing/", "/torch/", "/threading.py", "/selectors.py", "<frozen")
_LOOP = "_worker_loop"  # of torch's workers


class Stacks:
    """The last known place of each process; `why_not` says why there is none."""

    def __init__(self, program: str | None = None) -> None:
        self._program = program or _find("py-spy")
        self.why_not = "" if self._program else "py-spy is not installed"
        self.places: dict[int, str] = {}
        self._running: tuple[int, subprocess.Popen[bytes], float] | None = None
        self._last: dict[int, float] = {}
        self._again = 0.0

    def ask(self, pids: Sequence[int]) -> None:
        """Collect an answer if there is one, and start py-spy for the process whose last answer is
        oldest."""
        now = time.monotonic()
        if self._running is not None:
            self._collect(now)
        if self._running is None and pids and self._program and not self.why_not:
            pid = min(pids, key=lambda pid: self._last.get(pid, 0.0))
            if now >= self._again:
                self._last[pid], self._again = now, now + _INTERVAL
                command = [self._program, "dump", "--nonblocking", "--json", "--pid", str(pid)]
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
                self._running = (pid, child, now)

    def _collect(self, now: float) -> None:
        assert self._running is not None
        pid, child, since = self._running
        if child.poll() is None:
            if now - since < _TIMEOUT:
                return
            child.kill()
        output, errors = child.communicate()
        self._running = None
        if child.returncode == 0:
            place = innermost(json.loads(output))
            if place:
                self.places[pid] = place
        elif b"ermission" in errors or b"root" in errors:
            self.why_not = "py-spy is not permitted to read them (needs root or ptrace_scope=0)"

    def close(self) -> None:
        if self._running is not None:
            self._running[1].kill()
            self._running[1].communicate()
            self._running = None


def _find(name: str) -> str | None:
    """On the path, or beside this Python, whose environment may not be activated."""
    return shutil.which(name) or shutil.which(name, path=os.path.dirname(sys.executable))


def innermost(dump: list[dict[str, Any]]) -> str:
    """Function and line of the main thread's innermost frame in the user's own code, if any."""
    if not dump:
        return ""
    main = next((one for one in dump if one.get("thread_name") == "MainThread"), dump[0])
    frames = list(main.get("frames", ()))
    # The frames outside the worker's loop are the trainer's, copied by the fork.
    ends = [at for at, frame in enumerate(frames) if frame.get("name") == _LOOP]
    frames = frames[: ends[0] + 1] if ends else frames
    if not frames:
        return ""
    users = [frame for frame in frames if not _is_library(frame)]
    if not users and any(_file(frame).endswith("multiprocessing/queues.py") for frame in frames):
        return "idle"
    frame = (users or frames)[0]
    return f"{frame.get('name', '?')} ({_file(frame).rpartition('/')[2]}:{frame.get('line', 0)})"


def _file(frame: dict[str, Any]) -> str:
    return str(frame.get("filename") or frame.get("short_filename") or "?")


def _is_library(frame: dict[str, Any]) -> bool:
    return any(part in _file(frame) for part in _LIBRARIES)
