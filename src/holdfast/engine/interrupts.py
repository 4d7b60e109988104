"""Not now: signal handlers that wait until something has been finished.

Python runs a signal's handler between any two instructions of the main thread, and Ctrl-C raises
there. Half-way through starting or ending a pool that would leave processes nobody knows of; inside
a fork it is even swallowed; half-way through a batch it would leave books that nobody can go on
from. Blocking signals in one thread does not help when there are others to take them, so the
handlers themselves are put aside for the moment.

That takes some microseconds. Where it would be for every batch (`put_aside`) it is only done if the
user has a handler of his own: Ctrl-C, as Python handles it, ends the iterator anyway.

A process that another thread forks meanwhile goes on without whoever would bring them back, so it
does that at once.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # without enumerations it takes a tenth
import contextlib
import functools
import inspect
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

__all__ = ["bring_back", "deferred", "may_strike", "put_aside", "struck"]

_handlers: dict[int, Any] = {}  # those that are put aside
_caught: list[tuple[int, int]] = []  # since then, and in which process
_NUMBERS = tuple(
    int(number)
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGALRM,
        signal.SIGHUP,
        signal.SIGUSR1,
        signal.SIGUSR2,
    )
)
_main = threading.main_thread().ident
_get_ident, _getsignal, _ctrl_c = threading.get_ident, _signal.getsignal, signal.default_int_handler


@contextmanager
def deferred() -> Iterator[None]:
    """Python's signal handlers run after the block. In other threads they never run anyway."""
    aside = True  # until we know: a handler that is left alone may raise in between
    try:
        aside = put_aside(even_ctrl_c=True)
        yield
    finally:
        if aside:
            bring_back()


def may_strike() -> bool:
    """Whether this is the thread in which Python runs signal handlers."""
    return _get_ident() == _main


def put_aside(*, even_ctrl_c: bool = False) -> bool:
    """Python's signal handlers run when they are brought back. False if there is none but that of
    Ctrl-C, they are put aside already, or this is not the thread they run in."""
    if _get_ident() != _main or _handlers:
        return False
    if not even_ctrl_c:
        for number in _NUMBERS:
            handler = _getsignal(number)
            if type(handler) is not int and handler is not _ctrl_c and handler is not None:
                break
        else:
            return False
    found = [(number, _getsignal(number)) for number in _NUMBERS]
    found = [(number, handler) for number, handler in found if callable(handler)]
    _caught.clear()
    try:
        for number, handler in found:
            # In this order: if a handler that is still in place raises in between, what is
            # brought back is what was there.
            _handlers[number] = handler
            _signal.signal(number, _note)
    except BaseException:
        bring_back()
        raise
    return bool(_handlers)


def bring_back() -> bool:
    """And run those whose signal has come meanwhile. Once more does no harm; in another thread than
    theirs it does nothing, and says so."""
    if _get_ident() != _main:
        return False
    with contextlib.ExitStack() as again:  # all of them, though the first one may raise
        try:
            _restore()
        except BaseException:  # a handler that is back already raised: the others too
            _restore()
            raise
        finally:
            for _, which in dict.fromkeys(_caught):
                again.callback(signal.raise_signal, which)
            _caught.clear()
    return True


def _restore() -> None:
    # Ctrl-C, the first in the list, comes back last.
    for number, handler in reversed(list(_handlers.items())):
        _signal.signal(number, handler)
        _handlers.pop(number, None)


# Both have what they need in their arguments: a process may fork, and be interrupted, while the
# interpreter takes its modules apart. Nothing is put aside then.
def _note(
    number: int,
    frame: object,
    caught: list[tuple[int, int]] = _caught,
    getpid: Callable[[], int] = os.getpid,
) -> None:
    caught.append((getpid(), number))


def _in_child(
    get_ident: Callable[[], int] = _get_ident,
    getpid: Callable[[], int] = os.getpid,
    caught: list[tuple[int, int]] = _caught,
    handlers: dict[int, Any] = _handlers,
    back: Callable[[], bool] = bring_back,
) -> None:
    """The thread that forked is the main one now. What the parent has caught is the parent's."""
    global _main
    _main = get_ident()
    mine = getpid()
    caught[:] = [(pid, number) for pid, number in caught if pid == mine]
    if handlers or caught:
        back()


os.register_at_fork(after_in_child=_in_child)


def struck(error: BaseException) -> bool:
    """Whether a signal handler raised this, and not the code it interrupted."""
    if isinstance(error, KeyboardInterrupt):
        return True
    handlers = [*_handlers.values(), *map(signal.getsignal, signal.valid_signals())]
    codes = {_code_of(handler) for handler in handlers} - {None}
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
