"""The loop inside the nursery: it forks workers, signals them and buries them.

It has one thread, one loop and one wait: its orders (a socket), its trainer (a pidfd, which neither
other holders of a socket nor the end of the thread that started us can fool), its children (SIGCHLD
writes to a pipe, as Python's signal handling offers it) and what they write to standard error (see
`tee.py`). It dies with the trainer and takes the workers along; if it is killed itself, the kernel
kills them. It is the only one that signals or reaps workers, so their pids stay theirs until it
has, and no signal can hit a stranger who got a dead worker's pid: that needs no pidfds.

Where the kernel has none for the trainer either, the end of a pipe takes their place (`kernel`).
A process that the user has forked may hold the other end too, so the nursery then looks once in a
second whether it still has the same parent. Where /proc is missing a worker cannot open the black
boxes for itself: the nursery gives it a file for its dump, and copies what is in it at its death.

A nursery that raises tells the trainer why before it goes (`confess`): its workers were not killed.
"""

from __future__ import annotations

import errno
import multiprocessing.process
import os
import pickle
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch.multiprocessing

from holdfast import kernel
from holdfast.autopsy import blackbox
from holdfast.autopsy.readers import process
from holdfast.engine import faults
from holdfast.engine.lifeline import arm
from holdfast.engine.tee import Tee

__all__ = [
    "IGNORED",
    "MESSAGE",
    "Born",
    "Deliver",
    "Died",
    "NotBorn",
    "Nurse",
    "Report",
    "Signalled",
    "confess",
    "set_signals",
]

# What schedulers and people send to the whole process group is meant for the trainer.
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_NOTED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # of those: whoever dies, may die of it
_CRASHES = {signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE}
MESSAGE = 64 * 1024  # bytes of an order, or of a part of it
PARENT = 1.0  # seconds between two looks whether the trainer is there, where no event tells
_CHUNK = 4096
DYING = 0.5  # seconds workers have to be gone after SIGKILL, when the pool closes


@dataclass(frozen=True)
class Born:
    worker: int
    generation: int
    pid: int


@dataclass(frozen=True)
class NotBorn:
    """It could not even be forked."""

    worker: int
    generation: int
    errno: int


@dataclass(frozen=True)
class Died:
    """A worker was reaped: `status` as waitpid gives it, `cpu` in seconds."""

    worker: int
    generation: int
    pid: int
    status: int
    cpu: float
    at: float  # monotonic; the first that is known of it
    grown: int | None  # bytes it had at most, beyond those it was born with
    cpu_limit: float | None  # the hard one, where the kernel kills; None: unlimited or not known
    handlers: bool | None  # whether it had handlers for crashes; None: not known
    group: dict[int, float]  # signals the nursery got too, and when (monotonic)


@dataclass(frozen=True)
class Signalled:
    """An order to send a signal was carried out."""

    worker: int
    generation: int
    signal: int


Deliver = Callable[[bytes, int, int, int, int | None], None]
"""What a worker does with its setup, channel, arena, the nursery's pid and a file for its dump."""
Report = Born | NotBorn | Died | Signalled


