"""What a worker does when a sample is suspected: it listens to itself, and waits.

A worker that was killed by SIGKILL tells nobody who did it. Two things help to find out whether a
sample is to blame (how the machine uses them, its own text says):

- The worker waits before it loads the sample. Whoever kills workers from outside has no reason to
  wait for that: a kill that strikes while nothing is being loaded clears the sample.
- Python announces ``os.kill`` to audit hooks before it sends the signal. In a worker whose
  predecessor died in the middle of a sample, a fatal signal that the process (or a child it has
  forked) sends to this very process is noted in the black box. A hook cannot be taken away again
  and costs some 0.2 µs for each event that Python announces (a file is opened, a module imported):
  so there is none in other workers.

Signals that native code sends are not announced: there the waiting has to do.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from typing import Final, Protocol

from holdfast.autopsy.blackbox import IDLE

__all__ = ["listen", "wait"]

SLICE: Final = 0.05  # seconds between two signs of life
FATAL: Final = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
"""Those of which nobody can tell whether they came from outside."""


class Box(Protocol):
    """The worker's own black box."""

    def note(self, task: int, position: int, step: int) -> None: ...
    def confess(self, number: int) -> None: ...


_listening: set[int] = set()  # the process that has a hook already


def listen(box: Box) -> None:
    """From now on, note a fatal signal that is sent to this process by itself."""
    me = os.getpid()
    if me in _listening:
        return
    _listening.add(me)

    def heard(event: str, arguments: tuple[object, ...]) -> None:
        if (event == "os.kill" and arguments[0] == me) or event == "signal.pthread_kill":
            number = arguments[1]
            if isinstance(number, int) and number in FATAL:
                box.confess(number)

    sys.addaudithook(heard)


def wait(seconds: float, box: Box, channel: int) -> bool:
    """Do nothing for so long, with a sign of life now and then, or the worker would be taken for
    one that makes no progress. False if the parent has gone meanwhile."""
    gone = select.poll()
    gone.register(channel, 0)  # tells of the other end's closing, and of nothing else
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        box.note(-1, -1, IDLE)
        if gone.poll(1000 * min(left, SLICE)):
            return False
    return True
