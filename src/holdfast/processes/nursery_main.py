"""The loop inside the nursery: it forks workers, signals them and reaps them.

It has one thread, one loop and one wait, for four things: orders (a socket), the end of the trainer
(a pidfd), the end of its children (SIGCHLD writes to a pipe, with Python's ``set_wakeup_fd``) and
what they write to standard error (see `stderr`). A pidfd is reliable even if other processes hold
copies of the socket, and if the thread that started the nursery ends.

When the trainer ends, the nursery kills the workers and exits. If the nursery is killed, the kernel
kills the workers. Only the nursery signals and reaps workers, so the pid of a worker stays valid
until the nursery has reaped it: no signal can hit another process that got the pid of a dead
worker, and no pidfds of workers are needed.

Where the kernel has no pidfds, the end of a pipe tells of the trainer's end (`kernel`). A process
that the user has forked may hold the other end too, so the nursery then also checks once a second
whether its parent is still the same. Where /proc is missing, a worker cannot open the black boxes
(memory that survives a worker) itself: the nursery gives it a file for its stack dump, and copies
its contents when the worker dies.

A nursery that raises sends its traceback to the trainer before it exits (`note_failure`), so that
its workers are not reported as killed.
"""

from __future__ import annotations

import contextlib
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
from typing import NoReturn

from holdfast import kernel, private_names
from holdfast.autopsy import blackbox
from holdfast.autopsy.readers import procfs
from holdfast.processes.lifeline import arm
from holdfast.processes.nursery_reports import (
    MESSAGE_BYTES,
    Died,
    Forked,
    ForkFailed,
    Report,
    Signalled,
)
from holdfast.processes.spare import Assignment, Spare, await_assignment
from holdfast.processes.stderr import StderrTee
from holdfast.worker import faults

# A scheduler, or a user at a terminal, sends these to the process group, for the trainer to handle.
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_NOTED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # of these: workers may die of them
_CRASH_SIGNALS = {signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE}
PARENT_CHECK_SECONDS = 1.0  # between two checks of the parent's pid, if they are needed
_CHUNK_BYTES = 4096
FIRST_SPARE_DELAY = 2.0  # seconds after the last first worker was started: many pools end sooner
SPARE_DELAY = 0.1  # seconds after a worker was replaced: until then it needs the processor itself
KILL_GRACE = 0.5  # seconds that workers have to end after SIGKILL, when the pool closes


Deliver = Callable[[Assignment, int], None]
"""Called in a worker with its assignment and the nursery's pid."""