class Nurse:
    """The loop inside the nursery."""

    def __init__(
        self, control: socket.socket, trainer: int, blackboxes: int, lifeline: int, *others: int
    ) -> None:
        self.control = control
        self.trainer = trainer
        self.blackboxes = blackboxes
        self.lifeline = lifeline
        self.trainer_pid = os.getppid()
        self.children: dict[int, tuple[int, int]] = {}  # pid -> worker, generation
        self.dumps: dict[int, tuple[int, int]] = {}  # pid -> a file, and how many regions there are
        self.poll = select.poll()
        self.poll.register(control, select.POLLIN)
        self.poll.register(trainer, select.POLLIN)
        self.unsure = kernel.is_line(trainer)  # others may hold the end that tells of its death
        self.deaths, self._bell = kernel.pipe()
        self.poll.register(self.deaths, select.POLLIN)
        taken = (control.fileno(), trainer, blackboxes, lifeline, *others)
        self.tee = Tee(self.poll, blackboxes, taken)
        # A reader of the user's standard error that goes away is no reason for us to; nor is a
        # terminal that stops jobs in the background when they write to it.
        self.before = {
            number: signal.signal(number, signal.SIG_IGN)
            for number in (signal.SIGPIPE, signal.SIGTTOU)
        }
        self.group: dict[int, float] = {}
        os.set_blocking(self.deaths, False)
        os.set_blocking(self._bell, False)
        # In place of that of the trainer's event loop, which is to hear of its own only.
        signal.set_wakeup_fd(self._bell, warn_on_full_buffer=False)
        for number in _NOTED:
            signal.signal(number, self._note)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # or nothing would be written
        # A trainer that waits for its children with sigwait has it blocked.
        self.mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        self.deadline: float | None = None
        self.killed = False

    def serve(self, deliver: Deliver) -> None:
        """Fork workers with `deliver` until the trainer wants or needs no more."""
        torch.multiprocessing._set_thread_name(blackbox.NURSERY)
        arm(self.lifeline)
        while True:
            for fd, _ in self.poll.poll(self._timeout()):
                if fd == self.trainer:
                    self._abandon_all()
                    return
                if fd == self.deaths:
                    self._bury_the_dead()
                elif self.tee.owns(fd):
                    self.tee.serve(fd)
                elif fd != self.control.fileno():
                    continue  # closed by what we dealt with a moment ago
                elif not self._obey(deliver):
                    self._abandon_all()
                    return
            if self.unsure and os.getppid() != self.trainer_pid:
                self._abandon_all()
                return
            if self.deadline is not None:
                if not self.children:
                    self._finish()
                    return
                if time.monotonic() >= self.deadline:
                    if self.killed:  # something even SIGKILL does not end; the kernel has it noted
                        self._finish()
                        return
                    self._signal_all()
                    self.killed = True
                    self.deadline = time.monotonic() + DYING

    def _note(self, number: int, frame: object) -> None:
        """What reaches the nursery was sent to the whole group: it may be why a worker dies."""
        self.group[number] = time.monotonic()

    def _finish(self) -> None:
        set_signals()  # ignored is what an heir inherits
        self.tee.finish()

    def _timeout(self) -> float | None:
        if self.deadline is None:
            return PARENT * 1000 if self.unsure else None
        return max(0.0, self.deadline - time.monotonic()) * 1000 + 1

    def _obey(self, deliver: Deliver) -> bool:
        """Carry out one order; False when there will be none any more."""
        try:
            message, fds, _, _ = socket.recv_fds(self.control, MESSAGE, 2)
        except OSError:
            return False
        if not message:
            return False
        order, worker, generation, argument = pickle.loads(message)
        if order == "start":
            size, known_as = argument
            setup = self._receive(size)
            if setup is None:
                return False
            self._bear(deliver, worker, generation, setup, fds, known_as)
        elif order == "signal":
            self._signal(worker, generation, argument)
        else:
            self.deadline = time.monotonic() + argument
        return True

    def _receive(self, size: int) -> bytes | None:
        """The rest of an order; None if it does not come."""
        parts: list[bytes] = []
        while size > 0:
            part = self.control.recv(MESSAGE)
            if not part:
                return None
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _bear(
        self,
        deliver: Deliver,
        worker: int,
        generation: int,
        setup: bytes,
        fds: list[int],
        known_as: int,
    ) -> None:
        """`known_as` is its number for multiprocessing: a rehearsal has that of the worker it
        rehearses, since a dataset may seed itself or choose its part of the files by it."""
        nursery = os.getpid()
        dump: int | None = None
        taken, fds = fds, []
        try:
            while taken:
                fds.append(kernel.above_stdio(taken.pop(0)))
            if len(fds) < 2:  # the kernel drops those for which we have no room
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            channel, arena = fds
            words = self.tee.open(worker)
            if words is not None:
                fds = [*fds, words]
            if not blackbox.can_be_opened(self.blackboxes):
                dump = kernel.memory_file("holdfast-dump")
            faults.strike_start("fork", worker, generation)
            pid = os.fork()
        except OSError as error:
            for fd in (*taken, *fds, *(() if dump is None else (dump,))):
                os.close(fd)
            self._report(NotBorn(worker, generation, error.errno or 0))
            return
        if pid == 0:
            status = 1
            try:
                self.control.close()
                os.close(self.trainer)
                signal.set_wakeup_fd(-1)
                os.close(self.deaths)
                os.close(self._bell)
                for other, _ in self.dumps.values():
                    os.close(other)
                self.tee.in_worker(words)
                for number, handler in self.before.items():
                    signal.signal(number, handler or signal.SIG_DFL)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)
                status = _bootstrap(
                    known_as,
                    self.trainer_pid,
                    lambda: deliver(setup, channel, arena, nursery, dump),
                )
            finally:
                os._exit(status)
        for fd in fds:
            os.close(fd)
        self.children[pid] = (worker, generation)
        if dump is not None:
            self.dumps[pid] = dump, pickle.loads(setup).regions
        self._report(Born(worker, generation, pid))

    def _bury_the_dead(self) -> None:
        """One signal may stand for several deaths, or for none."""
        try:
            while os.read(self.deaths, _CHUNK):
                pass
        except BlockingIOError:
            pass  # all read, before we look
        for pid in list(self.children):
            if kernel.has_ended(pid):
                self._bury(pid)

    def _bury(self, pid: int) -> None:
        at = time.monotonic()
        worker, generation = self.children[pid]
        limit = _cpu_limit(pid)  # which the dead have until they are reaped, as they have these:
        caught = process.caught_signals(pid)
        reaped, status, usage = os.wait4(pid, os.WNOHANG)
        if not reaped:
            return  # it lives: only reaping it could tell
        del self.children[pid]
        if pid in self.dumps:
            dump, regions = self.dumps.pop(pid)
            blackbox.keep_dump(self.blackboxes, regions, worker, dump)
            os.close(dump)
        self.tee.emptied(worker, told=status != 0 and self.deadline is None)
        cpu = usage.ru_utime + usage.ru_stime
        # The one that ends it is no longer among them.
        handlers = None if caught is None else len(_CRASHES & caught) >= len(_CRASHES) - 1
        grown = _grown(usage.ru_maxrss << 10)
        self._report(
            Died(worker, generation, pid, status, cpu, at, grown, limit, handlers, dict(self.group))
        )

    def _signal(self, worker: int, generation: int, number: int) -> None:
        for pid, known in self.children.items():
            if known == (worker, generation):
                if number == signal.SIGABRT:  # for its stack, not for a core file of it
                    kernel.set_limit_of(pid, resource.RLIMIT_CORE, 0, 0)
                os.kill(pid, number)
        self._report(Signalled(worker, generation, number))

    def _abandon_all(self) -> None:
        """Nobody is there any more to close the pool."""
        self._signal_all()
        self.tee.empty()

    def _signal_all(self) -> None:
        for pid in self.children:
            os.kill(pid, signal.SIGKILL)

    def _report(self, report: Report) -> None:
        try:
            self.control.send(pickle.dumps(report))
        except OSError:
            pass  # the trainer is going; we are about to see that too


