"""The trainer's handle on its nursery: a small process that forks the workers of one pool.

A replacement forked from the trainer would inherit what the trainer has become by then: threads
that no longer run but still hold their locks, a dead OpenMP pool, CUDA, gigabytes of page tables
(`fork-lock-deadlock`, `fork-enomem`). So the trainer forks once, when torch would fork its workers,
and that child does nothing but fork: first workers and replacements alike, from the same early
image, in about a millisecond. Under spawn and forkserver the nursery is a fresh interpreter that
has imported torch and nothing of the user's (see `payload`).

What it does is in `nurse`; here is how it is started, given its orders, heard and ended.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from multiprocessing import spawn, util
from typing import Any

from holdfast import kernel
from holdfast.engine.nurse import IGNORED, MESSAGE, Nurse, Report, confess, set_signals
from holdfast.engine.payload import Payload
from holdfast.engine.vocabulary import SHORTAGES

__all__ = ["Nursery"]


class Nursery:
    """The trainer's handle on its nursery."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid = pid
        self.process = kernel.Child(pid, control.fileno())
        self.control = control
        control.setblocking(False)
        self.error: str | None = None  # the traceback, if it has raised
        self.closed = False

    @classmethod
    def fork(cls, nurse: Callable[[Nurse], None], blackboxes: int, lifeline: int) -> Nursery:
        """Fork a nursery from this process. `nurse` runs in it and never returns here."""
        # What waits to be written would be written again by every worker.
        util._flush_std_streams()  # type: ignore[attr-defined]
        ours, theirs, trainer = _connections(lifeline)
        # A signal between the fork and the moment the child ignores it would run the trainer's
        # own handler, a checkpoint perhaps, in the nursery.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        try:
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    set_signals()
                    signal.pthread_sigmask(signal.SIG_SETMASK, before)
                    ours.close()
                    gc.freeze()
                    nurse(Nurse(theirs, trainer, blackboxes, lifeline))
                    status = 0
                except BaseException:
                    confess(theirs)
                finally:
                    os._exit(status)
        except BaseException:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
            os.close(trainer)
        return cls._of(pid, ours)

    @classmethod
    def spawn(cls, payload: Payload, blackboxes: int, lifeline: int) -> Nursery:
        """Start a nursery in a fresh interpreter."""
        ours, theirs, trainer = _connections(lifeline)
        fds = (theirs.fileno(), trainer, blackboxes, lifeline, payload.fd)
        command = [
            spawn.get_executable(),
            *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
            "-c",
            payload.program(fds, lifeline),
        ]
        # Signals wait until the child has learned to ignore them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=(*fds, *payload.fds),
                close_fds=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
            os.close(trainer)
        child.returncode = 0  # we reap it ourselves; Popen shall not wait for it
        return cls._of(child.pid, ours)

    @classmethod
    def _of(cls, pid: int, control: socket.socket) -> Nursery:
        try:
            return cls(pid, control)
        except OSError:  # no descriptor left to hold it by: nobody may be left that nobody knows
            control.close()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise

    def start(
        self,
        worker: int,
        generation: int,
        setup: bytes,
        channel: int,
        arena: int,
        known_as: int | None = None,
    ) -> None:
        """Order a worker. It gets copies of `channel` and `arena`, and is in multiprocessing's eyes
        the worker `known_as`, if that is another.

        An OSError if descriptors cannot be passed on now; nothing was ordered then.
        """
        argument = len(setup), worker if known_as is None else known_as
        self._order(("start", worker, generation, argument), setup, [channel, arena])

    def signal(self, worker: int, generation: int, number: int) -> None:
        self._order(("signal", worker, generation, number))

    def stop(self, grace: float) -> None:
        """Order the end: workers have `grace` seconds to go by themselves."""
        self._order(("stop", 0, 0, grace))

    def _order(
        self, head: tuple[Any, ...], body: bytes = b"", fds: list[int] | None = None
    ) -> None:
        parts = [pickle.dumps(head)]
        parts += [body[at : at + MESSAGE] for at in range(0, len(body), MESSAGE)]
        for number, part in enumerate(parts):
            deadline = time.monotonic() + 5
            while True:
                try:
                    if number == 0 and fds:
                        socket.send_fds(self.control, [part], fds)
                    else:
                        self.control.send(part)
                    break
                except BlockingIOError:
                    wait = select.poll()
                    wait.register(self.control, select.POLLOUT)
                    if not wait.poll(1000) and time.monotonic() > deadline:
                        self.kill()  # it does not listen any more; the pool makes a new one
                        return
                except OSError as error:
                    if error.errno not in SHORTAGES:
                        return  # it is gone; the pool learns that from its handle
                    if number == 0:
                        raise
                    self.kill()  # it waits for the rest, which cannot be sent
                    return

    def reports(self) -> list[Report] | None:
        """What has happened; None when the nursery is gone and has said everything."""
        found: list[Report] = []
        while True:
            try:
                message = self.control.recv(MESSAGE)
            except BlockingIOError:
                return found
            except ConnectionResetError:
                continue  # said once; what it reported before comes after it
            except OSError:
                message = b""
            if not message:
                return found or None
            report = pickle.loads(message)
            if isinstance(report, str):
                self.error = report
            else:
                found.append(report)

    def gone(self) -> bool:
        """Whether the nursery is dead, reaped or not."""
        return self.process.ended()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    def wait(self, timeout: float) -> bool:
        """Reap the nursery if it ends in time."""
        if not self.process.ended(timeout):
            return False
        self.process.reap()
        return True

    @property
    def status(self) -> int | None:
        """As waitpid gives it, when it is reaped, unless somebody else has done that."""
        return self.process.status

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.control.close()
        self.process.close()


def _connections(lifeline: int) -> tuple[socket.socket, socket.socket, int]:
    """Between trainer and nursery: either end, and the nursery's hold on the trainer."""
    ours, theirs = kernel.socket_pair()
    try:
        return ours, theirs, kernel.own_handle(lifeline)
    except OSError:
        ours.close()
        theirs.close()
        raise
