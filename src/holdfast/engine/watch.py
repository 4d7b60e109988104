"""The watch over a pool: a thread that sleeps until something happens while nobody is in `next()`.

A death during a long training step is so dealt with at once. The watch is also the one who closes
the pool: closing takes its time, finalizers and signal handlers must not, and a Ctrl-C that strikes
in a finalizer is lost. In this thread nothing strikes. So everybody else only says that the pool is
to be closed (`dismiss`), and waits for it or does not.

What may take long is given to a clerk, a thread that lives as long as that takes: to examine a
death, to write to the logbook, and to call the log handlers and `sample_name` of the user's. If it
never ends, the watch goes on without. While the consumer waits in `next()` with the lock in hand
the watch cannot look; so the consumer starts the clerk itself when a worker has died.

A process forked from the owner has a watch without a thread: everything here does nothing there.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from holdfast import kernel
from holdfast.engine import registry
from holdfast.origin import Origin

__all__ = ["CLOSED", "CLOSING", "OPEN", "Stage", "Watch", "Watched"]

log = logging.getLogger("holdfast")

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # of all watches and clerks
SETTLE_WITHIN = 1.0  # seconds the watch waits for its clerk; then it goes on without


class Stage(enum.Enum):
    """How far a pool is on its way out."""

    OPEN = "open"
    CLOSING = "closing"  # somebody wants it closed: nothing new is begun
    CLOSED = "closed"  # its workers have been told to go: nothing has a consequence any more


OPEN, CLOSING, CLOSED = Stage.OPEN, Stage.CLOSING, Stage.CLOSED


class Watched(Protocol):
    """What a watch looks after: a pool."""

    lock: threading.RLock
    origin: Origin

    def look(self) -> tuple[float, dict[int, int]] | None:
        """Deal with what has happened. Seconds until the next look, and the descriptors that call
        for one earlier, with what they have to be ready for; None when the pool is to be closed.
        """

    def unsettled(self) -> bool:
        """Whether there is something for `settle`."""

    def settle(self) -> None:
        """Deal with what takes longer and need not be under the lock. It may take for ever: a disk
        may be gone, and handlers of the user's are called."""

    def forsaken(self) -> bool:
        """Whether nobody can use it any more."""

    def end_workers(self, deadline: float) -> None:
        """Tell all workers to go, and wait for their end."""

    def let_go(self) -> None:
        """Of all processes, descriptors and mappings."""

    def disown(self) -> None:
        """In a process forked from the owner: of what is not that process's to hold."""