class NurseryLoop:
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
        # pid -> its file, and the number of black boxes
        self.dumps: dict[int, tuple[int, int]] = {}
        self.poll = select.poll()
        self.poll.register(control, select.POLLIN)
        self.poll.register(trainer, select.POLLIN)
        self.unsure = kernel.is_line(trainer)  # a pipe, whose other end others may hold too
        self.deaths, self._wakeup = kernel.pipe()
        self.poll.register(self.deaths, select.POLLIN)
        taken = (control.fileno(), trainer, blackboxes, lifeline, *others)
        self.tee = StderrTee(self.poll, blackboxes, taken)
        # The nursery must survive when the reader of the user's standard error exits, and must not
        # stop when a terminal stops background jobs that write to it.
        self.before = {
            number: signal.signal(number, signal.SIG_IGN)
            for number in (signal.SIGPIPE, signal.SIGTTOU)
        }
        self.group: dict[int, float] = {}
        os.set_blocking(self.deaths, False)
        os.set_blocking(self._wakeup, False)
        # Replaces the descriptor of the trainer's event loop, which must not get our signals.
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        for number in _NOTED_SIGNALS:
            signal.signal(number, self._note_group_signal)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # needed for the wake-up
        # It is blocked if the trainer waits for its children with sigwait.
        self.mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        self.deadline: float | None = None
        self.killed = False
        self.spare: Spare | None = None
        self.spare_at: float | None = None  # monotonic; when to fork one

    def serve(self, deliver: Deliver, warm_up: Callable[[int], None]) -> None:
        """Fork workers, which run `deliver`, until the trainer ends or orders the end. A process
        that is forked before it is needed runs `warm_up` first, with the nursery's pid."""
        self._deliver, self._warm_up = deliver, warm_up
        private_names.set_thread_name(blackbox.NURSERY)
        arm(self.lifeline)
        while True:
            for fd, _ in self.poll.poll(self._timeout()):
                if fd == self.trainer:
                    self._abandon_all()
                    return
                if fd == self.deaths:
                    self._reap_all()
                elif self.tee.owns(fd):
                    self.tee.serve(fd)
                elif fd != self.control.fileno():
                    continue  # closed while an earlier event of this round was handled
                elif not self._obey():
                    self._abandon_all()
                    return
            if self.unsure and os.getppid() != self.trainer_pid:
                self._abandon_all()
                return
            if self.spare_at is not None and time.monotonic() >= self.spare_at:
                self._fork_spare(warm=True)
            if self.deadline is not None:
                if not self.children:
                    self._finish()
                    return
                if time.monotonic() >= self.deadline:
                    if self.killed:  # SIGKILL is pending for a process stuck in the kernel
                        self._finish()
                        return
                    self._signal_all()
                    self.killed = True
                    self.deadline = time.monotonic() + KILL_GRACE

    def _note_group_signal(self, number: int, frame: object) -> None:
        """A signal that reaches the nursery was sent to the whole group. Workers may die of it."""
        self.group[number] = time.monotonic()

    def _finish(self) -> None:
        self._forget_spare()
        set_signals()  # a process that `tee.finish` starts inherits which ones are ignored
        self.tee.finish()

    def _timeout(self) -> float | None:
        """Milliseconds."""
        until = self.spare_at if self.deadline is None else self.deadline
        if until is not None:
            return max(0.0, until - time.monotonic()) * 1000 + 1
        return PARENT_CHECK_SECONDS * 1000 if self.unsure else None

    def _obey(self) -> bool:
        """Carry out one order. Returns False if there will be no more."""
        try:
            message, fds, _, _ = socket.recv_fds(self.control, MESSAGE_BYTES, 2)
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
            self._start_worker(worker, generation, setup, fds, known_as)
        elif order == "signal":
            self._signal(worker, generation, argument)
        else:
            self.deadline = time.monotonic() + argument
            self._end_spare()
        return True

    def _receive(self, size: int) -> bytes | None:
        """The rest of an order; None if the trainer has ended."""
        parts: list[bytes] = []
        while size > 0:
            part = self.control.recv(MESSAGE_BYTES)
            if not part:
                return None
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _start_worker(
        self, worker: int, generation: int, setup: bytes, fds: list[int], known_as: int
    ) -> None:
        """`known_as` is the number for multiprocessing. A rehearsal has that of the worker it
        stands for, because a dataset may choose its seed or its part of the files by it."""
        dump: int | None = None
        taken, fds = fds, []
        try:
            while taken:
                fds.append(kernel.above_stdio(taken.pop(0)))
            if len(fds) < 2:  # the kernel drops those that exceed our limit
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            channel, arena = fds
            stderr = self.tee.open(worker)
            if stderr is not None:
                fds = [*fds, stderr]
            if not blackbox.can_be_opened(self.blackboxes):
                dump = kernel.memory_file("holdfast-dump")
            faults.strike_start("fork", worker, generation)
            assignment = Assignment(known_as, setup, channel, arena, stderr, dump)
            pid = self._use_spare(assignment) or self._fork_worker(assignment)
        except OSError as error:
            for fd in (*taken, *fds, *(() if dump is None else (dump,))):
                os.close(fd)
            self._report(ForkFailed(worker, generation, error.errno or 0))
            return
        for fd in fds:
            os.close(fd)
        self.children[pid] = (worker, generation)
        if dump is not None:
            self.dumps[pid] = dump, pickle.loads(setup).regions
        self._report(Forked(worker, generation, pid))
        self.spare_at = time.monotonic() + (SPARE_DELAY if generation else FIRST_SPARE_DELAY)

    def _fork_worker(self, assignment: Assignment) -> int:
        """Returns its pid. Raises OSError if there is no room for it."""
        nursery = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._be(
                _Process(assignment.known_as, self.trainer_pid),
                lambda _: self._deliver(assignment, nursery),
                assignment.stderr,
            )
        return pid

    def _use_spare(self, assignment: Assignment) -> int | None:
        """Make the spare this worker, if there is one. Returns its pid."""
        self._reap_spare()
        spare, self.spare = self.spare, None
        if spare is None:
            return None
        if spare.assign(assignment):
            return spare.pid
        spare.end()
        return None

    def _fork_spare(self, *, warm: bool) -> None:
        """Fork a process for the next worker that has to be replaced. If there is no room for it,
        that worker will be forked when it is needed."""
        self.spare_at = None
        self._reap_spare()
        if self.spare is not None or self.deadline is not None:
            return
        try:
            ours, theirs = kernel.socket_pair()
        except OSError:
            return
        nursery = os.getpid()

        def wait(process: _Process) -> None:
            ours.close()
            with contextlib.suppress(OSError):  # without descriptors or memory it stays cold
                if warm:
                    self._warm_up(nursery)
            assignment = await_assignment(theirs)
            if assignment is None:
                return
            process.become(assignment.known_as)
            self.tee.replace(assignment.stderr)
            self._deliver(assignment, nursery)

        with theirs:
            try:
                pid = os.fork()
            except OSError:
                ours.close()
                return
            if pid == 0:
                self._be(_Process(0, self.trainer_pid), wait, None)
        self.spare = Spare(pid, ours)
        if warm:
            _touch(pid)

    def _be(
        self, process: _Process, target: Callable[[_Process], None], stderr: int | None
    ) -> NoReturn:
        """In a forked process: leave the nursery, and run `target` as multiprocessing would."""
        status = 1
        try:
            self.control.close()
            os.close(self.trainer)
            signal.set_wakeup_fd(-1)
            os.close(self.deaths)
            os.close(self._wakeup)
            for other, _ in self.dumps.values():
                os.close(other)
            if self.spare is not None:
                self.spare.close()
            self.tee.in_worker(stderr)
            for number, handler in self.before.items():
                signal.signal(number, handler or signal.SIG_DFL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)
            status = process.run_to_its_end(target)
        finally:
            os._exit(status)

    def _reap_spare(self) -> None:
        """The spare may have been killed."""
        if self.spare is not None and self.spare.ended():
            self._forget_spare()

    def _reap_all(self) -> None:
        """Reap all children that have ended. One signal may stand for several of them, or for
        none."""
        try:
            while os.read(self.deaths, _CHUNK_BYTES):
                pass
        except BlockingIOError:
            pass  # emptied, before the children are checked
        self._reap_spare()
        for pid in list(self.children):
            if kernel.has_ended(pid):
                self._reap(pid)

    def _reap(self, pid: int) -> None:
        at = time.monotonic()
        worker, generation = self.children[pid]
        # Both are known until the process is reaped.
        limit, handlers = _cpu_limit(pid), _has_handlers(pid)
        reaped, status, usage = os.wait4(pid, os.WNOHANG)
        if not reaped:
            return  # it has not ended after all
        del self.children[pid]
        if pid in self.dumps:
            dump, regions = self.dumps.pop(pid)
            blackbox.keep_dump(self.blackboxes, regions, worker, dump)
            os.close(dump)
        self.tee.drain(worker, reported=status != 0 and self.deadline is None)
        cpu = usage.ru_utime + usage.ru_stime
        grown = _grown(usage.ru_maxrss << 10)
        self._report(
            Died(worker, generation, pid, status, cpu, at, grown, limit, handlers, dict(self.group))
        )
        if status != 0 and self.deadline is None:
            self._fork_spare(warm=False)  # while the trainer reads what is left of the dead worker

    def _signal(self, worker: int, generation: int, number: int) -> None:
        for pid, known in self.children.items():
            if known == (worker, generation):
                if number == signal.SIGABRT:  # to get its stack, without a core file
                    kernel.set_limit_of(pid, resource.RLIMIT_CORE, 0, 0)
                os.kill(pid, number)
        self._report(Signalled(worker, generation, number))

    def _abandon_all(self) -> None:
        """The trainer has ended without closing the pool."""
        self._signal_all()
        self.tee.empty()
        self._forget_spare()

    def _forget_spare(self) -> None:
        """Reap it, if there is one."""
        if self.spare is not None:
            self.spare.end()
            self.spare = None

    def _end_spare(self) -> None:
        self.spare_at = None
        if self.spare is not None:
            self.spare.kill()

    def _signal_all(self) -> None:
        self._end_spare()
        for pid in self.children:
            os.kill(pid, signal.SIGKILL)

    def _report(self, report: Report) -> None:
        try:
            self.control.send(pickle.dumps(report))
        except OSError:
            pass  # the trainer has ended, which the next poll shows