def confess(control: socket.socket) -> None:
    """In a nursery that has raised: tell the trainer why."""
    text = traceback.format_exc()[-MESSAGE // 2 :]
    try:
        control.send(pickle.dumps(text), socket.MSG_DONTWAIT)
    except OSError:  # nobody listens any more
        sys.excepthook(*sys.exc_info())


class _Process(multiprocessing.process.BaseProcess):
    """What `multiprocessing.current_process()` says in a worker: the same as in torch's."""

    _start_method = None

    def __init__(self, worker: int, trainer: int, body: Callable[[], None]) -> None:
        super().__init__(name=f"Process-{worker + 1}", daemon=True)
        self._identity = (*self._identity[:-1], worker + 1)
        self._parent_pid = trainer
        self._body = body

    def run(self) -> None:
        self._body()


def _grown(most: int) -> int | None:
    """How far a worker that had `most` bytes has outgrown the process it was forked from: us."""
    size = process.size("self")
    return None if size is None else max(0, most - size.resident)


def _cpu_limit(pid: int) -> float | None:
    limits = kernel.limit_of(pid, resource.RLIMIT_CPU)
    if limits is None or limits[1] == resource.RLIM_INFINITY:
        return None
    return float(limits[1])


def _bootstrap(worker: int, trainer: int, body: Callable[[], None]) -> int:
    """Run `body` as multiprocessing runs the target of a process; the exit status."""
    status: int = _Process(worker, trainer, body)._bootstrap()  # type: ignore[attr-defined]
    return status


def set_signals() -> None:
    """What is meant for the trainer is ignored; our children are ours to wait for."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    # A handler of the trainer's that reaps all children, or SIG_IGN, would take away the status.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
