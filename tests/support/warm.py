"""Python commands as processes of their own, forked from one that has imported torch already.

Used like `subprocess`, for commands that need not be fresh interpreters: see `tests.support.incubator`.
"""

from __future__ import annotations

import functools
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path


class Incubator:
    """A process from which commands are forked, with these modules imported. It ends with this process, at the
    latest."""

    def __init__(self, *modules: str, path: Sequence[Path] = (), flags: Sequence[str] = ()) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        if path:
            environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
        here = str(Path(__file__).with_name("incubator.py"))
        self._process = subprocess.Popen(
            [sys.executable, *flags, here, str(theirs.fileno()), *modules],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # what is no terminal, so that commands buffer what they print
            env=environment,
        )
        theirs.close()
        standing.add(self._process.pid)
        _open.append(self)

    def start(
        self,
        command: Sequence[str],
        *,
        out: int,
        err: int,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        before: str = "",
    ) -> Command:
        """Runs what `python *command` would, in a session of its own, after the code `before`: see `TERMINAL`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = dict(os.environ if env is None else env)
        request = pickle.dumps(([*command], environment, str(cwd or Path.cwd()), before))
        socket.send_fds(self._control, [request], [out, err, theirs.fileno()])
        theirs.close()
        return Command(pickle.loads(ours.recv(100)), ours)

    def close(self) -> None:
        self._control.close()
        self._process.wait(30)
        standing.discard(self._process.pid)
        _open.remove(self)


class Command:
    """A command that runs, or has run."""

    def __init__(self, pid: int, report: socket.socket) -> None:
        self.pid = pid
        self._report = report
        self._status: int | None = None

    def ended(self, seconds: float | None = None) -> bool:
        """Whether it has ended, or does so within that time; for ever if None."""
        if self._status is None:
            poll = select.poll()
            poll.register(self._report, select.POLLIN)
            if not poll.poll(None if seconds is None else seconds * 1000):
                return False
            self._status = pickle.loads(self._report.recv(100))
            self._report.close()
        return True

    def status(self) -> int:
        """As waitpid() gives it. Waits for the end."""
        self.ended()
        assert self._status is not None
        return self._status

    def code(self) -> int:
        return os.waitstatus_to_exitcode(self.status())


TERMINAL = """\
import fcntl, os, termios
fcntl.ioctl(1, termios.TIOCSCTTY, 0)
os.dup2(1, 0)
"""
"""For `Incubator.start`: what is given as standard output is its terminal, from which it also reads."""


def mounting(options: Mapping[str, str]) -> str:
    """For `Incubator.start`: in a namespace of its own, a tmpfs with these options on each of these
    folders. Takes root."""
    return f"""\
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
NEW_NAMESPACE, RECURSIVE_AND_PRIVATE = 0x20000, 0x44000
failed = libc.unshare(NEW_NAMESPACE) or libc.mount(b"none", b"/", None, RECURSIVE_AND_PRIVATE, None)
for place, options in {dict(options)!r}.items():
    failed = failed or libc.mount(b"tmpfs", place.encode(), b"tmpfs", 0, options.encode())
if failed:
    raise OSError(ctypes.get_errno(), "no folders of its own")
"""


standing: set[int] = set()
"""Pids of incubators: they outlive the tests that began them."""
_open: list[Incubator] = []


def close_all() -> None:
    """At the end of all tests: what is still open would be complained of by the interpreter."""
    with_torch.cache_clear()
    for incubator in tuple(_open):
        incubator.close()


@functools.cache
def with_torch(*flags: str) -> Incubator:
    """The one for scripts and modules that are to import holdfast themselves, under these flags of
    the interpreter. What holdfast imports of others is there already."""
    return Incubator(
        "torch", "numpy.random", "numpy.typing", "threadpoolctl", "tracemalloc", flags=flags
    )


def run(
    command: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    before: str = "",
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of `python *command`, with its output. One that does not end within `timeout` is killed with
    its whole group, and `TimeoutExpired` raised."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = with_torch().start(
            command, out=out.fileno(), err=err.fileno(), env=env, cwd=cwd, before=before
        )
        in_time = process.ended(timeout)
        if not in_time:
            os.killpg(process.pid, signal.SIGKILL)
        code = process.code()
        out.seek(0)
        err.seek(0)
        if not in_time:
            raise subprocess.TimeoutExpired([*command], timeout, out.read(), err.read())
        return subprocess.CompletedProcess([*command], code, out.read(), err.read())
