"""Copies of a deque to which other threads append.

With Python's lock ``list(deque)`` is one step. In a free-threaded Python it raises if the deque is
changed meanwhile, and so does ``deque.copy()``. (``list`` of a dict or a set is one step there too,
``tuple`` and ``sum`` of them are not.)
"""

from __future__ import annotations

from collections import deque
from typing import TypeVar

T = TypeVar("T")


def copy_of(items: deque[T]) -> list[T]:
    """What is in it, at one moment. For one that is seldom changed."""
    while True:
        try:
            return list(items)
        except RuntimeError:  # "deque mutated during iteration"
            pass
