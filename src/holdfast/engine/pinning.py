"""Copies batches to pinned memory while the consumer trains: a stage between the pool and `next()`.

Pinning a batch of 40 MB takes some milliseconds, which the training step would lose if `next()` did
it. So a thread unpacks and pins the batches that have arrived, ahead of the consumer and in the
order in which they will be delivered.

The threads and what they do:

- The consumer, and the background thread between two calls of `next()`, hear the workers under the
  pool's lock. Each batch that arrives is passed to `PinningThread.accept`, and what that returns
  takes its place: a `PinnedBatch`, whose `unpack` gives the pinned copy.
- The pinning thread does nothing but unpack and pin. It never takes the pool's lock and never draws
  from the sampler. So it cannot be in the way of a death that has to be handled, and the consumer
  may wait for it at any time.
- Only the pinning thread pins. If the consumer pinned a batch that it needs at once, then whether a
  batch was made under the consumer's `torch.inference_mode()` would depend on timing.

What a batch needs of the two threads goes through a `SimpleQueue`, which signal handlers and
finalizers may use at any moment, and one latch for each batch. There is no lock to be held when a
signal handler raises or another thread forks.

Memory. A batch counts towards the budget until the consumer has it, and while it is copied there
are two of it. Room for one copy is therefore set aside of the budget (`Share.set_aside`). A batch
is pinned ahead only if the copy fits; the one that the consumer waits for is always pinned, because
its copy is the consumer's. As soon as a batch is copied its memory goes back to the worker.

Batches that are dropped before the consumer gets them (an epoch that is broken off, a closed
iterator) are not pinned: the thread only has weak references to batches it has not begun.

What is not covered: a `pin_memory()` method of the user's that never returns. `next()` waits for it
until the loader's `timeout`, and without one for ever, as with torch. Closing does not wait for it.
"""

from __future__ import annotations

import heapq
import itertools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from holdfast import private_names
from holdfast.engine.driver import Batch
from holdfast.engine.signals import Latch
from holdfast.worker.exceptions import rebuild_here

pin: Callable[[Any, Any], Any] = private_names.pin
LOOK_EVERY = 1.0  # seconds: how often the consumer checks that the thread is still there


class Pinner(Protocol):
    """How batches are pinned. Everything is called in the pinning thread."""

    where: str
    """For error messages, in torch's words."""
    in_place: bool
    """Whether it pins the memory in which workers send batches."""

    def begin(self, thread: PinningThread) -> None:
        """Called once. What it raises is raised for each batch."""

    def receive(self, batch: Batch) -> Batch:
        """What is to be unpacked, given what has arrived."""

    def pin(self, batch: Any) -> Any:
        """The pinned batch, given the unpacked one."""

    def idle(self) -> float | None:
        """Called between two batches: when to call it again, in seconds, if no batch comes."""

    def end(self) -> None:
        """Called once, after `begin`."""


class CopyToPinned:
    """torch's way: each tensor is copied."""

    in_place = False

    def __init__(self, device: str | None, index: int) -> None:
        """`device`: as torch's iterator has chosen it; `index`: that of the consumer's thread."""
        self.where = f"in pin memory thread for device {index}"
        self._device = device
        self._index = index

    def begin(self, thread: PinningThread) -> None:
        torch.set_num_threads(1)  # of this thread only: a copy must not take all cores
        torch.accelerator.set_device_index(self._index)

    def receive(self, batch: Batch) -> Batch:
        return batch

    def pin(self, batch: Any) -> Any:
        return pin(batch, self._device)

    def idle(self) -> float | None:
        return None

    def end(self) -> None:
        pass


class PinnedBatch:
    """A batch on its way through the pinning thread."""

    __slots__ = ("__weakref__", "_done", "_error", "_pinned", "_source", "_thread", "nbytes")

    def __init__(self, source: Batch, thread: PinningThread) -> None:
        self.nbytes = source.nbytes
        self._source: Batch | None = source
        self._thread = thread
        self._pinned: Any = None
        self._error: BaseException | None = None
        self._done = Latch()

    @property
    def ready(self) -> bool:
        """Whether `unpack` can be called."""
        return self._source is None

    def wait(self, timeout: float | None = None) -> bool:
        """In the consumer, without the pool's lock: have it pinned next, and wait for that. False
        if it was not within `timeout`, or if the thread has ended."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self._thread.want(self)
        while not self.ready and self._thread.serves:
            wait = LOOK_EVERY
            if deadline is not None:
                wait = min(wait, deadline - time.monotonic())
                if wait <= 0:
                    break
            self._done.wait(wait)
        return self.ready

    def unpack(self) -> Any:
        """The pinned batch, or the error that came instead."""
        if self._error is not None:
            raise self._error
        return self._pinned

    def make(self, pinner: Pinner, unfit: BaseException | None) -> None:
        """In the pinning thread: unpack and pin. What is raised is for the consumer; an error of
        pinning in torch's words."""
        assert self._source is not None
        try:
            batch = pinner.receive(self._source).unpack()
        except BaseException as error:
            self._error = error
        else:
            try:
                if unfit is not None:
                    raise unfit
                self._pinned = pinner.pin(batch)
            except BaseException as error:
                self._error = rebuild_here(error, pinner.where)
        self._source = None  # last: now it is ready, and its memory is free
        self._done.set()

    def wake(self) -> None:
        """End `wait` early."""
        self._done.set()


