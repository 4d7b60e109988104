"""How a program under ``holdfast run`` gets our engine: at its first loader, and not before.

`startup/sitecustomize.py` is imported by every Python process below ``holdfast run``, through the
environment. It does nothing but wait for the import of ``torch.utils.data.dataloader``, and then
calls `prepare`. Most of these processes never load data: launchers, compilers, `pip`. So nothing
else of holdfast, and nothing of torch, is imported before a loader is first iterated. Then
`holdfast.install` does the rest, with the options in the environment.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

began = time.time()
_lock = threading.RLock()
_torchs: dict[tuple[type, str], Any] = {}  # methods that wait for their first call
_here = threading.local()  # .paused in this thread


def prepare(module: Any) -> None:
    """torch's loader has just been imported."""
    loader, iterator = module.DataLoader, module._BaseDataLoaderIter
    for kind, name in ((loader, "__iter__"), (loader, "_get_iterator"), (iterator, "__init__")):
        _torchs[kind, name] = getattr(kind, name)
        setattr(kind, name, _at_first_call(kind, name))
    atexit.register(_summary, os.getpid())


def withdraw() -> None:
    """torch's own methods again. They are about to be replaced by others, or meant to stay."""
    with _lock:
        for (kind, name), torchs in _torchs.items():
            if getattr(kind.__dict__.get(name), "_waits", False):
                setattr(kind, name, torchs)
        _torchs.clear()


@contextmanager
def paused() -> Iterator[None]:
    """Iterators that this thread makes meanwhile are torch's, and nothing is installed for them.

    A program that imports holdfast itself comes here with the import half done: `private_names`
    makes an iterator, to see what torch's have.
    """
    _here.paused = True
    try:
        yield
    finally:
        _here.paused = False


def original(kind: type, name: str) -> Any:
    """The method of torch's; None if the class has none of its own."""
    return _torchs.get((kind, name), kind.__dict__.get(name))


def _at_first_call(kind: type, name: str) -> Any:
    torchs = _torchs[kind, name]

    @functools.wraps(torchs)
    def first_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(_here, "paused", False):
            return torchs(self, *args, **kwargs)
        with _lock:
            if _torchs:
                withdraw()
                _install()
        # Not what the class has now: that may be another library's, which calls this one.
        ours = sys.modules.get("holdfast.takeover.install")
        method = torchs if ours is None else ours.method(kind, name)
        return method(self, *args, **kwargs)

    first_call._waits = True  # type: ignore[attr-defined]
    return first_call


def _install() -> None:
    try:
        # The summary is imported here because it must not be at the exit: importing a module that
        # calls `exec` (every dataclass does) makes Python forget that it was interrupted, and the
        # exit status is another one.
        from holdfast.takeover import install, summary  # noqa: F401
    except ImportError as error:  # another environment, with another torch
        _say(f"holdfast cannot be used by this Python ({error}): its loaders keep torch's engine")
        return
    install.install()


def _summary(pid: int) -> None:
    summary = sys.modules.get("holdfast.takeover.summary")
    if summary is not None and pid == os.getpid():
        for line in summary.lines(began):
            _say(line)


def _say(line: str) -> None:
    if sys.stderr is not None:
        try:
            # In one piece, which `print` does not do below `python -u`: ranks share standard error.
            sys.stderr.write(f"holdfast: {line}\n")
            sys.stderr.flush()
        except (OSError, ValueError):  # it is closed
            pass
