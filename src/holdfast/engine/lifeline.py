"""The lifeline: a pipe whose end is a death sentence, carried out by the kernel.

The nursery watches the trainer and kills the workers when it is gone. But the nursery may itself be
stopped, or still be importing torch. So trainer, nursery and workers share a pipe into which nobody
ever writes: the trainer holds the only writing end, and everybody else has told the kernel to send
them SIGKILL when that end closes. No process has to run for that.

A process the user forks from the trainer holds a copy of the writing end and postpones the signal
until it ends too; then it is the nursery's handle on the trainer alone that tells. So it is where
there is no /proc, or where a sandbox does not let us ask for the signal: this is a second net.
"""

from __future__ import annotations

import os
import signal

from holdfast import kernel

__all__ = ["ARM", "Lifeline", "arm"]

# What a spawned nursery runs before its first import of anything of ours: as `arm`, and
# `kernel.signal_at_end`.
ARM = """\
import fcntl, os
try:
    low = os.open("/proc/self/fd/%d" % {fd}, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        line = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 3)  # never a standard stream's number
    finally:
        os.close(low)
    fcntl.fcntl(line, 8, os.getpid())
    fcntl.fcntl(line, 10, 9)
    fcntl.fcntl(line, fcntl.F_SETFL, fcntl.fcntl(line, fcntl.F_GETFL) | os.O_ASYNC)
    if not os.read(line, 1):
        os._exit(0)
except OSError:
    pass
"""


class Lifeline:
    """The trainer's hold on it."""

    def __init__(self) -> None:
        self.reading, self._writing = kernel.pipe()

    def let_go(self) -> None:
        """In a process forked from the trainer: do not hold the end that keeps others alive."""
        if self._writing >= 0:
            os.close(self._writing)
            self._writing = -1

    def cut(self) -> None:
        """In the trainer, at the very end: whoever is still there dies."""
        os.close(self.reading)
        self.let_go()


def arm(reading: int) -> None:
    """In a nursery or worker: be killed when the trainer is gone."""
    line = kernel.signal_at_end(reading, signal.SIGKILL)
    if line is None:
        return
    try:
        gone = not os.read(line, 1)
    except BlockingIOError:
        return
    if gone:  # before the signal was armed
        os._exit(0)
