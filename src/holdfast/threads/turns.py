"""Worker threads take turns, where that is quicker.

While one thread runs Python code no other can: there is one lock for the interpreter. If several
threads want it, each call that releases it for a moment (most of torch's do) wakes another, and for
small batches this takes longer than to make them. So it is quicker if only one thread is awake at a
time: a worker makes all the batches that were ordered from it, then wakes the next worker that has
orders, and the last one wakes the consumer, which finds several batches at once. Meanwhile an
order wakes no worker.

Where batches are loaded outside of the lock (decoding, files, network), or where the consumer works
outside of it, that would be wrong: then as many threads as possible should be awake. Which is
quicker is found out by trying both (`Choice`).

No thread relies on being woken by another. A worker that rests looks for orders itself after some
milliseconds, and a consumer that waits for several batches then waits for any. So workers that wait
for each other, samples that take long and threads that are stuck cost a moment at most.

Nothing here relies on that lock: in free-threaded Python it is correct too, only of less use.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from holdfast.engine.bells import Bell

# Seconds in which a worker lets others run although it may have orders, and in which the consumer
# waits for more than one batch: so many rounds of batches, within these limits.
REST, SHORTEST_REST, LONGEST_REST = 3, 0.002, 0.03
LONGEST_SLEEP = 1.0  # seconds after which a worker without orders looks for some itself
ROUND = 32  # batches after which it is looked at how long they took
QUICK = 0.0005  # seconds for a batch, above which it is not worth trying
CLEARLY = 0.95  # part of the usual time, below which the other way is better,
HOPELESS = 1.25  # and above which it is not tried any longer
TRIAL = 3  # rounds
SOON, LATER = 16, 2048  # rounds between two trials, at first and in the end

Order = TypeVar("Order")


class Choice:
    """Whether to take turns. It does arithmetic and nothing else.

    Now and then the way that is not used is tried for a few rounds. The shortest round counts on
    both sides, because any round may have been long for another reason. After each trial in vain
    the next one is later.
    """

    def __init__(self) -> None:
        self.turns = False
        """What to do in this round."""
        self._usual = False
        self._best: dict[bool, float] = {}  # seconds for a batch, in the shortest of these rounds
        self._left = TRIAL  # rounds until a trial begins, or ends
        self._pause = SOON

    @property
    def hopeless(self) -> float | None:
        """Seconds for a batch above which a trial may end at once; None if there is no trial."""
        return None if self.turns is self._usual else HOPELESS * self._best[self._usual]

    def round_took(self, seconds: float) -> None:
        """A round is over, in which a batch took so many seconds."""
        way, usual, best = self.turns, self._usual, self._best
        best[way] = min(seconds, best.get(way, seconds))
        self._left -= 1
        if way is usual:
            if self._left <= 0:
                if usual or best[usual] < QUICK:
                    self.turns, self._left = not usual, TRIAL
                else:
                    self._wait(SOON)
        elif best[way] > HOPELESS * best[usual]:
            self._end(usual)
        elif self._left <= 0:
            self._end(way if best[way] < CLEARLY * best[usual] else usual)

    def _end(self, better: bool) -> None:
        """A trial is over."""
        self._pause = min(2 * self._pause, LATER) if better is self._usual else SOON
        self._usual = self.turns = better
        self._wait(self._pause)

    def _wait(self, rounds: int) -> None:
        self._best.clear()
        self._left = rounds


class Inbox(Generic[Order]):
    """The orders of one worker, and how it is woken for them."""

    __slots__ = ("_asleep", "_call", "_orders", "resting")

    def __init__(self) -> None:
        self._orders: deque[Order] = deque()
        self._asleep = False  # until it is woken
        self.resting = False  # until it is woken, or some milliseconds have passed
        self._call = threading.Lock()
        self._call.acquire()  # released to wake the worker

    def put(self, orders: Order) -> None:
        """Wakes the worker unless it is at work or resting."""
        self._orders.append(orders)
        if self._asleep:
            self.wake()

    @property
    def full(self) -> bool:
        return bool(self._orders)

    def wake(self) -> None:
        try:
            self._call.release()
        except RuntimeError:
            pass  # it was woken a moment ago

    def get(self, rest: Callable[[], float]) -> Order:
        """The next orders. If there are none, `rest` is called, and says for how many seconds the
        worker is to rest first."""
        orders, call = self._orders, self._call
        if not orders and (seconds := rest()) > 0:
            self.resting = True
            call.acquire(timeout=seconds)
            self.resting = False
        while not orders:
            self._asleep = True
            call.acquire(blocking=False)  # forget that it was woken before
            if not orders:
                # Without the interpreter's lock, a processor may look for orders before another one
                # sees that this thread is asleep. Then the order is found at the next look.
                call.acquire(timeout=LONGEST_SLEEP)
            self._asleep = False
        return orders.popleft()


class Turns:
    """What the threads of one pool know of each other."""

    def __init__(self, bell: Bell) -> None:
        """`bell` is what the consumer waits for."""
        self.choice = Choice()
        self._bell = bell
        self._inboxes: dict[int, Inbox[Any]] = {}
        self._rest = SHORTEST_REST
        self._counted, self._since = 0, 0.0  # batches of this round, and when it began
        self._latest: float | None = None  # when it ends at once, if not enough have come by then

    def join(self, worker: int, inbox: Inbox[Any]) -> None:
        self._inboxes = dict(sorted({**self._inboxes, worker: inbox}.items()))

    def clear(self) -> None:
        self._inboxes = {}

    def begin(self, worker: int | None) -> float:
        """The consumer is about to wait, for this worker if that is known. For how many seconds it
        waits for more than one batch."""
        if not self.choice.turns:
            return 0.0
        inbox = None if worker is None else self._inboxes.get(worker)
        if inbox is not None and inbox.resting and inbox.full:
            inbox.wake()
        else:
            self._wake_next(-1)
        return self._rest

    def end(self, worker: int) -> float:
        """This worker has done all that was ordered. For how many seconds it is to rest now."""
        if not self.choice.turns:
            return 0.0
        if not self._wake_next(worker) and self._bell.waiting:
            self._bell.ring()
        return self._rest

    def _wake_next(self, worker: int) -> bool:
        inboxes = self._inboxes
        after = [one for one in inboxes if one > worker]  # a worker that ended early has none
        for one in (*after, *(one for one in inboxes if one <= worker)):
            inbox = inboxes[one]
            if inbox.resting and inbox.full:
                inbox.wake()
                return True
        return False

    def batch_came(self, now: float) -> None:
        """The driver has heard of one."""
        self._counted += 1
        late = self._latest is not None and now > self._latest
        if self._counted < ROUND and not late:
            return
        choice = self.choice
        if self._since:
            took = now - self._since
            choice.round_took(took / self._counted)
            if not late:
                self._rest = min(LONGEST_REST, max(SHORTEST_REST, REST * took))
        self._counted, self._since = 0, now
        self._latest = None if choice.hopeless is None else now + ROUND * choice.hopeless
