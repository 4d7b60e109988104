"""Processor cores and the scheduling policy."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from holdfast.kernel.chain import Chain, python

_yield: Chain[[], None] = Chain(
    ("os.sched_yield", python(os, "sched_yield")), ("time.sleep", lambda: time.sleep(0))
)


def yield_processor() -> Callable[[], None]:
    """A function that lets other threads and processes run."""
    _yield()
    return _yield.serving


def cores() -> int:
    """How many cores this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return os.cpu_count() or 1


def let_others_finish() -> bool:
    """Do not preempt another process when this one wakes up (``SCHED_BATCH``).

    With small batches and few cores that happens several times in a millisecond: the trainer orders
    a batch, and the worker that was waiting for the order takes the trainer's core before the
    trainer has sent the next order. This is not a lower priority: a running process gets the same
    share of the time. If the user has chosen another policy, it is kept. False if a sandbox refuses
    it: everything works as well, a little slower.
    """
    try:
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return True
    except (AttributeError, OSError):
        return False


def let_others_run() -> None:
    """Run only when no other process wants the processor (``SCHED_IDLE``); where that is refused,
    at the lowest priority."""
    try:
        os.nice(19)
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):
        pass  # refused by a sandbox: this process gets the same share as a worker
