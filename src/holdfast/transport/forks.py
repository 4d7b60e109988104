"""Batches that a forked child may still be looking at.

A child that is forked off the main process (a background writer, another loader's workers) has
the batches its parent held at that moment, and expects them to stay as they are. But they lie in
memory that is shared and recycled: as soon as the parent lets go of one, a worker writes the next
batch into its place. So blocks that are lent out when a process forks stay lent until that child
and all its descendants have ended, or have become another program.

How we know that they have ended: the child keeps the writing end of a pipe, to which nothing is
ever written. The parent has only the reading end, and reads end of file when the last copy is
closed. This costs one descriptor for each living child that was forked while the user held a batch.
It needs no signal, no thread and no waiting: `sweep` polls the pipes when windows are used anyway.

A process may also fork during interpreter shutdown, in a finaliser of the user's, when the globals
of this module are cleared already. So all state is in one object, which the hooks hold, and the
functions they call are bound to it.

Only ``os.fork`` and what is built on it (``multiprocessing``) can be seen from here. A library that
forks in C and continues in the child without ``exec`` cannot.
"""

from __future__ import annotations

import itertools
import os
import select
from collections.abc import Callable
from threading import Lock, get_ident
from typing import Any

from holdfast import kernel


class _Pins:
    """What must not be recycled yet, and for which child."""

    _getpid = staticmethod(os.getpid)
    _get_ident = staticmethod(get_ident)
    _close = staticmethod(os.close)
    _pipe = staticmethod(kernel.pipe)
    _poll = staticmethod(select.poll)
    _new_lock = staticmethod(Lock)

    def __init__(self) -> None:
        self.sources: list[Callable[[], list[Any]]] = []
        self.pinned: dict[int, tuple[int, list[Any]]] = {}
        """For each child the reading end of its pipe, and what must be kept for it. The keys are
        numbers that are never reused, as descriptors are: the thread that pops an entry is the one
        that closes its descriptor."""
        self._numbers = itertools.count()
        self._forking: dict[int, int] = {}  # thread -> the writing end for its next child
        self._for_ever: list[Any] = []
        self._sweeping = Lock()
        self._owner = os.getpid()

    def sweep(self, ended: int = select.POLLIN) -> None:
        """Release what was kept for children that have ended."""
        if not self.pinned or self._getpid() != self._owner:
            return
        if not self._sweeping.acquire(blocking=False):
            return  # another thread is sweeping
        try:
            children = {entry[0]: number for number, entry in list(self.pinned.items())}
            poll = self._poll()
            for reading in children:
                poll.register(reading, ended)
            for reading, _ in poll.poll(0):
                if self.pinned.pop(children[reading], None) is not None:
                    self._close(reading)
        finally:
            self._sweeping.release()

    def before(self) -> None:
        self.sweep()
        kept = [thing for source in self.sources for thing in source()]
        if not kept:
            return
        try:
            reading, writing = self._pipe()
        except OSError:  # no descriptor left: better kept for ever than overwritten for the child
            self._for_ever.extend(kept)
            return
        self.pinned[next(self._numbers)] = (reading, kept)
        self._forking[self._get_ident()] = writing

    def in_parent(self) -> None:
        writing = self._forking.pop(self._get_ident(), None)
        if writing is not None:
            self._close(writing)

    def in_child(self) -> None:
        self._owner = self._getpid()
        self._sweeping = self._new_lock()
        self._forking.pop(self._get_ident(), None)  # its writing end stays open as long as we live
        for reading, _ in self.pinned.values():
            self._close(reading)
        for writing in self._forking.values():  # of children that other threads were about to fork
            self._close(writing)
        self.pinned.clear()
        self._forking.clear()


_pins = _Pins()
os.register_at_fork(
    before=_pins.before, after_in_parent=_pins.in_parent, after_in_child=_pins.in_child
)
sweep = _pins.sweep


def protect(source: Callable[[], list[Any]]) -> None:
    """Keep what `source` lists at the moment of a fork alive until the child has ended."""
    _pins.sources.append(source)
