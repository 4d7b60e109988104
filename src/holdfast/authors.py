"""Whose code is it: asked of a file, or of a module's name.

A file tells for sure, and is what a line in a traceback has. What is installed lies in a folder
named ``site-packages`` (``dist-packages`` on Debian), wherever that is: in an environment, under
the home directory, or inside the standard library's own folder.

A name is all that a class has without running something. It tells less: every library but a few
may be the user's own.
"""

from __future__ import annotations

import os
import sys
from typing import Literal

__all__ = ["OURS", "Author", "of_file", "well_known"]

Author = Literal["python", "library", "holdfast", "user"]

OURS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")  # ends with a separator
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_WELL_KNOWN = frozenset({"torch", "numpy", "holdfast", *sys.stdlib_module_names})


def _folders() -> tuple[str, ...]:
    """The standard library's, of what is written in Python and of what is compiled, which may lie
    under another prefix; as they are named and where links lead. (`sysconfig` knows them too, and
    all that Python was built with, which every process would carry along.)"""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    prefixes = (sys.base_prefix, sys.base_exec_prefix)
    named = [os.path.join(prefix, sys.platlibdir, version) for prefix in prefixes]
    named.append(os.path.dirname(os.__file__))
    found = [os.path.join(path, "") for one in named for path in (one, os.path.realpath(one))]
    return tuple(dict.fromkeys(found))


_PYTHONS = _folders()


def of_file(file: str, pythons: tuple[str, ...] = _PYTHONS, ours: str = OURS) -> Author:
    """Who wrote a source file or a native library. What was never in a file (``<string>``) is
    Python's: generated methods, and what was frozen into it."""
    if file.startswith(ours):
        return "holdfast"
    if not _INSTALLED.isdisjoint(file.split(os.sep)[:-1]):
        return "library"
    return "python" if file.startswith(("<", *pythons)) else "user"


def well_known(module: str) -> bool:
    """Whether a module is Python's, torch's, NumPy's or ours: nothing of the user's is in it. Other
    libraries may be of any kind, and are treated as the user's."""
    return module.partition(".")[0] in _WELL_KNOWN
