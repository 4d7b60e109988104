"""All pools of this process: who has to be closed at exit, and who is not ours after a fork.

A child forked from this process inherits pools that are not its own. It must not close or use them,
and lets go of their descriptors where holding them would keep somebody else alive or waiting.

What finalisers and a fork call here has what it needs in its arguments: finalisers of the user's
may close a loader, and fork, while the interpreter takes its modules apart, and no name of this
module means anything then.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

__all__ = [
    "CLOSE_WITHIN",
    "END_WITHIN",
    "KILL_WITHIN",
    "Member",
    "close_all",
    "descriptors",
    "enrol",
    "exiting",
    "leaves",
    "left",
    "of_ancestors",
    "retired",
]

# Closing takes two seconds at most, and to wake and return from a wait takes its time, too.
CLOSE_WITHIN = 1.95  # seconds to wait for any number of pools; of these ...
END_WITHIN = 1.65  # ... workers and nursery may take to end by themselves, ...
KILL_WITHIN = 0.2  # ... a nursery that has not may take to die, and the rest is for letting go


class Member(Protocol):
    """What is registered here: a pool, through its watch."""

    def dismiss(self) -> None:
        """Have it closed, and wait for nobody."""

    def wait_closed(self, deadline: float) -> None:
        """Wait until it is."""

    def disown(self) -> None:
        """In a child of its owner: let go of what is not the child's."""


_open: dict[int, Member] = {}  # by id, because adding to a dict is one step
_leaving: set[Member] = set()  # told to close, and not closed yet
_of_ancestors: list[Member] = []
_descriptors = threading.Lock()
_exiting = False


def enrol(member: Member) -> None:
    """It is open from now on."""
    _open[id(member)] = member


def leaves(member: Member, leaving: set[Member] = _leaving) -> None:
    """It has been told to close; somebody has to hold it until it has."""
    leaving.add(member)


def retired(member: Member) -> None:
    """It is open no more."""
    _open.pop(id(member), None)


def left(member: Member) -> None:
    """It is closed."""
    _leaving.discard(member)


def of_ancestors() -> tuple[Member, ...]:
    """In a forked process: those that belong to the processes it was forked from."""
    return tuple(_of_ancestors)


def descriptors() -> threading.Lock:
    """Held while descriptors are closed, or made and passed on by a fork: a number that one thread
    has just closed may already be another's."""
    return _descriptors


def exiting() -> bool:
    """Whether the interpreter is about to end."""
    return _exiting


def close_all(
    members: Iterable[Member],
    within: float = CLOSE_WITHIN,
    clock: Callable[[], float] = time.monotonic,
    too_late: Callable[[], bool] = sys.is_finalizing,
) -> None:
    """Close several within one deadline. Safe to call twice, from anywhere."""
    if too_late():
        return  # whoever could be closed is, by `_close_at_exit`; nobody is left to wait for
    members = list(members)
    for member in members:
        member.dismiss()
    deadline = clock() + within
    for member in members:
        member.wait_closed(deadline)


@atexit.register
def _close_at_exit() -> None:
    global _exiting
    _exiting = True
    close_all({*list(_open.values()), *list(_leaving)})


def _in_child(
    new_lock: Callable[[], threading.Lock] = threading.Lock,
    opened: dict[int, Member] = _open,
    leaving: set[Member] = _leaving,
    ancestors: list[Member] = _of_ancestors,
) -> None:
    global _descriptors
    _descriptors = new_lock()  # whoever held it is not here
    ancestors.extend((*opened.values(), *leaving))  # beside those that were not our parent's
    opened.clear()
    leaving.clear()


os.register_at_fork(after_in_child=_in_child)
