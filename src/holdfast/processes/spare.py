"""A spare: a process that is forked and warmed up before it is needed.

A fork takes a millisecond, what follows takes ten: a forked process shares its memory with the
nursery, and the first write to each page is a page fault, about 2,000 of them until the first batch
is made. The trainer waits for that batch. So a nursery keeps one process more, which has done all
that is the same for every worker, on data of our own. It waits on a socket for what makes it one of
them. None of the user's code has run in it, except what the user has registered with
``os.register_at_fork``, which runs at every fork.

A spare takes some MB and some milliseconds of a processor. A pool that ends within two seconds has
none. If a worker dies when there is none, one is forked at once, without warming it up: it is there
when the trainer has read what is left of the dead worker and orders a replacement.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import time
from dataclasses import dataclass
from typing import Any

from holdfast import kernel

_MESSAGE = 4096  # bytes, at most
_DESCRIPTORS = 5
_DIES_WITHIN = 0.5  # seconds; it has no memory of the user's, and takes a few milliseconds
_CHECK_SECONDS = 0.001


@dataclass(frozen=True)
class Assignment:
    """What makes a process a certain worker."""

    known_as: int  # its number for multiprocessing
    setup: bytes
    channel: int
    arena: int
    stderr: int | None
    dump: int | None

    @property
    def descriptors(self) -> list[int]:
        return [fd for fd in (self.channel, self.arena, self.stderr, self.dump) if fd is not None]


class Spare:
    """The nursery's side of it."""

    def __init__(self, pid: int, line: socket.socket) -> None:
        self.pid = pid
        self._line = line

    def ended(self) -> bool:
        return kernel.has_ended(self.pid)

    def assign(self, assignment: Assignment) -> bool:
        """Make it this worker; False if it is not there any more, or there is no room to tell."""
        try:
            setup = kernel.memory_file("holdfast-setup", room=len(assignment.setup))
        except OSError:
            return False
        try:
            os.pwrite(setup, assignment.setup, 0)
            given = (
                assignment.known_as,
                len(assignment.setup),
                assignment.stderr is not None,
                assignment.dump is not None,
            )
            socket.send_fds(
                self._line,
                [pickle.dumps(given)],
                [setup, *assignment.descriptors],
                socket.MSG_DONTWAIT,
            )
        except OSError:
            return False
        finally:
            os.close(setup)
        self._line.close()
        return True

    def close(self) -> None:
        """In a process forked from the nursery: it has no part in this."""
        self._line.close()

    def kill(self) -> None:
        """Kill it, without waiting for its end."""
        os.kill(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill it, and reap it if it does not take long to die. Otherwise that is left to init, at
        the end of this process."""
        self._line.close()
        self.kill()
        deadline = time.monotonic() + _DIES_WITHIN
        while os.waitpid(self.pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
            time.sleep(_CHECK_SECONDS)


def await_assignment(line: socket.socket) -> Assignment | None:
    """In the spare: wait until it becomes a worker; None if it never does."""
    message, received, _, _ = socket.recv_fds(line, _MESSAGE, _DESCRIPTORS)
    line.close()
    if not message:
        return None
    given: tuple[Any, ...] = pickle.loads(message)
    known_as, size, has_stderr, has_dump = given
    fds = [kernel.above_stdio(fd) for fd in received]
    setup, channel, arena = fds[:3]
    rest = iter(fds[3:])
    assignment = Assignment(
        known_as,
        os.pread(setup, size, 0),
        channel,
        arena,
        next(rest) if has_stderr else None,
        next(rest) if has_dump else None,
    )
    os.close(setup)
    return assignment