_Job = tuple[int, int, "weakref.ref[PinnedBatch]"]


def _never(nbytes: int) -> bool:
    return False


def _ignore(nbytes: int) -> None:
    pass


class PinningThread:
    """One for each iterator that pins."""

    def __init__(
        self,
        pinner: Pinner,
        *,
        in_order: bool,
        may_copy: Callable[[int], bool] = lambda nbytes: True,
        copied: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """`may_copy` says whether a copy of so many bytes may be made ahead of the consumer;
        `copied` is called after each, and has to see to it that the worker gets its memory back.
        Both are called in the thread."""
        self._pinner = pinner
        self._in_order = in_order
        self._may_copy = may_copy
        self._copied = copied
        self._owner = os.getpid()
        self._stopping = False
        self._waits_for_room = False
        self._wanted: weakref.ref[PinnedBatch] | None = None  # by the consumer
        self._numbers = itertools.count()
        self._arrivals: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._jobs: list[_Job] = []  # a heap; of the pinning thread alone
        self._thread = threading.Thread(target=self._run, name="holdfast-pin", daemon=True)

    def start(self) -> threading.Thread:
        self._thread.start()
        return self._thread

    # -- under the pool's lock ------------------------------------------------------------

    def accept(self, batch: Batch, number: int) -> PinnedBatch:
        """Pin this batch, which is delivered as the `number`-th of its epoch or, without order,
        after those that have arrived before it."""
        pinned = PinnedBatch(batch, self)
        arrival = next(self._numbers)
        order = number if self._in_order else arrival
        self._arrivals.put((order, arrival, weakref.ref(pinned)))
        return pinned

    # -- in any thread --------------------------------------------------------------------

    @property
    def serves(self) -> bool:
        """Whether what is accepted will be pinned."""
        return not self._stopping and self._owner == os.getpid() and self._thread.is_alive()

    def want(self, batch: PinnedBatch) -> None:
        """The consumer waits for this batch."""
        self._wanted = weakref.ref(batch)
        self._arrivals.put(None)

    def look_again(self) -> None:
        """There may be room for a copy now."""
        if self._waits_for_room:
            self._arrivals.put(None)

    def wake(self) -> None:
        """Let the pinner do what is due."""
        self._arrivals.put(None)

    def released(self, nbytes: int) -> None:
        """The worker can have so much of its memory back."""
        self._copied(nbytes)

    def stop(self) -> None:
        """Have the thread end after the batch that it is pinning. Waits for nothing, so that
        finalizers and signal handlers may call it."""
        self._stopping = True
        self._arrivals.put(None)
        wanted = None if self._wanted is None else self._wanted()
        if wanted is not None:
            wanted.wake()

    def join(self, deadline: float) -> bool:
        """Wait for the end of the thread; whether it has ended. `stop` comes first."""
        thread = self._thread
        if self._owner != os.getpid() or thread.ident is None:
            return True
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
        return not thread.is_alive()

    # -- in the pinning thread ------------------------------------------------------------

    def _run(self) -> None:
        unfit: BaseException | None = None
        try:
            self._pinner.begin(self)
        except Exception as error:
            unfit = error
        while not self._stopping:
            wait = self._pinner.idle()
            batch = self._next()
            if batch is not None:
                nbytes = batch.nbytes
                batch.make(self._pinner, unfit)
                del batch  # the consumer may have dropped it meanwhile
                self._copied(nbytes)
                wait = 0.0
            # Nowhere else: a message that is taken is followed by a look at all it may have meant.
            self._collect(wait)
        self._pinner.end()
        self._may_copy, self._copied = _never, _ignore  # they hold the pool, which holds this

    def _collect(self, timeout: float | None) -> None:
        """Take all messages there are; if there is none, wait for one."""
        try:
            arrival = self._arrivals.get(timeout != 0, timeout)
            while True:
                if arrival is not None:
                    heapq.heappush(self._jobs, arrival)
                arrival = self._arrivals.get(block=False)
        except queue.Empty:
            return

    def _next(self) -> PinnedBatch | None:
        """The batch to be pinned now; None if there is none, or no room for its copy."""
        while self._jobs:
            batch = self._jobs[0][2]()
            if batch is not None:
                # Before the question, or `look_again` might come between the two.
                self._waits_for_room = True
                if not self._is_wanted(batch) and not self._may_copy(batch.nbytes):
                    return None
                self._waits_for_room = False
            heapq.heappop(self._jobs)
            if batch is not None:
                return batch
        return None

    def _is_wanted(self, batch: PinnedBatch) -> bool:
        return self._wanted is not None and self._wanted() is batch
