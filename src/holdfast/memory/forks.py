"""Batches that a forked child may still be looking at.

A child that is forked off the main process (a background writer, another loader's workers) has
the batches its parent held at that moment, and expects them to stay as they are. But they lie in
memory that is shared and recycled: as soon as the parent lets go of one, a worker writes the next
batch into its place. So what is lent out when a process forks stays lent until that child and all
its descendants are gone, or have become another program.

How we know that they are gone: the child keeps the writing end of a pipe, which nobody uses. The
parent has only the reading end, and sees its end of file when the last copy is closed. That is one
descriptor here for each living child that was forked while somebody held a batch, and no signal, no
thread and no waiting: `sweep` asks when there is something to do anyway.

Only ``os.fork`` and what is built on it (``multiprocessing``) can be seen from here. A library that
forks in C and goes on in the child without ``exec`` cannot.
"""

from __future__ import annotations

import itertools
import os
import select
from collections.abc import Callable
from threading import Lock, get_ident
from typing import Any

__all__ = ["protect", "sweep"]

_sources: list[Callable[[], list[Any]]] = []
_numbers = itertools.count()
_pinned: dict[int, tuple[int, list[Any]]] = {}
"""Of each child the reading end of its pipe, and what must stay for it. By a number that is never
used again, because descriptors are: whoever takes an entry out is the one who closes it."""
_forking: dict[int, int] = {}  # thread -> the writing end for the child it is about to fork
_for_ever: list[Any] = []
_sweeping = Lock()
_owner = os.getpid()


def protect(source: Callable[[], list[Any]]) -> None:
    """Keep what `source` lists at the moment of a fork alive until the child is gone."""
    if not _sources:
        os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
    _sources.append(source)


def sweep() -> None:
    """Let go of what was kept for children that are gone."""
    if not _pinned or os.getpid() != _owner:
        return
    if not _sweeping.acquire(blocking=False):
        return  # somebody does
    try:
        children = {entry[0]: number for number, entry in list(_pinned.items())}
        poll = select.poll()
        for reading in children:
            poll.register(reading, select.POLLIN)
        for reading, _ in poll.poll(0):
            if _pinned.pop(children[reading], None) is not None:
                os.close(reading)
    finally:
        _sweeping.release()


def _before() -> None:
    sweep()
    kept = [thing for source in _sources for thing in source()]
    if not kept:
        return
    try:
        reading, writing = os.pipe2(os.O_CLOEXEC)
    except OSError:  # no descriptor to be had: better kept for ever than changed under the child
        _for_ever.extend(kept)
        return
    _pinned[next(_numbers)] = (reading, kept)
    _forking[get_ident()] = writing


def _in_parent() -> None:
    writing = _forking.pop(get_ident(), None)
    if writing is not None:
        os.close(writing)


def _in_child() -> None:
    global _owner, _sweeping
    _owner = os.getpid()
    _sweeping = Lock()
    _forking.pop(get_ident(), None)  # its writing end stays open as long as we live
    for reading, _ in _pinned.values():
        os.close(reading)
    for writing in _forking.values():  # of children that other threads were about to fork
        os.close(writing)
    _pinned.clear()
    _forking.clear()
