"""Streams of stock torch, asked for once and kept on disk for all test processes and later runs.

What torch shows depends on its release, on the dataset and on how it is asked. So an answer is kept under a digest of
the releases, of the sources of the tests that describe it, and of its arguments: after a change of any of them torch is
asked again. `make test-all` always asks, and keeps what it is told. `make clean` removes all that was kept.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from tests.support.loaders import THOROUGH

TESTS = Path(__file__).parents[1]
KEPT = TESTS.parent / ".pytest_cache" / "golden"
RELEASES = (version("torch"), version("numpy"), sys.version)
T = TypeVar("T")


def asked_once(folder: str, arguments: Any, ask: Callable[[], T]) -> T:
    """What `ask` returns. `folder` of the tests describes it, together with `arguments`; what cannot be pickled is
    asked for each time."""
    try:
        told = pickle.dumps(arguments)
    except Exception:
        return ask()
    digest = hashlib.sha256(_sources(folder) + told).hexdigest()
    file = KEPT / digest[:32]
    if not THOROUGH:
        try:
            return pickle.loads(file.read_bytes())  # type: ignore[no-any-return]
        except FileNotFoundError:
            pass
    answer = ask()
    KEPT.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=KEPT, delete=False) as made:
        made.write(pickle.dumps(answer))
    os.replace(made.name, file)  # whole or not at all, for the test processes beside this one
    return answer


@functools.cache
def _sources(folder: str) -> bytes:
    found = hashlib.sha256(repr(RELEASES).encode())
    for part in (folder, "support"):
        for file in sorted((TESTS / part).glob("*.py")):
            found.update(file.name.encode() + b"\0" + file.read_bytes())
    return found.digest()
