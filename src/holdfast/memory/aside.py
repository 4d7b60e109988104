"""Looking for leaks beside the work: each look is taken by a copy of the process.

To look at all that a process has allocated takes seconds if that is much, and a worker that is
looking makes no batches meanwhile: the trainer would wait for it. So the worker forks, which takes
milliseconds; the copy looks, at exactly what was there at that moment, sends what it has seen
through a pipe and is gone. The worker asks for it after later batches, and waits for it only when
it has to go: no longer than a batch of its own takes, or a moment. (What is not in by then is lost;
another successor is traced.)

What the copy must not do: run anything of the user's. It collects no garbage (the worker does that
before, as it does anyway, and finalizers belong there), leaves without any clean-up, notes nothing
in the black box, and dies with the worker. If memory is short it is the first to go.

A lock that another thread of the worker held is held for ever in the copy. It is given up then.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import select
import signal
import time
import traceback
import warnings
from typing import Final, NamedTuple

from holdfast import kernel
from holdfast.memory import leaks
from holdfast.memory.leaks import Findings, Tracer

__all__ = ["AsideTracer", "LookFailed"]

LONGEST: Final = 60.0  # seconds a look may take
SHORTEST_WAIT = 0.05  # seconds for which even one with quick batches waits for looks when it goes
_SEEN, _FAILED = b"S", b"F"


class LookFailed(Exception):
    """A look ended with an error, which is quoted, or not at all."""


class _Look(NamedTuple):
    pid: int
    pipe: int
    begun: float
    parts: list[bytes]


class AsideTracer(Tracer):
    """A tracer that keeps the process waiting for some milliseconds only."""

    def __init__(self, samples: int, rounds: int = 3, dataset: object = None) -> None:
        super().__init__(samples, rounds, dataset)
        self._looks: list[_Look] = []  # oldest first
        self._last_step = time.monotonic()
        self._longest_step = 0.0

    def step(self) -> Findings | None:
        now = time.monotonic()
        if self._count:
            self._longest_step = max(self._longest_step, now - self._last_step)
        try:
            return super().step()
        finally:
            self._last_step = time.monotonic()

    def end(self) -> Findings | None:
        self._stop()
        self._gather(max(self._longest_step, SHORTEST_WAIT))
        return super().end()

    def close(self) -> None:
        super().close()
        for look in self._looks:
            _dismiss(look)
        self._looks.clear()

    def _look(self) -> None:
        gc.collect()
        self._looks.append(self._fork())

    def _fork(self) -> _Look:
        worker = os.getpid()
        try:
            reading, writing = kernel.pipe()
        except OSError as error:
            raise MemoryError("no room for another look") from error
        try:
            with warnings.catch_warnings():
                # It may have threads. What the copy does needs none of their locks, as a rule.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        except OSError as error:
            os.close(reading)
            os.close(writing)
            raise MemoryError("no room for another look") from error
        if pid == 0:
            try:
                self._looks.clear()  # or our own books would be among what grows
                _live(worker, writing, self._dataset)
            finally:
                os._exit(0)
        os.close(writing)
        return _Look(pid, reading, time.monotonic(), [])

    def _complete(self) -> bool:
        self._gather(0.0)
        return super()._complete()

    def _gather(self, patience: float) -> None:
        """Take what has been seen, in its order."""
        deadline = time.monotonic() + patience
        while self._looks:
            look = self._looks[0]
            if not _read(look, deadline):
                if time.monotonic() - look.begun > LONGEST:
                    raise LookFailed(f"it took more than {LONGEST:.0f} s")
                return
            del self._looks[0]
            _dismiss(look)
            said = b"".join(look.parts)
            if said[:1] == _FAILED:
                raise LookFailed(said[1:].decode(errors="replace"))
            if not said:
                raise MemoryError("the process that looked was killed")
            self._found.append(said[1:])


def _read(look: _Look, deadline: float) -> bool:
    """Read what is there; whether that was all."""
    poll = select.poll()
    poll.register(look.pipe, select.POLLIN)
    while poll.poll(1000 * max(0.0, deadline - time.monotonic())):
        part = os.read(look.pipe, 1 << 20)
        if not part:
            return True
        look.parts.append(part)
    return False


def _dismiss(look: _Look) -> None:
    """It is not needed any more."""
    os.close(look.pipe)
    try:
        os.kill(look.pid, signal.SIGKILL)  # not reaped yet, so it is still its number
        os.waitpid(look.pid, 0)
    except (ChildProcessError, ProcessLookupError):
        pass  # somebody waits for all children of this process


def _live(worker: int, pipe: int, dataset: object) -> None:
    """In the copy."""
    gc.disable()
    faulthandler.disable()  # its stack is not the worker's
    kernel.die_with_parent()
    if os.getppid() != worker:
        return
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass  # a kernel that does not let us: the default order holds
    try:
        said = _SEEN + pickle.dumps(leaks.look(dataset), 5)
    except BaseException:
        said = _FAILED + traceback.format_exc().encode(errors="replace")
    with open(pipe, "wb", closefd=False) as file:
        file.write(said)
