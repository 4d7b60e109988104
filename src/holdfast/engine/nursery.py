"""The trainer's handle on its nursery: a small process that forks the workers of one pool.

A replacement forked from the trainer would inherit what the trainer has become by then: threads
that no longer run but still hold their locks, a dead OpenMP pool, CUDA, gigabytes of page tables
(`fork-lock-deadlock`, `fork-enomem`). So the trainer forks once, when torch would fork its workers,
and that child does nothing but fork: first workers and replacements alike, from the same early
image, in about a millisecond. Under spawn and forkserver the nursery is a fresh interpreter that
has imported torch and nothing of the user's (see `payload`).

What it does is in `nurse`; here is how it is started, given its orders, heard and ended.

A fresh interpreter reads no orders before it has imported torch, which may take long, and its
socket holds a few large ones only. So orders that do not fit wait in an outbox, with copies of the
descriptors that go with them, and are flushed when the socket is writable. The caller never waits.
A nursery that takes no order for `LISTENING` seconds is given up (`deaf`); until its first sign of
life it has as long as any process has to start.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing import spawn, util
from typing import Any

from holdfast import kernel
from holdfast.engine.nurse import IGNORED, MESSAGE, Nurse, Report, confess, set_signals
from holdfast.engine.payload import Payload
from holdfast.engine.silence import BOOT_ALLOWANCE
from holdfast.engine.vocabulary import SHORTAGES

__all__ = ["LISTENING", "Nursery"]

LISTENING = 5.0  # seconds within which a nursery that has started takes an order


class Nursery:
    """The trainer's handle on its nursery."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid = pid
        self.process = kernel.Child(pid, control.fileno())
        self.control = control
        control.setblocking(False)
        self.error: str | None = None  # the traceback, if it has raised
        self.given_up = ""  # how it ended, in words, if we have ended it
        self.closed = False
        self.on_backlog: Callable[[], None] = lambda: None
        """Called when an order has to wait until the socket is writable."""
        self._outbox: deque[tuple[bytes, list[int]]] = deque()  # packets, and descriptors of ours
        self._short = False  # something was lacking to send the first of them
        self._waits_since = 0.0  # the first of them, or the nursery's first sign of life
        self._heard = False

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

    def _order(self, head: tuple[Any, ...], body: bytes = b"", fds: Sequence[int] = ()) -> None:
        parts = [pickle.dumps(head)]
        parts += [body[at : at + MESSAGE] for at in range(0, len(body), MESSAGE)]
        sent = 0
        if not self._outbox:
            sent = self._send(parts, fds)
        if sent == len(parts):
            return
        packets: list[tuple[bytes, list[int]]] = [(part, []) for part in parts[sent:]]
        if sent == 0 and fds:
            packets[0] = parts[0], _copies(fds)
        if not self._outbox:
            self._waits_since = time.monotonic()
        self._outbox.extend(packets)
        self.on_backlog()

    def _send(self, parts: list[bytes], fds: Sequence[int]) -> int:
        """Send the packets of an order; how many the kernel has taken. OSError if something is
        short and it has taken none."""
        for number, part in enumerate(parts):
            try:
                self._send_one(part, () if number else fds)
            except BlockingIOError:
                return number
            except OSError as error:
                if error.errno not in SHORTAGES:
                    break  # it is gone; the pool learns that from its handle
                if number == 0:
                    raise
                return number
        return len(parts)

    def _send_one(self, packet: bytes, fds: Sequence[int]) -> None:
        if fds:
            socket.send_fds(self.control, [packet], list(fds))
        else:
            self.control.send(packet)

    @property
    def has_backlog(self) -> bool:
        """Whether part of an order has not been sent."""
        return bool(self._outbox)

    @property
    def pending(self) -> bool:
        """Whether that only waits until the socket is writable."""
        return bool(self._outbox) and not self._short

    def flush(self) -> None:
        """Send what waits in the outbox, as far as the kernel takes it."""
        self._short = False
        while self._outbox:
            packet, fds = self._outbox[0]
            try:
                self._send_one(packet, fds)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in SHORTAGES:
                    self._drop_outbox()  # it is gone; the pool learns that from its handle
                    return
                self._short = True  # tried again when time has passed, not when it is writable
                return
            self._outbox.popleft()
            _close_all(fds)
            self._waits_since = time.monotonic()

    def deaf(self, now: float) -> bool:
        """Whether an order has waited for so long that the nursery will not take any."""
        patience = LISTENING if self._heard else BOOT_ALLOWANCE
        return bool(self._outbox) and now - self._waits_since > patience

    def give_up(self, how: str) -> None:
        """End it: the pool makes another, and knows that it was not killed from outside."""
        self.given_up = how
        self.kill()

    def _drop_outbox(self) -> None:
        while self._outbox:
            _close_all(self._outbox.popleft()[1])

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
            if not self._heard:
                self._heard, self._waits_since = True, time.monotonic()
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
        self.disown()

    def disown(self) -> None:
        """Let go of all descriptors; the nursery does not notice if another process has them."""
        self._drop_outbox()
        self.control.close()
        self.process.close()  # which may be a copy of it


def _copies(fds: Sequence[int]) -> list[int]:
    copies: list[int] = []
    try:
        for fd in fds:
            copies.append(kernel.duplicate(fd))
    except OSError:
        _close_all(copies)
        raise
    return copies


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _connections(lifeline: int) -> tuple[socket.socket, socket.socket, int]:
    """Between trainer and nursery: either end, and the nursery's hold on the trainer."""
    ours, theirs = kernel.socket_pair()
    try:
        return ours, theirs, kernel.own_handle(lifeline)
    except OSError:
        ours.close()
        theirs.close()
        raise
