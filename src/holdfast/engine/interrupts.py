"""Not now: signal handlers that wait until something has been finished.

Python runs a signal's handler between any two instructions of the main thread, and Ctrl-C raises
there. Half-way through starting or ending a pool that would leave processes nobody knows of; inside
a fork it is even swallowed. Blocking signals in one thread does not help when there are others to
take them, so the handlers themselves are put aside for the moment.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

__all__ = ["deferred", "restore", "struck"]

_put_aside: dict[int, Any] = {}
_NUMBERS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGALRM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


@contextmanager
def deferred() -> Iterator[None]:
    """Python's signal handlers run after the block. In other threads they never run anyway."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if _put_aside:  # a block inside a block
        yield
        return
    caught: list[int] = []
    try:
        for number in _NUMBERS:
            handler = signal.getsignal(number)
            if callable(handler):
                # In this order: if a handler that is still in place raises in between, what is
                # brought back is what was there.
                _put_aside[number] = handler
                signal.signal(number, lambda number, frame: caught.append(number))
        yield
    finally:
        with contextlib.ExitStack() as again:  # all of them, though the first one may raise
            for which in dict.fromkeys(caught):
                again.callback(signal.raise_signal, which)
            try:
                restore()
            except BaseException:  # a handler that is back already raised: the others too
                restore()
                raise


def restore() -> None:
    """Bring the handlers back: after the block, and in a process forked inside it."""
    for number in reversed(list(_put_aside)):  # Ctrl-C, the first in the list, comes back last
        signal.signal(number, _put_aside[number])
        _put_aside.pop(number, None)


def struck(error: BaseException) -> bool:
    """Whether a signal handler raised this, and not the code it interrupted."""
    if isinstance(error, KeyboardInterrupt):
        return True
    codes = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not hasattr(handler, "__code__"):
        handler = inspect.getattr_static(type(handler), "__call__", None)
    return getattr(handler, "__code__", None)
