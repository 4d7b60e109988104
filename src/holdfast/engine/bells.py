"""How a thread that waits for workers is woken: a lock that is released as a signal.

`queue.Queue` and `threading.Condition` take and release several locks, and wake a thread, for every
object that is passed on. Here a worker appends its answer to a deque of its own, and touches a lock
only if a thread waits for answers. With small batches that thread then finds several at once.

The two sides write and read in opposite order. A waiting thread says so and then looks for answers;
a worker appends an answer and then looks whether a thread waits. So at least one of them sees the
other. That needs no lock, and nothing here waits for one: `ring` may be called by finalizers and
signal handlers, in whatever they interrupt.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

# On Windows Ctrl-C does not interrupt the wait for a lock.
LONGEST_WAIT = 0.2 if sys.platform == "win32" else 3600.0


class Bell:
    """For one thread that waits at a time."""

    __slots__ = ("_lock", "_rung", "consumer_waits", "patient", "waiting", "waits")

    def __init__(self) -> None:
        self.waiting = False
        """Whether a thread waits for answers."""
        self.consumer_waits = False
        """Whether that is the consumer, which then draws from no random generator."""
        self.patient = False
        """Whether it waits for more than one answer: see `threads.turns`."""
        self.waits = 0
        """How often a thread has begun to wait for answers."""
        self._rung = False
        self._lock = threading.Lock()
        self._lock.acquire()  # released by `ring`

    def wait(
        self,
        timeout: float,
        found: Callable[[], bool],
        consumer: bool = False,
        patience: float = 0.0,
    ) -> None:
        """Wait for answers, which `found` looks for, or until it is rung. May return early. For so
        many seconds of `patience` it is not rung for each answer."""
        try:
            self.waits += 1
            self.consumer_waits = consumer
            self.patient = patience > 0
            self.waiting = True
            if self.patient:
                rung = self.pause(min(timeout, patience), found)
                self.patient = False
                if rung or found():
                    return
                timeout -= patience
            self.pause(timeout, found)
        finally:
            self.waiting = self.consumer_waits = self.patient = False

    def pause(self, timeout: float, found: Callable[[], bool] = bool) -> bool:
        """Wait until it is rung, unless that has happened before. Whether it was."""
        if not self._rung and timeout > 0 and not found():
            self._lock.acquire(timeout=min(timeout, LONGEST_WAIT))
        rung, self._rung = self._rung, False
        return rung

    def ring(self) -> None:
        self._rung = True
        try:
            self._lock.release()
        except RuntimeError:
            pass  # it rings already
