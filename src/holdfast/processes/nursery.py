"""The trainer's handle on its nursery: a small process that forks the workers of one pool.

A replacement that is forked from the trainer would inherit the trainer's current state: locks held
by threads that do not exist in the child, an OpenMP pool without threads, CUDA, gigabytes of page
tables (`fork-lock-deadlock`, `fork-enomem`). So the trainer forks once, when torch would fork its
workers. That child, the nursery, only forks: the first workers and all replacements, from the same
early image, in about a millisecond each. Under spawn and forkserver the nursery is a fresh
interpreter that has imported torch and no code of the user (see `spawn`).

The loop of the nursery is in `nursery_main`. This module starts a nursery, sends it orders, reads
its reports and ends it.

A fresh interpreter reads no orders before it has imported torch, which may take long, and its
socket has room for a few large orders only. So orders that do not fit wait in an outbox, with
copies of their descriptors, and are sent when the socket is writable. The caller never waits. A
nursery that takes no order for `ORDER_TIMEOUT` seconds is given up (`is_unresponsive`). Until its
first message it has as long as any process has to start.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import socket
import subprocess
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import spawn
from typing import Any

from holdfast import kernel, private_names
from holdfast.engine.events import SHORTAGES
from holdfast.engine.stall import BOOT_ALLOWANCE
from holdfast.processes.nursery_main import IGNORED_SIGNALS, NurseryLoop, note_failure, set_signals
from holdfast.processes.nursery_reports import MESSAGE_BYTES, Report
from holdfast.processes.spawn import Payload

ORDER_TIMEOUT = 5.0  # seconds within which a nursery that has started must take an order


class Nursery:
    """The trainer's handle on its nursery."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid = pid
        self.process = kernel.Child(pid, control.fileno())
        self.control = control
        control.setblocking(False)
        self.error: str | None = None  # the traceback, if it has raised
        self.given_up = ""  # why the trainer has killed it, if so
        self.closed = False
        self.on_backlog: Callable[[], None] = lambda: None
        """Called when an order has to wait until the socket is writable."""
        self._outbox: deque[tuple[bytes, list[int]]] = deque()  # packets, and copies of descriptors
        self._short = False  # the first of them was not sent because a resource was exhausted
        self._waits_since = 0.0  # the first packet; reset by the nursery's first message
        self._responded = False

    @classmethod
    def fork(cls, main: Callable[[NurseryLoop], None], blackboxes: int, lifeline: int) -> Nursery:
        """Fork a nursery from this process. `main` runs in the nursery."""
        # Unflushed output would be written again by every worker.
        private_names.flush_streams()
        with _starting(lifeline) as (ours, theirs, trainer, mask):
            pid = _fork()
            if pid == 0:
                status = 1
                try:
                    set_signals()
                    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                    ours.close()
                    gc.freeze()
                    main(NurseryLoop(theirs, trainer, blackboxes, lifeline))
                    status = 0
                except BaseException:
                    note_failure(theirs)
                finally:
                    os._exit(status)
        return cls._of(pid, ours)

    @classmethod
    def spawn(cls, payload: Payload, blackboxes: int, lifeline: int) -> Nursery:
        """Start a nursery in a fresh interpreter."""
        with _starting(lifeline) as (ours, theirs, trainer, _):
            fds = (theirs.fileno(), trainer, blackboxes, lifeline, payload.fd)
            command = [
                spawn.get_executable(),
                *private_names.interpreter_flags(),
                "-c",
                payload.program(fds, lifeline),
            ]
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=(*fds, *payload.fds),
                close_fds=True,
            )
        child.returncode = 0  # reaped here, not by Popen
        return cls._of(child.pid, ours)

    @classmethod
    def _of(cls, pid: int, control: socket.socket) -> Nursery:
        try:
            return cls(pid, control)
        except OSError:  # no descriptor left for it. Never leave an untracked process.
            control.close()  # which frees one for `end_child`
            kernel.end_child(pid)
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
        """Order a worker. It gets copies of `channel` and `arena`. `known_as` is its number for
        multiprocessing, if that is another.

        Raises an OSError if descriptors cannot be passed on now. Then nothing was ordered.
        """
        argument = len(setup), worker if known_as is None else known_as
        self._order(("start", worker, generation, argument), setup, [channel, arena])

    def signal(self, worker: int, generation: int, number: int) -> None:
        self._order(("signal", worker, generation, number))

    def stop(self, grace: float) -> None:
        """Order the nursery to end. Workers have `grace` seconds to exit by themselves."""
        self._order(("stop", 0, 0, grace))

    def _order(self, head: tuple[Any, ...], body: bytes = b"", fds: Sequence[int] = ()) -> None:
        parts = [pickle.dumps(head)]
        parts += [body[at : at + MESSAGE_BYTES] for at in range(0, len(body), MESSAGE_BYTES)]
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
        """Send the packets of an order. Returns how many were sent. Raises an OSError if a resource
        is exhausted and none was sent."""
        for number, part in enumerate(parts):
            try:
                self._send_one(part, () if number else fds)
            except BlockingIOError:
                return number
            except OSError as error:
                if error.errno not in SHORTAGES:
                    break  # the nursery is dead; the pool learns that from its handle
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
        """Whether there is a backlog that only waits until the socket is writable."""
        return bool(self._outbox) and not self._short

    def flush(self) -> None:
        """Send the packets in the outbox, until the socket is full."""
        self._short = False
        while self._outbox:
            packet, fds = self._outbox[0]
            try:
                self._send_one(packet, fds)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in SHORTAGES:
                    self._drop_outbox()  # the nursery is dead; the pool learns that from its handle
                    return
                self._short = True  # tried again later, not when the socket is writable
                return
            self._outbox.popleft()
            _close_all(fds)
            self._waits_since = time.monotonic()

    def is_unresponsive(self, now: float) -> bool:
        """Whether an order has waited so long that the nursery does not read its socket."""
        timeout = ORDER_TIMEOUT if self._responded else BOOT_ALLOWANCE
        return bool(self._outbox) and now - self._waits_since > timeout

    def give_up(self, how: str) -> None:
        """Kill it. `how` says so, so that this is not taken for a kill from outside."""
        self.given_up = how
        self.kill()

    def _drop_outbox(self) -> None:
        while self._outbox:
            _close_all(self._outbox.popleft()[1])

    def reports(self) -> list[Report] | None:
        """New reports; None when the nursery is dead and all its reports were read."""
        found: list[Report] = []
        while True:
            try:
                message = self.control.recv(MESSAGE_BYTES)
            except BlockingIOError:
                return found
            except ConnectionResetError:
                continue  # raised once, before the reports that are still queued
            except OSError:
                message = b""
            if not message:
                return found or None
            if not self._responded:
                self._responded, self._waits_since = True, time.monotonic()
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
        """As waitpid gives it, once it is reaped; None if other code has reaped it."""
        return self.process.status

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.disown()

    def disown(self) -> None:
        """Close all descriptors. The nursery does not notice if another process has copies."""
        self._drop_outbox()
        self.control.close()
        self.process.close()


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


def _fork() -> int:
    """``os.fork()``. Python 3.12 and later warn if other threads run, which may hold locks. That is
    left out if they only watch the pools of other loaders: a nursery uses no lock of theirs."""
    ours = sum(thread.name == "holdfast-watch" for thread in threading.enumerate())
    if ours == 0 or _threads() != 1 + ours:
        return os.fork()
    with warnings.catch_warnings():  # of all threads; but there is no other that could warn
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return -1


@contextlib.contextmanager
def _starting(
    lifeline: int,
) -> Iterator[tuple[socket.socket, socket.socket, int, set[int | signal.Signals]]]:
    """A socket pair between trainer and nursery, the nursery's handle on the trainer, and the
    previous signal mask. The ends of the nursery are closed afterwards.

    Signals are blocked: before the child ignores them, they would run the trainer's own handlers
    (to write a checkpoint, for example) in the nursery.
    """
    with contextlib.ExitStack() as after, contextlib.ExitStack() as on_error:
        ours, theirs = kernel.socket_pair()
        on_error.callback(ours.close)
        after.callback(theirs.close)
        trainer = kernel.own_handle(lifeline)
        after.callback(os.close, trainer)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
        after.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
        yield ours, theirs, trainer, mask
        on_error.pop_all()
