"""Threads of linear algebra libraries in workers: one each.

A library that starts a thread per core in every worker makes cores × workers of them, each with its
stack and its buffers, until the machine refuses another (``can't start new thread``). torch limits
its own threads in its workers; this module limits those of other libraries. If the user has set one
of the usual variables, nothing is changed. A `worker_init_fn` runs later and may change it again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from threadpoolctl import ThreadpoolController

VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


def decided(environment: Mapping[str, str]) -> bool:
    """Whether the user has said how many threads there should be."""
    return any(environment.get(name) for name in VARIABLES)


def find() -> ThreadpoolController | None:
    """The libraries loaded so far; None without /proc, where they cannot be listed.

    The search takes some milliseconds, and several times as long in a process just forked. So it is
    done before the fork, and repeated only after other imports."""
    global _found
    imported = len(sys.modules)
    if _found is None or _found[0] != imported:
        try:
            _found = imported, ThreadpoolController()
        except OSError:
            _found = imported, None
    return _found[1]


def limit(environment: Mapping[str, str] = os.environ) -> None:
    """Limit this process, and those it forks, to one thread per library."""
    if not decided(environment):
        found = find()
        if found is not None:
            found.limit(limits=1, user_api="blas")


_found: tuple[int, ThreadpoolController | None] | None = None
find()
