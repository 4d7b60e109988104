"""The background thread of a pool, and the list of all pools of this process.

The thread sleeps until something happens, and handles it. So a death during a long training step is
handled at once. It also closes the pool. Closing takes time, which finalizers and signal handlers
must not, and a Ctrl-C inside a finalizer is lost; no signal handler runs in this thread. So all
other code only asks for the close (`dismiss`), and may wait for it.

What may take long is done by a third thread, the *reporting thread*: it examines deaths, writes to
the logbook, and calls log handlers and `sample_name` of the user. It is started when there is such
work and ends with it. If it never ends, the background thread goes on without it. A consumer that
waits in `next()` holds the lock, so the background thread cannot work; after a death the consumer
therefore starts the reporting thread itself.

All pools are closed when the interpreter exits. A child forked from this process inherits pools
that are not its own, and no thread. It must not close or use them; everything here has no effect
there. It closes descriptors whose copies would keep another process alive or waiting (`disown`).

Functions that finalizers or a fork call here get what they need in their arguments: finalizers of
the user may close a loader, and fork, while the interpreter takes its modules apart, and then no
global name can be used.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from holdfast import at_fork
from holdfast.engine.signals import Latch
from holdfast.private_names import is_owned

if TYPE_CHECKING:
    from holdfast.engine.pool import Pool

# Closing takes two seconds at most, of which some is needed to wake up and to return.
CLOSE_WITHIN = 1.95  # seconds to wait for any number of pools; of these ...
END_WITHIN = 1.65  # ... workers and nursery may take to end by themselves, ...
KILL_WITHIN = 0.2  # ... a nursery that has not may take to die, and the rest is for letting go


_open: dict[int, BackgroundThread] = {}  # by id, because adding to a dict is one step
_leaving: set[BackgroundThread] = set()  # told to close, and not closed yet
_of_ancestors: list[BackgroundThread] = []
_exiting = False


def pools_of_ancestors() -> tuple[BackgroundThread, ...]:
    """In a forked process: those that belong to the processes it was forked from."""
    return tuple(_of_ancestors)


def interpreter_exiting() -> bool:
    """Whether the interpreter is about to end."""
    return _exiting


def close_all(
    members: Iterable[BackgroundThread],
    within: float = CLOSE_WITHIN,
    clock: Callable[[], float] = time.monotonic,
    too_late: Callable[[], bool] = sys.is_finalizing,
) -> None:
    """Close several within one deadline. Safe to call twice, from anywhere."""
    if too_late():
        return  # `_close_at_exit` has closed what could be closed; the threads are gone
    members = list(members)
    for member in members:
        member.dismiss()
    deadline = clock() + within
    for member in members:
        member.wait_closed(deadline)


_after_all: list[Callable[[float], None]] = []
LAST_WITHIN = 0.3  # seconds for what is called then


def when_all_are_closed(call: Callable[[float], None]) -> None:
    """Call this when the interpreter exits and all pools are closed. It is told by when to end."""
    _after_all.append(call)


@atexit.register
def _close_at_exit() -> None:
    global _exiting
    _exiting = True
    close_all({*list(_open.values()), *list(_leaving)})
    for call in _after_all:
        call(time.monotonic() + LAST_WITHIN)


def _in_child(
    opened: dict[int, BackgroundThread] = _open,
    leaving: set[BackgroundThread] = _leaving,
    ancestors: list[BackgroundThread] = _of_ancestors,
) -> None:
    ancestors.extend((*opened.values(), *leaving))  # after those that the parent inherited
    opened.clear()
    leaving.clear()


at_fork.in_child(_in_child)


log = logging.getLogger("holdfast")

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # background and reporting threads
SLOW_WORK_WITHIN = 1.0  # seconds to wait for the reporting thread


def exempt(thread: threading.Thread) -> None:
    """This thread ends with a pool: it must not wait until one is closed."""
    _threads.add(thread)


class Stage(enum.Enum):
    """How far the close of a pool has come."""

    OPEN = "open"
    CLOSING = "closing"  # the close was asked for: nothing new is begun
    CLOSED = "closed"  # the workers were told to exit: nothing has a consequence any more


OPEN, CLOSING, CLOSED = Stage.OPEN, Stage.CLOSING, Stage.CLOSED


class BackgroundThread:
    """One for each pool."""

    def __init__(self, pool: Pool, wake: Callable[[], None]) -> None:
        """`wake` ends the waits of this thread, and of any thread that waits with the lock held."""
        self.owner = os.getpid()
        self.stage = OPEN
        _open[id(self)] = self
        self._pool: Pool | None = pool  # until it is closed: the pool refers to us
        self._wake = wake
        self._done = Latch()
        self._reporting: threading.Thread | None = None
        self._waited_for: threading.Thread | None = None  # the reporting thread that was waited for
        self._thread = threading.Thread(target=self._run, name="holdfast-watch", daemon=True)

    def start(self) -> None:
        """Closes the pool if there can be no thread."""
        try:
            self._thread.start()
        except BaseException:
            self.close_now()
            raise

    # -- from any thread ------------------------------------------------------------------

    # Bound here: a finalizer may run while the interpreter takes its modules apart.
    def dismiss(
        self,
        getpid: Callable[[], int] = os.getpid,
        leaving: set[BackgroundThread] = _leaving,
        before: Stage = OPEN,
        after: Stage = CLOSING,
    ) -> None:
        """Have the pool closed, without waiting. Finalizers and signal handlers may call it."""
        if self.owner != getpid():
            return
        leaving.add(self)  # keeps it alive until its thread comes to it
        if self._done.is_set:  # looked at last: see `close_now`
            leaving.discard(self)
            return
        if self.stage is before:
            self.stage = after
        self._wake()

    def do_slow_work_soon(self) -> None:
        """By the consumer, which has the lock and is about to wait: this thread cannot work before
        it gets the lock, and what has happened is to be reported at once."""
        pool = self._pool
        if pool is not None:
            with contextlib.suppress(RuntimeError):  # no thread: this one will do it
                self._start_reporting(pool)

    def wait_closed(self, deadline: float) -> None:
        """Wait until it is closed, unless that depends on the calling thread."""
        pool, here = self._pool, threading.current_thread()
        if pool is None or self.owner != os.getpid() or here in _threads:
            return
        if is_owned(pool.lock):
            return
        if self._thread.is_alive():
            self._done.wait(max(0.0, deadline - time.monotonic()))

    def disown(self) -> None:
        """In a process forked from the owner: close what is not that process's to hold."""
        if self._pool is not None:
            self._pool.driver.disown()

    # -- in its own thread ----------------------------------------------------------------

    def _run(self) -> None:
        """No lock is held while it waits."""
        _threads.add(threading.current_thread())
        pool = self._pool
        assert pool is not None
        while True:
            try:
                wait = pool.service()
                if wait is None or pool.has_no_user():
                    break
                if self._do_slow_work(pool, SLOW_WORK_WITHIN):
                    continue  # its findings may have consequences
                pool.driver.watch(wait)
            except Exception:
                log.exception(
                    "%sthe watch over the workers failed; the loader is closed", pool.origin.prefix
                )
                break
        self.close_now()

    def close_now(self) -> None:
        """Close the pool in this thread."""
        pool = self._pool
        assert pool is not None
        deadline = time.monotonic() + END_WITHIN
        try:
            with pool.lock:
                self.stage = CLOSED
                _open.pop(id(self), None)
                pool.end_workers(deadline)
            self._do_slow_work(pool, deadline - time.monotonic())
        finally:
            self._done.set()
            _leaving.discard(self)  # after that: see `dismiss`
            self._pool = None

    def _do_slow_work(self, pool: Pool, patience: float) -> bool:
        """Have it done by a reporting thread, and wait for that a moment, once. Returns whether it
        has ended meanwhile."""
        try:
            reporting = self._start_reporting(pool)
        except RuntimeError:  # there is no room for another thread, or it is too late for one
            pool.do_slow_work()
            return True
        if reporting is None or reporting is self._waited_for:
            return False
        self._waited_for = reporting
        reporting.join(max(0.0, patience))
        return not reporting.is_alive()

    def _start_reporting(self, pool: Pool) -> threading.Thread | None:
        """The reporting thread that is running, or a new one; None if there is nothing to do.
        RuntimeError if there can be no thread. If two threads start one each, the second finds
        nothing to do when the first is done."""
        reporting = self._reporting
        if reporting is not None and reporting.is_alive():
            return reporting
        if not pool.has_slow_work():
            return None
        reporting = threading.Thread(
            target=_work, args=(pool,), name="holdfast-report", daemon=True
        )
        reporting.start()
        self._reporting = reporting
        return reporting


def _work(pool: Pool) -> None:
    """What the reporting thread does."""
    _threads.add(threading.current_thread())
    pool.do_slow_work()
    if pool.has_slow_work():  # more has happened while it was at work
        pool.do_slow_work()
