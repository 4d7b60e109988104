"""Calls of an actor, whose results arrive in a thread of Ray's.

A batch is copied out of Ray's object store in that thread, beside the training step: what arrives
from the store is read-only, and the store has the room back at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.autopsy.blackbox import Note
from holdfast.transport import codec


class RayBatch:
    """A batch that has arrived. Implements `engine.driver.Batch`."""

    __slots__ = ("_frame", "nbytes")

    def __init__(self, frame: NDArray[np.uint8]) -> None:
        self._frame = np.array(frame)
        self.nbytes = frame.nbytes

    def unpack(self) -> Any:
        return codec.decode(self._frame.data, None)


class Call:
    """One call. Its fields are valid once it is `done`, which is set last."""

    __slots__ = ("at", "done", "error", "result", "step")

    def __init__(
        self, reference: Any, on_done: Callable[[], None] = lambda: None, step: str = "unknown"
    ) -> None:
        """`step`: what a worker does in this call, in the words of `autopsy.blackbox`."""
        self.done = False
        self.at = 0.0  # monotonic
        self.step = step
        self.result: Any = None
        self.error: BaseException | None = None
        future: Future[Any] = reference.future()
        future.add_done_callback(lambda future: self._arrived(future, on_done))

    def _arrived(self, future: Future[Any], on_done: Callable[[], None]) -> None:
        try:
            self.result = _copied(future.result())
        except BaseException as error:  # among them the death of the actor
            self.error = error
        self.at = time.monotonic()
        self.done = True
        on_done()


class Announced:
    """What an actor is about to do, as it has announced last, and when that arrived here."""

    def __init__(self, actor: Any) -> None:
        self.last: tuple[Note | None, float] = (None, 0.0)
        self._actor = actor
        self._ask_for(0)

    def _ask_for(self, number: int) -> None:
        future: Future[Any] = self._actor.announcement.remote(number).future()
        future.add_done_callback(lambda future: self._arrived(future, number))

    def _arrived(self, future: Future[Any], number: int) -> None:
        if future.exception() is None:
            self.last = future.result(), time.monotonic()
            self._ask_for(number + 1)  # which lets the actor begin


def _copied(result: Any) -> Any:
    """The messages of a call, with batches of their own memory."""
    if not isinstance(result, list):
        return result
    return [
        (one[0], one[1], RayBatch(one[2]), *one[3:]) if one[0] == "batch" else one for one in result
    ]
