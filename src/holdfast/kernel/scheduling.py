"""Who runs when, and where."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from holdfast.kernel.chain import Chain, python

__all__ = ["cores", "let_others_finish", "yield_processor"]


_yield: Chain[[], None] = Chain(
    ("os.sched_yield", python(os, "sched_yield")), ("time.sleep", lambda: time.sleep(0))
)


def yield_processor() -> Callable[[], None]:
    """A function that lets others run for a moment."""
    _yield()
    return _yield.serving


def cores() -> int:
    """How many this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return os.cpu_count() or 1


def let_others_finish() -> bool:
    """Do not interrupt a process that is running when this one has something to do again.

    With small batches and few cores that happens several times in a millisecond: the trainer asks
    for a batch, and the worker that has waited for it takes the trainer's core before it has asked
    the next one. It is no lower priority: once it runs, it has the same share of the time. Whoever
    has chosen another policy keeps it. False if a sandbox does not let us: everything works as
    well, and a little slower.
    """
    try:
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return True
    except (AttributeError, OSError):
        return False
