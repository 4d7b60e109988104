"""All pools of this process: who has to be closed at exit, and who is not ours after a fork.

A child forked from this process inherits pools that are not its own. It must not close or use them,
and lets go of their descriptors where holding them would keep somebody else alive or waiting.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Iterable
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

CLOSE_WITHIN = 2.0  # seconds closing takes at most, for any number of pools; of these ...
END_WITHIN = 1.7  # ... workers and nursery may take to end by themselves, ...
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


def leaves(member: Member) -> None:
    """It has been told to close; somebody has to hold it until it has."""
    _leaving.add(member)


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


def close_all(members: Iterable[Member]) -> None:
    """Close several within one deadline. Safe to call twice, from anywhere."""
    members = list(members)
    for member in members:
        member.dismiss()
    deadline = time.monotonic() + CLOSE_WITHIN
    for member in members:
        member.wait_closed(deadline)


@atexit.register
def _close_at_exit() -> None:
    global _exiting
    _exiting = True
    close_all({*list(_open.values()), *list(_leaving)})


def _in_child() -> None:
    global _descriptors
    _descriptors = threading.Lock()  # whoever held it is not here
    _of_ancestors.extend((*_open.values(), *_leaving))  # beside those that were not our parent's
    _open.clear()
    _leaving.clear()


os.register_at_fork(after_in_child=_in_child)
