"""Looking for leaks beside the work: each look is taken by a forked copy of the process.

To look at all that a process has allocated may take seconds. The worker would make no batches
meanwhile, and the trainer would wait for it. So the worker forks, which takes milliseconds. The
copy looks at exactly what existed at that moment, sends its findings through a pipe and exits. The
worker polls the pipe after later batches. It waits for findings only when it has to exit itself, no
longer than its slowest batch took, or `SHORTEST_WAIT`. Findings that have not arrived by then are
lost; another worker is traced later.

The copy must not run any code of the user's. It collects no garbage (the worker does that before
the fork, and finalizers belong there), exits without any clean-up, writes nothing to the black box,
and is killed when the worker dies. If memory is short, the kernel kills it first.

A lock that another thread of the worker held at the fork is held for ever in the copy. A copy that
blocks on one is given up.
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
SHORTEST_WAIT = 0.05  # seconds that an exiting worker waits for looks, however quick its batches
_SEEN, _FAILED = b"S", b"F"


class LookFailed(Exception):
    """A look failed with an error, which is quoted, or did not end in time."""


class _Look(NamedTuple):
    pid: int
    pipe: int
    begun: float
    parts: list[bytes]


class AsideTracer(Tracer):
    """A tracer that blocks the process for some milliseconds only."""

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
                # The worker may have threads. As a rule, the copy needs none of their locks.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        except OSError as error:
            os.close(reading)
            os.close(writing)
            raise MemoryError("no room for another look") from error
        if pid == 0:
            try:
                self._looks.clear()  # or our own data would be among what grows
                _live(worker, writing, self._dataset)
            finally:
                os._exit(0)
        os.close(writing)
        return _Look(pid, reading, time.monotonic(), [])

    def _complete(self) -> bool:
        self._gather(0.0)
        return super()._complete()

    def _gather(self, patience: float) -> None:
        """Take the findings that have arrived, oldest look first."""
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
    """Read what has arrived until `deadline`; returns whether the pipe is at its end."""
    poll = select.poll()
    poll.register(look.pipe, select.POLLIN)
    while poll.poll(1000 * max(0.0, deadline - time.monotonic())):
        part = os.read(look.pipe, 1 << 20)
        if not part:
            return True
        look.parts.append(part)
    return False


def _dismiss(look: _Look) -> None:
    """End the process of a look that is done or not needed any more."""
    os.close(look.pipe)
    try:
        os.kill(look.pid, signal.SIGKILL)  # not reaped yet, so the pid is still its own
        os.waitpid(look.pid, 0)
    except (ChildProcessError, ProcessLookupError):
        pass  # other code of this process has reaped it


def _live(worker: int, pipe: int, dataset: object) -> None:
    """Runs in the copy: look, and send the findings."""
    gc.disable()
    faulthandler.disable()  # its stack is not the worker's
    kernel.die_with_parent()
    if os.getppid() != worker:
        return
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass  # not permitted here: the kernel's usual order applies
    try:
        said = _SEEN + pickle.dumps(leaks.look(dataset), 5)
    except BaseException:
        said = _FAILED + traceback.format_exc().encode(errors="replace")
    with open(pipe, "wb", closefd=False) as file:
        file.write(said)
