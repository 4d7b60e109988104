"""Calls functions in a child after a fork, on platforms that have forks."""

from __future__ import annotations

import os
from collections.abc import Callable


def in_child(call: Callable[[], object]) -> None:
    """Call this in every process that is forked from this one."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)
