"""Whether a random generator has come into being in this process, for a fraction of a microsecond.

A dataset may make a generator at any time, and to look through the dataset after every batch would
cost more than many a batch. But an object of a class that was made at run time holds a reference to
that class. So the reference counts of ``random.Random`` and of its subclasses grow with every
object of theirs. NumPy's bit generators are objects of static classes, which do not count them;
but each has a lock, and the class of locks does count. Both are tried once in a process; where
that shows nothing (another interpreter, another NumPy) nothing is claimed to be seen.

A lock may be anyone's: what is seen is a reason to look, and no more. What is not seen:
``torch.Generator`` and a ``SeedSequence`` by itself; and a generator that is made in the same batch
in which another one, or a lock, is freed elsewhere.
"""

from __future__ import annotations

import functools
import operator
import random
from sys import getrefcount
from typing import Any, Final

import numpy as np
import numpy.random

__all__ = ["Births", "are_seen"]

_UNSEEN: Final = ("torch.Generator", "numpy.random.SeedSequence")
_TRIED: Final = 5  # objects


class Births:
    """Those since the last call."""

    def __init__(self) -> None:
        self._classes = _counted()
        self._counts = list(map(getrefcount, self._classes))

    def seen(self) -> bool:
        """Whether there are more objects of some class than there were."""
        counts = list(map(getrefcount, self._classes))
        if counts == self._counts:
            return False
        grown = any(map(operator.gt, counts, self._counts))
        if grown:  # a subclass that is new is one more reference to its base
            self._classes = _counted()
            counts = list(map(getrefcount, self._classes))
        self._counts = counts
        return grown


def are_seen(kind: str) -> bool:
    """Whether the birth of a generator of this kind (see `states.State`) is noticed."""
    if kind in _UNSEEN:
        return False
    return _python_is_counted() if kind.startswith("random.") else _numpy_is_counted()


def _counted() -> list[type]:
    """By identity: a metaclass may compare in a way of its own."""
    classes: dict[int, type] = {id(one): one for one in (_lock(), random.Random)}
    queue = [random.Random]
    for one in queue:
        new = [more for more in type.__subclasses__(one) if id(more) not in classes]
        classes.update((id(more), more) for more in new)
        queue += new
    return list(classes.values())


@functools.cache
def _lock() -> type:
    return type(np.random.PCG64(1).lock)


@functools.cache
def _python_is_counted() -> bool:
    return _counts(random.Random, random.Random)


@functools.cache
def _numpy_is_counted() -> bool:
    return all(_counts(_lock(), made) for made in (np.random.PCG64, np.random.RandomState))


def _counts(counted: type, made: Any) -> bool:
    before = getrefcount(counted)
    objects = [made(number) for number in range(_TRIED)]
    return getrefcount(counted) - before >= len(objects)
