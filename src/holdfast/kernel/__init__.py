"""Kernel features that few Python programs use, each with fallbacks where it is not available.

torch's loader needs processes, pipes and named shared memory. Ours also uses memory files without a
name, handles on processes, and signals at the end of a pipe. A Python may be built without a
function that kernel and libc have, a kernel may be older than the call (4.18 has no pidfds), a
sandbox may forbid it. None of that is a reason to fail where torch's loader runs, and none may be
discovered only at the first death, days later. So each of these features is used through this
package and nowhere else, by a chain of ways: Python's function, the system call itself, another
way to the same end. A feature that is only a further safety net may be left out. `survey` tries all
features and tells which way works and what is lost; `missing` names a feature that workers need
and that no way provides.

What does not work:

* Checking the kernel's version. Distributions backport features, and sandboxes remove them.
* Deciding when this module is imported. A filter may be set later, and most programs that import
  us never start a worker. So each way is tried when it is first needed. A way that is refused stays
  refused, because a filter can only be made stricter; so a chain never goes back.
* Taking every error for a refusal. A lack of descriptors or memory is temporary, and is raised.

Our descriptors are never 0, 1 or 2. Where one of these is closed (daemons, launchers, ``<&-``), the
next descriptor that is opened takes its number. A child that gets a new standard input would then
lose our file, and output to standard error would be written into it.

Not every platform can import the modules, and worker threads run without. So elsewhere than on
Linux they are imported when something in them is first used. On Linux they are imported at once: a
process that has no descriptor left, or has given up its rights, cannot import anything later.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.kernel.chain import Chain
    from holdfast.kernel.descriptors import (
        Doorbell,
        above_stdio,
        duplicate,
        mapped,
        open_file,
        pipe,
        reopen,
        socket_pair,
        stdio_taken,
    )
    from holdfast.kernel.features import FEATURES, NEEDED, Feature, missing, survey
    from holdfast.kernel.files import (
        DONTDUMP,
        POPULATE,
        POPULATE_WRITE,
        REMOVE,
        memory_file,
        reserve,
        seal,
    )
    from holdfast.kernel.lifetimes import (
        Child,
        die_with_parent,
        end_child,
        has_ended,
        is_line,
        own_handle,
        pidfd,
        signal_at_end,
    )
    from holdfast.kernel.resource_limits import limit, limit_of, set_limit, set_limit_of
    from holdfast.kernel.scheduling import cores, let_others_finish, let_others_run, yield_processor

__all__ = [
    "DONTDUMP",
    "FEATURES",
    "NEEDED",
    "POPULATE",
    "POPULATE_WRITE",
    "REMOVE",
    "Chain",
    "Child",
    "Doorbell",
    "Feature",
    "above_stdio",
    "cores",
    "die_with_parent",
    "duplicate",
    "end_child",
    "has_ended",
    "is_line",
    "let_others_finish",
    "let_others_run",
    "limit",
    "limit_of",
    "mapped",
    "memory_file",
    "missing",
    "open_file",
    "own_handle",
    "pidfd",
    "pipe",
    "reopen",
    "reserve",
    "seal",
    "set_limit",
    "set_limit_of",
    "signal_at_end",
    "socket_pair",
    "stdio_taken",
    "survey",
    "yield_processor",
]

_MODULES = {
    "chain": ("Chain",),
    "descriptors": (
        "Doorbell",
        "above_stdio",
        "duplicate",
        "mapped",
        "open_file",
        "pipe",
        "reopen",
        "socket_pair",
        "stdio_taken",
    ),
    "files": ("DONTDUMP", "POPULATE", "POPULATE_WRITE", "REMOVE", "memory_file", "reserve", "seal"),
    "lifetimes": (
        "Child",
        "die_with_parent",
        "end_child",
        "has_ended",
        "is_line",
        "own_handle",
        "pidfd",
        "signal_at_end",
    ),
    "resource_limits": ("limit", "limit_of", "set_limit", "set_limit_of"),
    "scheduling": ("cores", "let_others_finish", "let_others_run", "yield_processor"),
    "features": ("FEATURES", "Feature", "NEEDED", "missing", "survey"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = found  # so that this function is not called again
    return found


if sys.platform == "linux":
    for _name in _MODULE_OF:
        __getattr__(_name)
