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

import os
import select
from collections.abc import Callable
from threading import get_ident
from typing import Any

__all__ = ["protect", "sweep"]

_sources: list[Callable[[], list[Any]]] = []
_pinned: dict[int, list[Any]] = {}  # the reading end of a child's pipe -> what must stay for it
_forking: dict[int, tuple[int, int]] = {}  # thread -> the pipe of the child it is about to fork
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
    poll = select.poll()
    for reading in list(_pinned):
        poll.register(reading, select.POLLIN)
    for reading, _ in poll.poll(0):
        if _pinned.pop(reading, None) is not None:
            os.close(reading)


def _before() -> None:
    sweep()
    kept = [thing for source in _sources for thing in source()]
    if not kept:
        return
    # Without a descriptor to be had this raises, which Python reports, and the fork goes on.
    reading, writing = os.pipe2(os.O_CLOEXEC)
    _pinned[reading] = kept
    _forking[get_ident()] = (reading, writing)


def _in_parent() -> None:
    pipe = _forking.pop(get_ident(), None)
    if pipe is not None:
        os.close(pipe[1])


def _in_child() -> None:
    global _owner
    _owner = os.getpid()
    _forking.pop(get_ident(), None)  # its writing end stays open as long as we live
    for reading in _pinned:
        os.close(reading)
    for _, writing in _forking.values():  # of children that other threads were about to fork
        os.close(writing)
    _pinned.clear()
    _forking.clear()
