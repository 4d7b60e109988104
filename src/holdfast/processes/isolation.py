"""What a worker process does when a sample is tested alone: it notes its own signals, and pauses.

SIGKILL does not say which process sent it. Two things help to find out whether a sample is to blame
(`engine.restarts` says how they are used):

- The worker pauses before it loads the sample. A process that kills workers from outside does not
  wait for that: a kill during the pause shows that the sample is not to blame.
- Python announces ``os.kill`` to audit hooks before it sends the signal. In a worker whose
  predecessor died in the middle of a sample, a fatal signal that the process (or a child it has
  forked) sends to this very process is noted in the black box. A hook cannot be taken away again
  and costs some 0.2 µs for each event that Python announces (a file is opened, a module imported):
  so there is none in other workers.

Signals that native code sends are not announced: for these there is only the pause.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from typing import Final, Protocol

from holdfast.autopsy.blackbox import IDLE

SLICE: Final = 0.05  # seconds between two signs of life
FATAL: Final = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
"""Signals that may as well have come from outside."""


class Box(Protocol):
    """The worker's own black box."""

    def note(self, task: int, position: int, step: int) -> None: ...
    def note_own_signal(self, number: int) -> None: ...


_listening: set[int] = set()  # pids of processes that have the hook


def listen(box: Box) -> None:
    """From now on, note a fatal signal that this process sends to itself."""
    me = os.getpid()
    if me in _listening:
        return
    _listening.add(me)

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if (event == "os.kill" and arguments[0] == me) or event == "signal.pthread_kill":
            number = arguments[1]
            if isinstance(number, int) and number in FATAL:
                box.note_own_signal(number)

    sys.addaudithook(note)


def wait(seconds: float, box: Box, channel: int) -> bool:
    """Wait, with a sign of life now and then, so that the worker does not look stalled. False if
    the parent has gone meanwhile."""
    gone = select.poll()
    gone.register(channel, 0)  # reports that the other end was closed, and nothing else
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        box.note(-1, -1, IDLE)
        if gone.poll(1000 * min(left, SLICE)):
            return False
    return True
