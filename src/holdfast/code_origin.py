"""Whose code is it: Python's, a library's, holdfast's or the user's.

A file name, as in the lines of a traceback, decides it. Installed code is in a folder named
``site-packages`` (``dist-packages`` on Debian), wherever that is: in an environment, under the home
directory, or inside the standard library's own folder.

Of a class only the module's name is known without running code. That says less: any but a few
well-known modules may be the user's own.
"""

from __future__ import annotations

import os
import sys
from typing import Literal

Author = Literal["python", "library", "holdfast", "user"]

OURS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")  # ends with a separator
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_WELL_KNOWN = frozenset({"torch", "numpy", "holdfast", *sys.stdlib_module_names})


def _folders() -> tuple[str, ...]:
    """The folders of the standard library, also of its compiled modules, which may be under another
    prefix; each with symbolic links resolved and not. (`sysconfig` knows them too, but importing it
    would cost every process memory.)"""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    prefixes = (sys.base_prefix, sys.base_exec_prefix)
    named = [os.path.join(prefix, sys.platlibdir, version) for prefix in prefixes]
    named.append(os.path.dirname(os.__file__))
    found = [os.path.join(path, "") for one in named for path in (one, os.path.realpath(one))]
    return tuple(dict.fromkeys(found))


_PYTHONS = _folders()


def of_file(file: str, pythons: tuple[str, ...] = _PYTHONS, ours: str = OURS) -> Author:
    """The author of a source file or a native library. Code that is not in a file (``<string>``)
    counts as Python's: generated methods, and frozen modules."""
    if file.startswith(ours):
        return "holdfast"
    if not _INSTALLED.isdisjoint(file.split(os.sep)[:-1]):
        return "library"
    return "python" if file.startswith(("<", *pythons)) else "user"


def module_of(kind: type) -> str:
    """The name of a class's module; empty if it has none. Classes made by native code may have no
    such attribute, or a descriptor in its place, as that of Cython's functions has."""
    try:
        module = type.__getattribute__(kind, "__module__")
    except AttributeError:
        return ""
    return module if isinstance(module, str) else ""


def well_known(module: str) -> bool:
    """Whether a module is Python's, torch's, NumPy's or ours, so that no code of the user is in it.
    All other modules are treated as the user's."""
    return module.partition(".")[0] in _WELL_KNOWN


def users_level() -> int:
    """The stack level, for `warnings.warn` in our caller, of the line that uses the loader."""
    frame = sys._getframe(1)
    level = 1
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] != "holdfast" and not module.startswith("torch.utils.data"):
            break
        frame = frame.f_back
        level += 1
    return level
