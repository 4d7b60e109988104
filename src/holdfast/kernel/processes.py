"""The end of processes: seen, sent, and made to come with another's."""

from __future__ import annotations

import fcntl
import functools
import os
import select
import signal
import stat
import time

from holdfast.kernel.chain import (
    NOT_HERE,
    REFUSALS,
    Chain,
    call,
    libc,
    python,
)
from holdfast.kernel.descriptors import above_stdio, duplicate, reopen

__all__ = [
    "PR_GET_PDEATHSIG",
    "PR_SET_PDEATHSIG",
    "Child",
    "die_with_parent",
    "has_ended",
    "is_line",
    "open_pidfd",
    "own_handle",
    "pidfd",
    "signal_at_end",
    "signal_by_pidfd",
]

_F_SETOWN = 8
_F_SETSIG = 10  # not in fcntl before Python 3.11
PR_SET_PDEATHSIG, PR_GET_PDEATHSIG = 1, 2
_GLANCE = 0.05  # seconds: somebody else may hold the other end of a line too
_MOMENT = 0.001


open_pidfd: Chain[[int, int], int] = Chain(
    ("os.pidfd_open", python(os, "pidfd_open")),
    ("the system call", functools.partial(call, "pidfd_open")),
)


def _send_by_pidfd(fd: int, number: int) -> None:
    call("pidfd_send_signal", fd, number, 0, 0)


signal_by_pidfd: Chain[[int, int], None] = Chain(
    ("signal.pidfd_send_signal", python(signal, "pidfd_send_signal")),
    ("the system call", _send_by_pidfd),
)


def pidfd(pid: int) -> int | None:
    """A descriptor that is readable when the process has ended; None where there are none."""
    try:
        return above_stdio(open_pidfd(pid, 0))
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        return None


def own_handle(line: int) -> int:
    """For children of this process: a descriptor by which they see that it has ended.

    `line` is the reading end of a pipe whose writing end this process holds. Where there are no
    pidfds its end has to do, which other holders of the writing end can put off (`is_line`).
    """
    found = pidfd(os.getpid())
    return duplicate(line) if found is None else found


def is_line(handle: int) -> bool:
    """Whether this `own_handle` is but the end of a pipe."""
    return stat.S_ISFIFO(os.fstat(handle).st_mode)


def has_ended(pid: int) -> bool:
    """Whether a child has ended; it stays to be reaped. True too where only reaping it can tell."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except AttributeError:
        return True
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        return True


class Child:
    """A child of this process, which other code of this program may have waited for.

    With a pidfd no signal can hit a stranger that got its pid. Without, the pid is the child's as
    long as nobody has reaped it, and that is asked before a signal is sent; what remains is a
    program that reaps it, and a kernel that gives its pid anew, between these two calls.
    """

    def __init__(self, pid: int, line: int) -> None:
        """`line`: one end of a connection of which only the child has the other."""
        self.pid = pid
        self.status: int | None = None
        """When it is reaped, as waitpid gives it, unless somebody else has done that."""
        self.reaped = False
        self._pidfd = pidfd(pid)
        self._fd = duplicate(line) if self._pidfd is None else self._pidfd

    def fileno(self) -> int:
        """Readable when it has ended, and without pidfds also when there is something to read."""
        return self._fd

    def ended(self, timeout: float = 0.0) -> bool:
        """Whether it ends within so many seconds."""
        if self.reaped:
            return True
        poll = select.poll()
        if self._pidfd is not None:
            poll.register(self._pidfd, select.POLLIN)
            return bool(poll.poll(max(0.0, timeout * 1000)))
        poll.register(self._fd, 0)  # of anything else than its end nothing is told
        deadline = time.monotonic() + timeout
        while not self._reap(os.WNOHANG):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if poll.poll(min(left, _GLANCE) * 1000):
                time.sleep(_MOMENT)  # it has closed its files and is about to be gone
        return True

    def send_signal(self, number: int) -> None:
        if self._pidfd is not None:
            try:
                signal_by_pidfd(self._pidfd, number)
                return
            except ProcessLookupError:
                return
            except OSError as error:
                if error.errno not in REFUSALS:
                    raise
        if not self.reaped and not self._reap(os.WNOHANG):
            os.kill(self.pid, number)

    def reap(self) -> None:
        """After it has ended."""
        if not self.reaped:
            self._reap(0)

    def _reap(self, flags: int) -> bool:
        try:
            pid, status = os.waitpid(self.pid, flags)
        except ChildProcessError:
            self.reaped = True  # somebody waited for all children of this process
            return True
        if pid:
            self.status, self.reaped = status, True
        return bool(pid)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._pidfd = -1, None


def die_with_parent() -> bool:
    """Have the kernel kill this process when the thread that forked it ends; whether it will."""
    return bool(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0)


def signal_at_end(reading: int, number: int) -> int | None:
    """Have the kernel send this process a signal when the writing end of a pipe is closed.

    Through a file description of this process's own, since the signal's receiver is a property of
    the description and would otherwise be the last one who asked. That description's descriptor, or
    None where it cannot be had.
    """
    try:
        line = reopen(reading, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno not in NOT_HERE:
            raise
        return None
    try:
        fcntl.fcntl(line, _F_SETOWN, os.getpid())
        fcntl.fcntl(line, _F_SETSIG, number)
        fcntl.fcntl(line, fcntl.F_SETFL, fcntl.fcntl(line, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError as error:
        os.close(line)
        if error.errno not in NOT_HERE:
            raise
        return None
    return line
