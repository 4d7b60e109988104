"""The end of processes: noticing it, signalling it, and dying with the parent."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import select
import signal
import stat
import threading
import time

from holdfast.kernel.chain import NOT_HERE, Chain, call, libc, python, unless_refused
from holdfast.kernel.descriptors import above_stdio, duplicate, reopen

_F_SETOWN = 8
_F_SETSIG = 10  # not in fcntl before Python 3.11
PR_SET_PDEATHSIG, PR_GET_PDEATHSIG = 1, 2
_CHECK_SECONDS = 0.05  # between two checks: other processes may hold the pipe open
_EXIT_SECONDS = 0.001  # between closing its files and the end of a process


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
    """A descriptor that is readable when the process has ended; None without pidfds."""
    with unless_refused():
        return above_stdio(open_pidfd(pid, 0))
    return None


def own_handle(line: int) -> int:
    """A descriptor by which children of this process see that it has ended.

    `line` is the reading end of a pipe whose writing end this process holds. Without pidfds, a copy
    of it is returned: its end of file comes late if other processes hold the writing end too
    (`is_line`).
    """
    found = pidfd(os.getpid())
    return duplicate(line) if found is None else found


def is_line(handle: int) -> bool:
    """Whether this `own_handle` is only the end of a pipe, not a pidfd."""
    return stat.S_ISFIFO(os.fstat(handle).st_mode)


def has_ended(pid: int) -> bool:
    """Whether a child has ended, without reaping it. Also true if only reaping it could tell."""
    with unless_refused(), contextlib.suppress(AttributeError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return True


class Child:
    """A child of this process, which other code of this program may have reaped.

    With a pidfd, no signal can reach another process that got its pid. Without one, the pid is the
    child's until it is reaped, and that is checked before a signal is sent. One race remains: other
    code reaps the child, and the kernel reuses its pid, between these two calls.
    """

    def __init__(self, pid: int, line: int) -> None:
        """`line`: one end of a connection whose other end only the child has."""
        self.pid = pid
        self.status: int | None = None
        """As waitpid returns it, once it is reaped; None if other code has reaped it."""
        self.reaped = False
        self._pidfd = pidfd(pid)
        self._fd = duplicate(line) if self._pidfd is None else self._pidfd

    def fileno(self) -> int:
        """Readable when it has ended; without pidfds also when there is a message to read."""
        return self._fd

    def ended(self, timeout: float = 0.0) -> bool:
        """Wait up to `timeout` seconds for its end; returns whether it has ended."""
        if self.reaped:
            return True
        poll = select.poll()
        if self._pidfd is not None:
            poll.register(self._pidfd, select.POLLIN)
            return bool(poll.poll(max(0.0, timeout * 1000)))
        poll.register(self._fd, 0)  # reports only the end of the connection
        deadline = time.monotonic() + timeout
        while not self._reap(os.WNOHANG):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if poll.poll(min(left, _CHECK_SECONDS) * 1000):
                time.sleep(_EXIT_SECONDS)  # it has closed its files and is about to end
        return True

    def send_signal(self, number: int) -> None:
        if self._pidfd is not None and _sent(self._pidfd, number):
            return
        if not self.reaped and not self._reap(os.WNOHANG):
            os.kill(self.pid, number)

    def reap(self) -> None:
        """Call this after it has ended."""
        if not self.reaped:
            self._reap(0)

    def _reap(self, flags: int) -> bool:
        try:
            pid, status = os.waitpid(self.pid, flags)
        except ChildProcessError:
            self.reaped = True  # by other code of this process
            return True
        if pid:
            self.status, self.reaped = status, True
        return bool(pid)

    def close(self) -> None:
        """Let go of it. If it was killed and has not ended yet, a thread waits for that, because a
        child that is never reaped remains in the list of processes."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd, self._pidfd = -1, None
        if not self.reaped and not self._reap(os.WNOHANG):
            reaper = threading.Thread(target=self.reap, name="holdfast-reap", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread at interpreter exit: init reaps it
                reaper.start()


def _sent(handle: int, number: int) -> bool:
    """Send a signal by a pidfd, to a process that may have ended; False if the kernel refuses."""
    with unless_refused():
        with contextlib.suppress(ProcessLookupError):
            signal_by_pidfd(handle, number)
        return True
    return False


def end_child(pid: int) -> None:
    """Kill a child that was just started, and reap it."""
    try:
        handle = pidfd(pid)
    except OSError:
        handle = None  # it is reaped, or no descriptor is left
    try:
        sent = handle is not None and _sent(handle, signal.SIGKILL)
        if not sent and os.waitpid(pid, os.WNOHANG) == (0, 0):  # see `Child`
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass  # it has ended, and is reaped
    finally:
        if handle is not None:
            os.close(handle)


def die_with_parent() -> bool:
    """Have the kernel kill this process when the thread that forked it ends. Returns whether the
    kernel agreed."""
    return bool(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0)


def signal_at_end(reading: int, number: int) -> int | None:
    """Have the kernel send this process a signal when the writing end of a pipe is closed.

    This needs an open file description of this process's own. The receiver of the signal is a
    property of the description, so with a shared one only the last process that asked would get
    it. Returns the descriptor of that description, or None if it is not available.
    """
    with unless_refused(NOT_HERE), contextlib.ExitStack() as undo:
        line = reopen(reading, os.O_RDONLY | os.O_NONBLOCK)
        undo.callback(os.close, line)
        fcntl.fcntl(line, _F_SETOWN, os.getpid())
        fcntl.fcntl(line, _F_SETSIG, number)
        fcntl.fcntl(line, fcntl.F_SETFL, fcntl.fcntl(line, fcntl.F_GETFL) | os.O_ASYNC)
        undo.pop_all()
        return line
    return None