def note_failure(control: socket.socket) -> None:
    """In a nursery that has raised: tell the trainer why."""
    text = traceback.format_exc()[-MESSAGE_BYTES // 2 :]
    try:
        control.send(pickle.dumps(text), socket.MSG_DONTWAIT)
    except OSError:  # the trainer has ended
        sys.excepthook(*sys.exc_info())


class _Process(multiprocessing.process.BaseProcess):
    """What `multiprocessing.current_process()` returns in a worker: the same as in torch's."""

    _start_method = None

    def __init__(self, worker: int, trainer: int) -> None:
        super().__init__(daemon=True)
        self._parent_pid = trainer
        self.become(worker)

    def become(self, worker: int) -> None:
        self._name = f"Process-{worker + 1}"
        self._identity = (*self._identity[:-1], worker + 1)

    def run_to_its_end(self, target: Callable[[_Process], None]) -> int:
        """Run `target` as multiprocessing would. Returns the exit status."""
        self._function = target
        private_names.forget_exit_functions()
        try:
            status: int = self._bootstrap()  # type: ignore[attr-defined]
            return status
        finally:
            private_names.run_exit_functions()

    def run(self) -> None:
        self._function(self)


def _grown(most: int) -> int | None:
    """How much larger than this process, from which it was forked, a worker of `most` bytes was."""
    size = procfs.size("self")
    return None if size is None else max(0, most - size.resident)


def _touch(pid: int) -> None:
    """After a fork the first write to a page copies it. Do for a living child what has to be done
    for a dead one, so that the copies are made before the trainer waits for them."""
    kernel.has_ended(pid)
    died = Died(
        0, 0, pid, 0, 0.0, time.monotonic(), _grown(0), _cpu_limit(pid), _has_handlers(pid), {}
    )
    pickle.loads(pickle.dumps((died, Forked(0, 0, pid))))


def _has_handlers(pid: int) -> bool | None:
    """Whether it has, or had, handlers for crashes; None if that is not known."""
    caught = procfs.caught_signals(pid)
    # A crash handler that has run is reset, so one of them may be missing.
    return None if caught is None else len(_CRASH_SIGNALS & caught) >= len(_CRASH_SIGNALS) - 1


def _cpu_limit(pid: int) -> float | None:
    limits = kernel.limit_of(pid, resource.RLIMIT_CPU)
    if limits is None or limits[1] == resource.RLIM_INFINITY:
        return None
    return float(limits[1])


def set_signals() -> None:
    """Ignore what is meant for the trainer, and undo the trainer's handling of SIGCHLD."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # A handler of the trainer that reaps all children, or SIG_IGN, would lose their status.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
