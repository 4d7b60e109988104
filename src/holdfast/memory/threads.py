"""Threads of linear algebra libraries in workers: one each.

A library that starts a thread per core in every worker makes cores × workers of them, each with its
stack and its buffers, until the machine refuses another (``can't start new thread``). torch limits
its own in its workers; this does so for the others. Whoever has set one of the usual variables has
decided, and a `worker_init_fn` comes later and may decide otherwise.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from threadpoolctl import ThreadpoolController

__all__ = ["VARIABLES", "decided", "find", "limit"]

VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


def decided(environment: Mapping[str, str]) -> bool:
    """Whether the user has said how many threads there should be."""
    return any(environment.get(name) for name in VARIABLES)


def find() -> ThreadpoolController | None:
    """The libraries loaded by now; None without /proc, where they cannot be listed.

    Looking for them takes some milliseconds, and several times as long in a process just forked;
    so it is done before, and again only after other imports."""
    global _found
    imported = len(sys.modules)
    if _found is None or _found[0] != imported:
        try:
            _found = imported, ThreadpoolController()
        except OSError:
            _found = imported, None
    return _found[1]


def limit(environment: Mapping[str, str] = os.environ) -> None:
    """For this process and those it forks."""
    if not decided(environment):
        found = find()
        if found is not None:
            found.limit(limits=1, user_api="blas")


_found: tuple[int, ThreadpoolController | None] | None = None
find()
