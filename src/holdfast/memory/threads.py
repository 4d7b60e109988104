"""Threads of linear algebra libraries in workers: as many as in torch's, unless they do not fit.

A BLAS shares the work of one product among its threads, and the last bits of the result depend on
how many there are: with NumPy's OpenBLAS most products of 100 × 100 floats and more differ between
one thread and two. Equal bits come first, so the number is left as it is in torch's workers, where
only torch's own threads are limited to one.

That makes up to cores × workers of them, each with its stack. Where the control group or the user
may not have so many tasks, a library that asks for them ends its worker (``blas_thread_init``,
``can't start new thread``): there, and only there, workers get one each. Whoever has set one of the
usual variables has decided, and a `worker_init_fn` comes later and may decide otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from threadpoolctl import ThreadpoolController

from holdfast.autopsy.readers import HERE, Roots, cgroup, process

__all__ = ["crowded", "decided", "limit", "room"]

_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


def decided(environment: Mapping[str, str]) -> bool:
    """Whether the user has said how many threads there should be."""
    return any(environment.get(name) for name in _VARIABLES)


def room(roots: Roots = HERE, uid: int | None = None) -> int | None:
    """How many more tasks there may be, of which others want some too; None without a limit."""
    group = cgroup.confinement("self", roots)
    found = []
    if group.pids_max is not None and group.pids_current is not None:
        found.append(max(0, group.pids_max - group.pids_current))
    limits = process.limits("self", roots)
    allowed = None if limits is None else limits.processes[0]
    if allowed is not None and (os.getuid() if uid is None else uid) != 0:  # root has no such limit
        found.append(allowed)
    return min(found, default=None)


def crowded(workers: int, cores: int, room: int | None, environment: Mapping[str, str]) -> str:
    """Why workers have to do with one thread each, in a line for the log; "" if they need not."""
    needed = workers * cores
    if decided(environment) or room is None or 2 * needed <= room:
        return ""
    return (
        f"{workers} workers with {cores} threads each for linear algebra would be {needed} tasks, "
        f"and {room} are left here (pids.max, ulimit -u): each worker uses one instead. The last "
        "bits of large matrix products may so differ from torch's. To have it so everywhere, or "
        "otherwise: export OMP_NUM_THREADS=1, or another number"
    )


def limit() -> None:
    """One for this process and those it forks. Takes 10 ms: it looks through all libraries."""
    ThreadpoolController().limit(limits=1, user_api="blas")
