"""Defers Python's signal handlers until something has been finished.

Python runs a signal's handler between any two instructions of the main thread, and the handler of
Ctrl-C raises there. While a pool is started or closed, that would leave untracked processes. Inside
a fork the exception is even swallowed. In the middle of a batch it would leave a state from which
the pool cannot go on. Blocking signals in one thread does not help if another thread can receive
them. So the handlers themselves are replaced for the moment, by one that only notes the signal.

That takes some microseconds. Where it would be done for every batch (`defer_handlers`), it is done
only if the user has installed a handler. Python's own handler of Ctrl-C ends the iterator anyway.

A process that another thread forks meanwhile does not have the thread that would restore the
handlers, so it restores them at once.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # no enumerations: a tenth of the time
import contextlib
import functools
import inspect
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, TypeVar

from holdfast import at_fork

T = TypeVar("T")
_handlers: dict[int, Any] = {}  # the deferred handlers
_caught: list[tuple[int, int]] = []  # signals since then: pid of this process, number
_DEFERRED_SIGNALS = tuple(
    int(getattr(signal, name))
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)  # Windows has two of them
)
_main = threading.main_thread().ident
_get_ident, _getsignal, _ctrl_c = threading.get_ident, _signal.getsignal, signal.default_int_handler


@contextmanager
def deferred(*, even_ctrl_c: bool = True) -> Iterator[None]:
    """Signal handlers run after the block. In other threads than the main one they never run."""
    aside = True  # until it is known: a handler that is not deferred may raise in between
    try:
        aside = defer_handlers(even_ctrl_c=even_ctrl_c)
        yield
    finally:
        if aside:
            try:
                restore_handlers()
            except BaseException:  # perhaps raised by such a handler before any was restored
                restore_handlers()
                raise


def handlers_run_here() -> bool:
    """Whether this is the thread in which Python runs signal handlers."""
    return _get_ident() == _main


def defer_handlers(*, even_ctrl_c: bool = False) -> bool:
    """Defer signal handlers until `restore_handlers`. Returns False, and does nothing, if there is
    no handler but that of Ctrl-C, if they are deferred already, or if this is not the main
    thread."""
    if _get_ident() != _main or _handlers:
        return False
    if not even_ctrl_c:
        for number in _DEFERRED_SIGNALS:
            handler = _getsignal(number)
            if type(handler) is not int and handler is not _ctrl_c and handler is not None:
                break
        else:
            return False
    found = [(number, _getsignal(number)) for number in _DEFERRED_SIGNALS]
    found = [(number, handler) for number, handler in found if callable(handler)]
    _caught.clear()
    try:
        for number, handler in found:
            # In this order: if a handler that is still in place raises in between, the original
            # one is restored.
            _handlers[number] = handler
            _signal.signal(number, _note_signal)
    except BaseException:
        restore_handlers()
        raise
    return bool(_handlers)


def restore_handlers() -> bool:
    """Restore the handlers, and run those whose signal has arrived meanwhile. May be called twice.
    In another thread than the main one it does nothing and returns False."""
    if _get_ident() != _main:
        return False
    with contextlib.ExitStack() as again:  # run all of them, even if the first one raises
        try:
            _restore()
        except BaseException:  # raised by a handler that is restored; restore the others too
            _restore()
            raise
        finally:
            for _, which in dict.fromkeys(_caught):
                again.callback(signal.raise_signal, which)
            _caught.clear()
    return True


def _restore() -> None:
    # In reverse, so that the handler of Ctrl-C is restored last.
    for number, handler in reversed(list(_handlers.items())):
        _signal.signal(number, handler)
        _handlers.pop(number, None)


# These two have all they need as arguments: a process may fork, or get a signal, while the
# interpreter clears its modules at exit. No handler is deferred then.
def _note_signal(
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
    back: Callable[[], bool] = restore_handlers,
) -> None:
    """The thread that forked is the main thread now. Signals of the parent are not handled here."""
    global _main
    _main = get_ident()
    mine = getpid()
    caught[:] = [(pid, number) for pid, number in caught if pid == mine]
    if handlers or caught:
        back()


at_fork.in_child(_in_child)


class Latch:
    """What one thread sets, once, and others wait for, also one whose signal handlers raise.

    `threading.Event` is written in Python. A handler that raises in the middle of its `wait` may
    leave its lock locked, and then `set` waits for ever; or the lock is released twice, and that
    error takes the place of what the handler raised. A `SimpleQueue` has no such middle.
    """

    __slots__ = ("_tokens", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        self.is_set = True
        self._tokens.put(None)

    def wait(self, timeout: float) -> None:
        """Until it is set. If several threads wait, and a handler raises in one of them just then,
        the others may wait for all of `timeout`."""
        if not self.is_set:
            try:
                self._tokens.get(timeout=timeout)
            except queue.Empty:
                return
            self._tokens.put(None)  # for the next one


class Undivided:
    """Marks work that must not be left half done, and keeps signal handlers away from it.

    A signal handler may raise between any two instructions. While the work only waits that does no
    harm. Elsewhere a message or an index may be lost, and the owner must not go on as if nothing
    had happened. So the user's handlers are deferred until the work waits or is done. What can
    still raise is Ctrl-C, the handler of another signal than `_DEFERRED_SIGNALS`, and a sampler of
    the user.
    `half_done` is then still set: `fail` sees it, or the next `enter` if a second signal prevented
    even that. Both call `on_broken`.

    Every `enter` is followed by `leave`, or by `fail` for whatever was raised.
    """

    __slots__ = ("_on_broken", "_shielded", "half_done")

    def __init__(self, on_broken: Callable[[BaseException | None], None]) -> None:
        self._on_broken = on_broken
        self.half_done = False
        self._shielded = False  # the user's signal handlers are deferred

    def enter(self) -> None:
        if self.half_done:
            self._break(None)
        if not self._shielded or restore_handlers():  # else an earlier `fail` was interrupted
            self._shield()
        self.half_done = True

    def leave(self) -> None:
        """Signal handlers that had to wait run now, and may raise."""
        self.half_done = False
        if self._shielded and restore_handlers():
            self._shielded = False

    def fail(self, error: BaseException) -> None:
        """Something was raised after `enter`."""
        try:
            if self.half_done:
                self._break(error)
        finally:
            self.leave()

    def wait(self, sleep: Callable[[], T]) -> T:
        """Call this, which only waits, with signal handlers in place."""
        shielded = self._shielded
        self.leave()
        found = sleep()
        if shielded and not self._shielded:
            self._shield()
        self.half_done = True
        return found

    def call_user(self, call: Callable[[], T]) -> T:
        """Call code of the user, which may take any time, with signal handlers in place. If one of
        them raises inside the call, the work is half done."""
        if not self._shielded:
            return call()
        self.leave()
        self.half_done = True
        try:
            return call()
        finally:
            self._shield()

    def _shield(self) -> None:
        self._shielded = True  # before it is true: a handler that we leave alone may raise now
        self._shielded = defer_handlers()

    def _break(self, error: BaseException | None) -> None:
        self._on_broken(error)
        self.half_done = False


def raised_by_handler(error: BaseException) -> bool:
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
    if not callable(handler):
        return None  # SIG_DFL, SIG_IGN: their class is an enumeration, which has a __call__
    if not hasattr(handler, "__code__"):
        handler = inspect.getattr_static(type(handler), "__call__", None)
    return getattr(handler, "__code__", None)
