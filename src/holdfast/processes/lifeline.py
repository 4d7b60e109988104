"""The lifeline: a pipe that makes the kernel kill every process of a pool when the trainer ends.

The nursery kills the workers when the trainer ends. But the nursery may itself be stopped, or still
be importing torch. So trainer, nursery and workers share a pipe to which no process ever writes.
The trainer holds the only writing end, and all other processes have asked the kernel to send them
SIGKILL when that end is closed. No process has to run for that.

A process that the user forks from the trainer holds a copy of the writing end, and so postpones the
signal until it ends too. Until then only the nursery's handle on the trainer helps. The same holds
where there is no /proc, or where a sandbox does not allow asking for the signal. So this is a
second safety net, not the only one.
"""

from __future__ import annotations

import os
import signal

from holdfast import kernel

# A spawned nursery runs this before it imports any module of ours. It does what `arm` and
# `kernel.signal_at_end` do.
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
    """Both ends, in the trainer."""

    def __init__(self) -> None:
        self.reading, self._writing = kernel.pipe()

    def let_go(self) -> None:
        """In a process forked from the trainer: close the end that keeps the other processes
        alive."""
        if self._writing >= 0:
            os.close(self._writing)
            self._writing = -1

    def cut(self) -> None:
        """In the trainer, at the very end: kill every process that is left."""
        os.close(self.reading)
        self.let_go()


def arm(reading: int) -> None:
    """In a nursery or worker: be killed when the trainer ends."""
    line = kernel.signal_at_end(reading, signal.SIGKILL)
    if line is None:
        return
    try:
        gone = not os.read(line, 1)
    except BlockingIOError:
        return
    if gone:  # it ended before the signal was set up
        os._exit(0)
