"""Handlers that are put aside come back, in this process and in those forked meanwhile."""

from __future__ import annotations

import contextlib
import enum
import itertools
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from holdfast.engine import signals

pytestmark = pytest.mark.timeout(60, method="thread")

FORK = multiprocessing.get_context("fork")
HANDLED, NOT_DEFERRED, DEFERRED = 7, 8, 9


@contextlib.contextmanager
def handling(number: int, handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def forked_elsewhere(target: Callable[..., None], *arguments: Any) -> Any:
    """A process forked by a thread that is not the main one."""
    process = FORK.Process(target=target, args=arguments)
    thread = threading.Thread(target=process.start)
    thread.start()
    thread.join()
    return process


def code_of(process: Any) -> int | None:
    process.join(20)
    if process.is_alive():
        process.kill()
        process.join()
        return None
    code: int = process.exitcode
    return code


def test_a_child_forked_while_handlers_are_put_aside_has_them() -> None:
    """By another thread, while the main one is inside next(): else terminate() does nothing. The child sends the signal
    itself, since in Python 3.13.0 a process forked by a thread notices others only while it waits."""
    with handling(signal.SIGTERM, lambda *_: os._exit(HANDLED)):
        assert signals.defer_handlers()
        try:
            child = forked_elsewhere(signal.raise_signal, signal.SIGTERM)
        finally:
            signals.restore_handlers()
        assert code_of(child) == HANDLED


def test_what_the_parent_has_caught_is_not_the_childs() -> None:
    told: list[int] = []
    with handling(signal.SIGUSR1, lambda *_: told.append(os.getpid())):
        assert signals.defer_handlers()
        try:
            signal.raise_signal(signal.SIGUSR1)
            child = forked_elsewhere(lambda: os._exit(len(told)))
            assert code_of(child) == 0
        finally:
            signals.restore_handlers()
    assert told == [os.getpid()]


class StruckInFork(logging.Handler):
    """Python calls this in a forked child, and before us: it was told of it earlier."""

    def _at_fork_reinit(self) -> None:
        super()._at_fork_reinit()  # type: ignore[misc]
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_to_a_child_that_has_not_its_handlers_back_yet_is_not_lost() -> None:
    with handling(signal.SIGTERM, lambda *_: os._exit(HANDLED)):
        assert signals.defer_handlers()
        striking = StruckInFork()
        try:
            child = forked_elsewhere(threading.Event().wait, 30)
        finally:
            logging._at_fork_reinit_lock_weakset.discard(striking)  # type: ignore[attr-defined]
            signals.restore_handlers()
        assert code_of(child) == HANDLED


def told_apart() -> None:
    told: list[int] = []
    signal.signal(signal.SIGUSR1, lambda *_: told.append(1))
    with signals.deferred():
        signal.raise_signal(signal.SIGUSR1)
        early = list(told)
    os._exit(DEFERRED if told and not early else NOT_DEFERRED)


def test_handlers_wait_in_a_child_that_another_thread_has_forked() -> None:
    """The thread that forks is the child's main one."""
    assert code_of(forked_elsewhere(told_apart)) == DEFERRED


class Struck(Exception):
    """What a handler raises."""


def struck(step: int, call: Callable[[], None]) -> bool:
    """Call it, and raise at this instruction of it, as a signal handler may. False if it has fewer."""

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal step
        frame.f_trace_opcodes = True
        if event == "opcode":
            step -= 1
            if step < 0:
                raise Struck
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Struck:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("is_set", [False, True])
def test_a_latch_can_be_set_and_waited_for_wherever_a_handler_raised_in_its_wait(
    is_set: bool,
) -> None:
    """With `threading.Event` the thread that sets it then waits for ever, or the handler's exception gives way to
    "release unlocked lock"."""
    for step in itertools.count():
        latch = signals.Latch()
        if is_set:
            latch.set()
        was_struck = struck(step, lambda latch=latch: latch.wait(0.001))  # type: ignore[misc]
        setting = threading.Thread(target=latch.set, daemon=True)
        setting.start()
        setting.join(20)
        assert not setting.is_alive(), step
        latch.wait(20)
        assert latch.is_set
        if not was_struck:
            break
    assert step > 3


class Colour(enum.Enum):
    RED = 1


def test_a_value_that_no_enumeration_has_is_not_taken_for_a_handlers_exception() -> None:
    """The handler of most signals is a member of an enumeration of Python's, not a function."""
    assert signal.SIG_DFL in map(signal.getsignal, signal.valid_signals())
    with pytest.raises(ValueError, match="Colour") as raised:
        Colour(2)
    assert not signals.raised_by_handler(raised.value)
