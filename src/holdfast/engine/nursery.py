"""The nursery: a small process that forks the workers of one pool and buries them.

A replacement forked from the trainer would inherit what the trainer has become by then: threads
that no longer run but still hold their locks, a dead OpenMP pool, CUDA, gigabytes of page tables
(`fork-lock-deadlock`, `fork-enomem`). So the trainer forks once, when torch would fork its workers,
and that child does nothing but fork: first workers and replacements alike, from the same early
image, in about a millisecond. Under spawn and forkserver the nursery is a fresh interpreter that
has imported torch and nothing of the user's; each worker unpickles the one blob that the trainer
wrote, in its own process, so nothing the user's modules start can be lost in a fork.

It has one thread, one loop and one wait: its orders (a socket), its trainer (a pidfd, which neither
other holders of a socket nor the end of the thread that started us can fool), and its children
(pidfds) with what they write to standard error (see `tee.py`). It dies with the trainer and takes
the workers along; if it is killed itself, the kernel kills them. It is the only one that signals or
reaps workers, so no signal can hit a stranger who got a dead worker's pid.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import mmap
import multiprocessing.process
import os
import pickle
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import resource_tracker, spawn, util
from multiprocessing.context import get_spawning_popen, set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch.multiprocessing

from holdfast.autopsy.blackbox import NURSERY
from holdfast.autopsy.readers import process
from holdfast.engine import faults, interrupts
from holdfast.engine.lifeline import ARM, arm
from holdfast.engine.protocol import Equipment
from holdfast.engine.tee import Tee
from holdfast.memory import codec, threads

__all__ = [
    "SHORTAGES",
    "Born",
    "Died",
    "NotBorn",
    "Nurse",
    "Nursery",
    "Report",
    "Signalled",
    "spawn_payload",
]

# What schedulers and people send to the whole process group is meant for the trainer.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_NOTED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # of those: whoever dies, may die of it
_CRASHES = {signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE}
_MESSAGE = 64 * 1024
DYING = 0.5  # seconds workers have to be gone after SIGKILL, when the pool closes
SHORTAGES = frozenset(
    getattr(errno, name)
    for name in ("EAGAIN", "ENOMEM", "EMFILE", "ENFILE", "ENOSPC", "ENOBUFS", "ETOOMANYREFS")
)
"""Errors for lack of something that somebody may give back."""


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
    cpu_limit: float | None  # the hard one, where the kernel kills; None: unlimited or not known
    handlers: bool | None  # whether it had handlers for crashes; None: not known
    group: dict[int, float]  # signals the nursery got too, and when (monotonic)


@dataclass(frozen=True)
class Signalled:
    """An order to send a signal was carried out."""

    worker: int
    generation: int
    signal: int


Report = Born | NotBorn | Died | Signalled


class Nursery:
    """The trainer's handle on its nursery."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.control = control
        control.setblocking(False)
        self.reaped = False
        self.status: int | None = None  # when it is reaped, unless somebody else has done it
        self.closed = False

    @classmethod
    def fork(cls, nurse: Callable[[Nurse], None], blackboxes: int, lifeline: int) -> Nursery:
        """Fork a nursery from this process. `nurse` runs in it and never returns here."""
        # What waits to be written would be written again by every worker.
        util._flush_std_streams()  # type: ignore[attr-defined]
        ours, theirs, trainer = _connections()
        # A signal between the fork and the moment the child ignores it would run the trainer's
        # own handler, a checkpoint perhaps, in the nursery.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
        try:
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    interrupts.restore()
                    _set_signals()
                    signal.pthread_sigmask(signal.SIG_SETMASK, before)
                    ours.close()
                    gc.freeze()
                    nurse(Nurse(theirs, trainer, blackboxes, lifeline))
                    status = 0
                except BaseException:
                    sys.excepthook(*sys.exc_info())
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
        ours, theirs, trainer = _connections()
        fds = (theirs.fileno(), trainer, blackboxes, lifeline, payload.fd)
        command = [
            spawn.get_executable(),
            *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
            "-c",
            ARM.format(fd=lifeline) + _SPAWNED.format(payload=payload.fd, fds=fds),
        ]
        # Signals wait until the child has learned to ignore them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
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

    def start(self, worker: int, generation: int, setup: bytes, channel: int, arena: int) -> None:
        """Order a worker. It gets copies of `channel` and `arena`.

        An OSError if descriptors cannot be passed on now; nothing was ordered then.
        """
        self._order(("start", worker, generation, len(setup)), setup, [channel, arena])

    def signal(self, worker: int, generation: int, number: int) -> None:
        self._order(("signal", worker, generation, number))

    def stop(self, grace: float) -> None:
        """Order the end: workers have `grace` seconds to go by themselves."""
        self._order(("stop", 0, 0, grace))

    def _order(
        self, head: tuple[Any, ...], body: bytes = b"", fds: list[int] | None = None
    ) -> None:
        parts = [pickle.dumps(head)]
        parts += [body[at : at + _MESSAGE] for at in range(0, len(body), _MESSAGE)]
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
                        return  # it is gone; the pool learns that from the pidfd
                    if number == 0:
                        raise
                    self.kill()  # it waits for the rest, which cannot be sent
                    return

    def reports(self) -> list[Report] | None:
        """What has happened; None when the nursery is gone and has said everything."""
        found: list[Report] = []
        while True:
            try:
                message = self.control.recv(_MESSAGE)
            except BlockingIOError:
                return found
            except ConnectionResetError:
                continue  # said once; what it reported before comes after it
            except OSError:
                message = b""
            if not message:
                return found or None
            found.append(pickle.loads(message))

    def gone(self) -> bool:
        """Whether the nursery is dead, reaped or not."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def kill(self) -> None:
        try:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def wait(self, timeout: float) -> bool:
        """Reap the nursery if it ends in time."""
        if self.reaped:
            return True
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        if not poll.poll(max(0, timeout * 1000)):
            return False
        try:
            _, self.status = os.waitpid(self.pid, 0)
        except ChildProcessError:
            pass  # somebody waited for all children of this process
        self.reaped = True
        return True

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.control.close()
        os.close(self.pidfd)
        self.pidfd = -1


class Nurse:
    """The loop inside the nursery."""

    def __init__(
        self, control: socket.socket, trainer: int, blackboxes: int, lifeline: int, *others: int
    ) -> None:
        self.control = control
        self.trainer = trainer
        self.lifeline = lifeline
        self.trainer_pid = os.getppid()
        self.children: dict[int, tuple[int, int, int]] = {}  # pidfd -> pid, worker, generation
        self.poll = select.poll()
        self.poll.register(control, select.POLLIN)
        self.poll.register(trainer, select.POLLIN)
        taken = (control.fileno(), trainer, blackboxes, lifeline, *others)
        self.tee = Tee(self.poll, blackboxes, taken)
        # A reader of the user's standard error that goes away is no reason for us to; nor is a
        # terminal that stops jobs in the background when they write to it.
        self.before = {
            number: signal.signal(number, signal.SIG_IGN)
            for number in (signal.SIGPIPE, signal.SIGTTOU)
        }
        self.group: dict[int, float] = {}
        signal.set_wakeup_fd(-1)  # of the trainer's event loop, which is to hear of its own only
        for number in _NOTED:
            signal.signal(number, self._note)
        self.deadline: float | None = None
        self.killed = False

    def serve(self, deliver: Callable[[bytes, int, int, int], None]) -> None:
        """Fork workers with `deliver` until the trainer wants or needs no more."""
        torch.multiprocessing._set_thread_name(NURSERY)
        arm(self.lifeline)
        while True:
            for fd, _ in self.poll.poll(self._timeout()):
                if fd == self.trainer:
                    self._abandon_all()
                    return
                if fd in self.children:
                    self._bury(fd)
                elif self.tee.owns(fd):
                    self.tee.serve(fd)
                elif fd != self.control.fileno():
                    continue  # closed by what we dealt with a moment ago
                elif not self._obey(deliver):
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
        _set_signals()  # ignored is what an heir inherits
        self.tee.finish()

    def _timeout(self) -> float | None:
        if self.deadline is None:
            return None
        return max(0.0, self.deadline - time.monotonic()) * 1000 + 1

    def _obey(self, deliver: Callable[[bytes, int, int, int], None]) -> bool:
        """Carry out one order; False when there will be none any more."""
        try:
            message, fds, _, _ = socket.recv_fds(self.control, _MESSAGE, 2)
        except OSError:
            return False
        if not message:
            return False
        order, worker, generation, argument = pickle.loads(message)
        if order == "start":
            setup = b""
            while len(setup) < argument:
                part = self.control.recv(_MESSAGE)
                if not part:
                    return False
                setup += part
            self._bear(deliver, worker, generation, setup, fds)
        elif order == "signal":
            self._signal(worker, generation, argument)
        else:
            self.deadline = time.monotonic() + argument
        return True

    def _bear(
        self,
        deliver: Callable[[bytes, int, int, int], None],
        worker: int,
        generation: int,
        setup: bytes,
        fds: list[int],
    ) -> None:
        nursery = os.getpid()
        try:
            if len(fds) < 2:  # the kernel drops those for which we have no room
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            channel, arena = fds
            words = self.tee.open(worker)
            if words is not None:
                fds = [*fds, words]
            faults.strike_start("fork", worker, generation)
            pid = os.fork()
        except OSError as error:
            for fd in fds:
                os.close(fd)
            self._report(NotBorn(worker, generation, error.errno or 0))
            return
        if pid == 0:
            status = 1
            try:
                self.control.close()
                os.close(self.trainer)
                for pidfd in self.children:
                    os.close(pidfd)
                self.tee.in_worker(words)
                for number, handler in self.before.items():
                    signal.signal(number, handler or signal.SIG_DFL)
                status = _bootstrap(
                    worker, self.trainer_pid, lambda: deliver(setup, channel, arena, nursery)
                )
            finally:
                os._exit(status)
        for fd in fds:
            os.close(fd)  # which leaves room for one to hold the child by
        pidfd = os.pidfd_open(pid)
        self.children[pidfd] = (pid, worker, generation)
        self.poll.register(pidfd, select.POLLIN)
        self._report(Born(worker, generation, pid))

    def _bury(self, pidfd: int) -> None:
        pid, worker, generation = self.children[pidfd]
        limit = _cpu_limit(pid)  # which the dead have until they are reaped, as they have these:
        caught = process.caught_signals(pid)
        reaped, status, usage = os.wait4(pid, os.WNOHANG)
        if not reaped:
            return  # the event was for a descriptor that had this number a moment ago
        del self.children[pidfd]
        self.poll.unregister(pidfd)
        os.close(pidfd)
        self.tee.emptied(worker, told=status != 0 and self.deadline is None)
        cpu = usage.ru_utime + usage.ru_stime
        # The one that ends it is no longer among them.
        handlers = None if caught is None else len(_CRASHES & caught) >= len(_CRASHES) - 1
        self._report(Died(worker, generation, pid, status, cpu, limit, handlers, dict(self.group)))

    def _signal(self, worker: int, generation: int, number: int) -> None:
        for pidfd, (pid, one, other) in self.children.items():
            if (one, other) == (worker, generation):
                if number == signal.SIGABRT:  # for its stack, not for a core file of it
                    with contextlib.suppress(OSError):  # a sandbox may forbid it
                        resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
                signal.pidfd_send_signal(pidfd, number)
        self._report(Signalled(worker, generation, number))

    def _abandon_all(self) -> None:
        """Nobody is there any more to close the pool."""
        self._signal_all()
        self.tee.empty()

    def _signal_all(self) -> None:
        for pidfd in self.children:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def _report(self, report: Report) -> None:
        try:
            self.control.send(pickle.dumps(report))
        except OSError:
            pass  # the trainer is going; the pidfd says so too


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


def _cpu_limit(pid: int) -> float | None:
    try:
        hard = resource.prlimit(pid, resource.RLIMIT_CPU)[1]
    except OSError:
        return None  # a sandbox may forbid it
    return None if hard == resource.RLIM_INFINITY else float(hard)


def _bootstrap(worker: int, trainer: int, body: Callable[[], None]) -> int:
    """Run `body` as multiprocessing runs the target of a process; the exit status."""
    status: int = _Process(worker, trainer, body)._bootstrap()  # type: ignore[attr-defined]
    return status


def _set_signals() -> None:
    """What is meant for the trainer is ignored; our children are ours to wait for."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    # A handler of the trainer's that reaps all children, or SIG_IGN, would take away the status.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _connections() -> tuple[socket.socket, socket.socket, int]:
    """Between trainer and nursery: either end, and the nursery's hold on the trainer."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        return ours, theirs, os.pidfd_open(os.getpid())
    except OSError:
        ours.close()
        theirs.close()
        raise


# -- under spawn and forkserver -----------------------------------------------------------


@dataclass
class Payload:
    """The blueprint, pickled once, in a memory file, with the descriptors it refers to."""

    fd: int
    fds: tuple[int, ...]
    method: str  # what the user calls the way it is started

    def close(self) -> None:
        os.close(self.fd)
        for fd in self.fds:
            os.close(fd)


class _Popen:
    """Stands in for multiprocessing's Popen while the blueprint is pickled.

    Locks, queues, pipes and shared tensors inside a dataset ask it to carry their descriptors to
    the child. They go to the nursery under the same numbers, and by fork to every worker.
    """

    def __init__(self) -> None:
        self.fds: list[int] = []

    class DupFd:
        def __init__(self, fd: int) -> None:
            self.fd = fd

        def detach(self) -> int:
            return self.fd

    def duplicate_for_child(self, fd: int) -> int:
        copy = os.dup(fd)
        self.fds.append(copy)
        return copy


def spawn_payload(blueprint: Any, start_method: str) -> Payload:
    """Pickle what a spawned nursery needs. Raises what pickling raises."""
    popen: Any = _Popen()
    fd = os.memfd_create("holdfast-blueprint")
    before = get_spawning_popen()
    set_spawning_popen(popen)
    try:
        preparation: Any = spawn.get_preparation_data("Process-1")
        preparation["start_method"] = start_method
        resource_tracker.ensure_running()
        tracker = popen.duplicate_for_child(resource_tracker.getfd())
        with open(fd, "wb", closefd=False) as file:
            pickle.dump((list(sys.path), tracker), file)
            pickled = ForkingPickler.dumps(preparation, 5)
            file.write(_LENGTH.pack(len(pickled)))
            file.write(pickled)
            file.write(codec.encode_for_start(blueprint))
    except BaseException:
        Payload(fd, tuple(popen.fds), start_method).close()
        raise
    finally:
        set_spawning_popen(before)
    return Payload(fd, tuple(popen.fds), start_method)


_LENGTH = struct.Struct("<q")
_SPAWNED = """\
import pickle, sys
file = open({payload}, "rb", closefd=False)
file.seek(0)
sys.path[:], tracker = pickle.load(file)
from holdfast.engine.nursery import serve_spawned
serve_spawned(file.tell(), tracker, *{fds})
"""


def serve_spawned(
    at: int,
    tracker: int,
    control: int,
    trainer: int,
    blackboxes: int,
    lifeline: int,
    payload: int,
) -> None:
    """The main function of a spawned nursery."""
    _set_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]
    from holdfast.engine import worker  # imports torch, once for all workers

    def find_blueprint() -> Any:
        process: Any = multiprocessing.process.current_process()
        name = process.name
        process._inheriting = True  # multiprocessing's sign that the main module is being imported
        try:
            # Not closed: a traceback of what went wrong here may hold a view of it.
            view = memoryview(mmap.mmap(payload, 0, access=mmap.ACCESS_READ))
            size = _LENGTH.unpack_from(view, at)[0]
            start = at + _LENGTH.size
            spawn.prepare(pickle.loads(view[start : start + size]))
            blueprint = codec.decode(view[start + size :], None)
            threads.limit()  # of the libraries that have just been loaded
            return blueprint
        finally:
            del process._inheriting
            process.name = name

    def deliver(setup: bytes, channel: int, arena: int, parent: int) -> None:
        equipment = Equipment(channel, arena, blackboxes, parent, lifeline)
        worker.run(pickle.loads(setup), equipment, find_blueprint)

    status = 1
    try:
        gc.collect()
        gc.freeze()
        with socket.socket(fileno=control) as line:
            Nurse(line, trainer, blackboxes, lifeline, payload).serve(deliver)
        status = 0
    finally:
        os._exit(status)