class Watch:
    """One for each pool."""

    def __init__(self, pool: Watched) -> None:
        self.owner = os.getpid()
        self.stage = OPEN
        self._pool: Watched | None = pool  # until it is closed: it is the pool that holds us
        self._waker = kernel.Doorbell()
        self.wake = self._waker.fileno()
        self._done = threading.Event()
        self._clerk: threading.Thread | None = None
        self._waited_for: threading.Thread | None = None  # a clerk, for as long as we wait for one
        self._thread = threading.Thread(target=self._watch, name="holdfast-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def cancel(self) -> None:
        """There will be no pool to look after."""
        self._waker.close()
        self._pool = None

    # -- from any thread ------------------------------------------------------------------

    # Bound here: a finaliser may run while the interpreter takes its modules apart.
    def dismiss(
        self,
        getpid: Callable[[], int] = os.getpid,
        leaves: Callable[[registry.Member], None] = registry.leaves,
        before: Stage = OPEN,
        after: Stage = CLOSING,
    ) -> None:
        """Have the pool closed, and wait for nobody. Finalizers and signal handlers may call it."""
        if self.owner != getpid():
            return
        if self._done.is_set():
            return
        leaves(self)  # or nobody might hold it until its thread comes to it
        if self.stage is before:
            self.stage = after
        self.ring()

    def ring(self) -> None:
        """Wake the watch, and any thread that waits with the lock in hand."""
        self._waker.ring()

    def heard_bell(self) -> None:
        """By whom it has woken, under the lock. Not if the pool is to be closed: it rings on until
        the watch has come to that."""
        self._waker.clear()
        if self.stage is not OPEN:
            self.ring()

    def settle_soon(self) -> None:
        """By the consumer, which has the lock and is about to wait: the watch cannot look before it
        gets that, and what has happened is to be told at once."""
        pool = self._pool
        if pool is not None:
            with contextlib.suppress(RuntimeError):  # no thread: the watch will do it
                self._hire(pool)

    def wait_closed(self, deadline: float) -> None:
        """Wait until it is closed, unless that depends on this very thread."""
        pool, here = self._pool, threading.current_thread()
        if pool is None or self.owner != os.getpid() or here in _threads:
            return
        if pool.lock._is_owned():  # type: ignore[attr-defined]
            return
        if self._thread.is_alive():
            self._done.wait(max(0.0, deadline - time.monotonic()))

    def disown(self) -> None:
        """In a process forked from the owner."""
        if self._pool is not None:
            self._pool.disown()

    # -- in its own thread ----------------------------------------------------------------

    def _watch(self) -> None:
        """It holds no lock while it waits, and the pool only until nobody uses it."""
        _threads.add(threading.current_thread())
        pool = self._pool
        assert pool is not None
        poll = select.poll()
        poll.register(self.wake, select.POLLIN)
        watched: dict[int, int] = {}
        while True:
            try:
                found = pool.look()
                if found is None or pool.forsaken():
                    break
                if self._settle(pool, SETTLE_WITHIN):
                    continue  # what was found out may have consequences
                wait, now_watched = found
                if now_watched != watched:
                    for fd in watched:
                        poll.unregister(fd)
                    watched = now_watched
                    for fd, mask in watched.items():
                        poll.register(fd, mask)
            except Exception:
                log.exception(
                    "%sthe watch over the workers failed; the loader is closed", pool.origin.prefix
                )
                break
            poll.poll(wait * 1000)
        self.close_now()

    def close_now(self) -> None:
        """The closing itself."""
        pool = self._pool
        assert pool is not None
        deadline = time.monotonic() + registry.END_WITHIN
        try:
            with pool.lock:
                self.stage = CLOSED
                registry.retired(self)
                try:
                    pool.end_workers(deadline)
                finally:
                    self._let_go(pool)
            self._settle(pool, deadline - time.monotonic())
        finally:
            registry.left(self)
            self._done.set()
            self._pool = None

    def _let_go(self, pool: Watched) -> None:
        """Of everything, even if one of them makes trouble."""
        with contextlib.ExitStack() as ends:
            ends.enter_context(registry.descriptors())
            ends.callback(self._waker.close)
            ends.callback(pool.let_go)

    def _settle(self, pool: Watched, patience: float) -> bool:
        """Have it done by a clerk, and wait a moment for each clerk; whether one has come to its
        end meanwhile."""
        try:
            clerk = self._hire(pool)
        except RuntimeError:  # there is no room for another thread, or it is too late for one
            pool.settle()
            return True
        if clerk is None or clerk is self._waited_for:
            return False
        self._waited_for = clerk
        clerk.join(max(0.0, patience))
        return not clerk.is_alive()

    def _hire(self, pool: Watched) -> threading.Thread | None:
        """The clerk who is at it, or a new one; None if there is nothing to do. RuntimeError if
        there can be no thread for it. If two threads hire one each, the second has nothing to do
        when the first is done."""
        clerk = self._clerk
        if clerk is not None and clerk.is_alive():
            return clerk
        if not pool.unsettled():
            return None
        clerk = threading.Thread(target=_work, args=(pool,), name="holdfast-clerk", daemon=True)
        clerk.start()
        self._clerk = clerk
        return clerk


def _work(pool: Watched) -> None:
    """What the clerk does."""
    _threads.add(threading.current_thread())
    pool.settle()
    if pool.unsettled():  # something more has happened meanwhile, and found a clerk at work
        pool.settle()
