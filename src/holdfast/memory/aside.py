"""Looking for leaks beside the work: each look is taken by a forked copy of the process.

To look at all that a process has allocated may take seconds. The worker would make no batches
meanwhile, and the trainer would wait for it. So the worker forks, which takes milliseconds. The
copy looks at exactly what existed at that moment, sends its findings through a pipe and exits. The
worker polls the pipe after later batches and while it is idle. It waits for findings only when it
has to exit itself, no longer than one of its batches takes, or `SHORTEST_WAIT`. Findings that have
not arrived by then are lost; another worker is traced later.

Tracing makes every allocation slower, and code that does little else up to twenty times slower. So
the first traced batch is traced with a single frame, and its time compared with the batches before
it. Tracing may at most double the time of a batch: as many frames are kept as that allows. If it
does not allow one, nothing is traced (`TooSlow`).

The copy must not run any code of the user's. It collects no garbage (the worker does that before
the fork, and finalizers belong there), exits without any clean-up, writes nothing to the black box,
and is killed when the worker dies. If memory is short, the kernel kills it first.

A lock that another thread of the worker held at the fork is held for ever in the copy. A copy that
blocks on one is given up.
"""

from __future__ import annotations

import faulthandler
import gc
import math
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

__all__ = ["AsideTracer", "LookFailed", "TooSlow"]

LONGEST: Final = 60.0  # seconds a look may take
SHORTEST_WAIT = 0.05  # seconds that an exiting worker waits for looks, however quick its batches
MOMENT: Final = 0.02  # seconds that tracing may add to even the quickest batch
_SEEN, _FAILED = b"S", b"F"


class LookFailed(Exception):
    """A look failed with an error, which is quoted, or did not end in time."""


class TooSlow(Exception):
    """Batches would take more than twice as long while they are traced."""


class _Look(NamedTuple):
    pid: int
    pipe: int
    begun: float
    parts: list[bytes]


class _Clocks(NamedTuple):
    """Seconds that passed, and those of them in which this thread was running."""

    wall: float
    processor: float

    @classmethod
    def now(cls) -> _Clocks:
        return cls(time.monotonic(), time.thread_time())

    def until_now(self) -> _Clocks:
        now = _Clocks.now()
        return _Clocks(now.wall - self.wall, now.processor - self.processor)


class AsideTracer(Tracer):
    """A tracer that blocks the process for some milliseconds only."""

    def __init__(self, samples: int, rounds: int = 3, dataset: object = None) -> None:
        super().__init__(samples, rounds, dataset)
        self._looks: list[_Look] = []  # oldest first
        self._began = _Clocks.now()
        self._longest = 0.0  # seconds that a batch took
        self._plain: list[_Clocks] = []  # what batches took that were not traced
        self._tries = False  # the next batch shows what tracing costs

    def begin(self) -> None:
        """A batch is begun; `step` is called when it is done."""
        self._began = _Clocks.now()

    def step(self) -> Findings | None:
        took = self._began.until_now()
        self._longest = max(self._longest, took.wall)
        if self._tries:
            self._tries = False
            self._afford(took)
            return None
        if self._count < self.samples:
            self._plain.append(took)
        return super().step()

    def _start(self, frames: int) -> None:
        super()._start(1)
        self._tries = self._own

    def _afford(self, traced: _Clocks) -> None:
        """Go on with as many frames as there is time for. Processor time is compared, in which
        nothing shows that others do on this machine; a batch that waits has time left, too."""
        time_left = max(MOMENT, min(one.wall for one in self._plain))
        added = traced.processor - max(one.processor for one in self._plain)
        frames = leaks.FRAMES
        if added > 0:
            # In a long function a further frame costs as much as the first: its line is looked up.
            frames = min(frames, math.floor(time_left / added))
        self._stop()
        if frames < 1:
            raise TooSlow
        super()._start(frames)

    @property
    def pipe(self) -> int | None:
        """What to wait for; None if no look is under way."""
        return self._looks[0].pipe if self._looks else None

    def take_in(self) -> Findings | None:
        """What there is in `pipe`; if that was all, what was found."""
        return self.end() if self._complete() else None

    def end(self) -> Findings | None:
        self._stop()
        self._gather(max(self._longest, SHORTEST_WAIT))
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
                    raise MemoryError(f"no look within {LONGEST:.0f} s")  # the machine is full
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
        os.nice(10)  # whoever makes batches comes first
    except OSError:
        pass  # a sandbox that does not let us
    try:
        said = _SEEN + pickle.dumps(leaks.look(dataset, stop=True), 5)
    except BaseException:
        said = _FAILED + traceback.format_exc().encode(errors="replace")
    with open(pipe, "wb", closefd=False) as file:
        file.write(said)
