"""The lifeline: a pipe whose end is a death sentence, carried out by the kernel.

The nursery watches the trainer and kills the workers when it is gone. But the nursery may itself be
stopped, or still be importing torch. So trainer, nursery and workers share a pipe into which nobody
ever writes: the trainer holds the only writing end, and everybody else has told the kernel to send
them SIGKILL when that end closes. No process has to run for that.

A process the user forks from the trainer holds a copy of the writing end and postpones the signal
until it ends too; then it is the nursery's pidfd alone that tells.
"""

from __future__ import annotations

import fcntl
import os
import signal

__all__ = ["ARM", "Lifeline", "arm"]

F_SETSIG = 10  # Linux's number; not in fcntl before Python 3.11

# What a spawned nursery runs before its first import of anything of ours.
ARM = """\
import fcntl, os
line = os.open("/proc/self/fd/%d" % {fd}, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
fcntl.fcntl(line, fcntl.F_SETOWN, os.getpid())
fcntl.fcntl(line, 10, 9)
fcntl.fcntl(line, fcntl.F_SETFL, fcntl.fcntl(line, fcntl.F_GETFL) | os.O_ASYNC)
try:
    os.read(line, 1)
except BlockingIOError:
    pass
else:
    os._exit(0)
"""


class Lifeline:
    """The trainer's hold on it."""

    def __init__(self) -> None:
        self.reading, self._writing = os.pipe2(os.O_CLOEXEC)

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
    """In a nursery or worker: be killed when the trainer is gone.

    Through a file description of this process's own, since the signal's receiver is a property of
    the description and would otherwise be the last one who armed it.
    """
    line = os.open(f"/proc/self/fd/{reading}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.fcntl(line, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(line, F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(line, fcntl.F_SETFL, fcntl.fcntl(line, fcntl.F_GETFL) | os.O_ASYNC)
    try:
        os.read(line, 1)
    except BlockingIOError:
        return
    os._exit(0)  # the trainer was gone before the signal was armed
