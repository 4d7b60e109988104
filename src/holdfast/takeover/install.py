"""``holdfast.install()``: our engine for every loader of the process, those of frameworks too.

The methods of torch's class are replaced, not its name: most modules have imported the name long
before. Replaced are, of `torch.utils.data.DataLoader`,

- ``__iter__`` and ``_get_iterator``, by which an iterator is made. A subclass that overrides them
  and calls torch's gets our iterator there; one that makes an iterator of its own keeps it;
- ``__reduce_ex__``, which leaves the iterator of persistent workers out of copies and pickles;

and, of torch's iterators, ``__init__``: the one place where it can be seen that a loader has not
come to us, so that it can be said.

No name is added to torch's class, and nothing to a loader's attributes. Methods that another
library has put around ours stay when ours are withdrawn; ours, below them, then call torch's.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch.utils.data
from torch.utils.data import DataLoader as TorchLoader

from holdfast import at_fork, iteration, option_sources, runtime
from holdfast.loader import DataLoader
from holdfast.private_names import BaseDataLoaderIter
from holdfast.takeover import bootstrap

_lock = threading.RLock()
_Lock = type(_lock)
_chain: list[Installation] = []  # the last one is in effect


class Installation:
    """What `install` returns. Used with ``with``, it ends with the block; what was installed before
    is then in effect again."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self._entered = False

    def __enter__(self) -> Installation:
        self._entered = True
        return self

    def __exit__(self, *_: object) -> None:
        with _lock:
            self._entered = False
            if any(one is self for one in _chain):
                _chain[:] = [one for one in _chain if one is not self]
                _put_into_effect()

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        with _lock:
            state = "" if any(one is self for one in _chain) else " (ended)"
        return f"<holdfast.install({given}){state}>"


def install(**options: Any) -> Installation:
    """Give holdfast's engine to every `torch.utils.data.DataLoader` of this process.

    Also to those of subclasses, those that frameworks make, and those that are there already. The
    options are those of :class:`holdfast.DataLoader`; a loader's own win over these, and these over
    the environment's (``HOLDFAST_ON_BAD_SAMPLE=skip``). Called again, the last call's options hold.

    >>> import holdfast, torch
    >>> installation = holdfast.install(stall_timeout=60)
    >>> [batch.tolist() for batch in torch.utils.data.DataLoader([1, 2, 3], batch_size=2)]
    [[1, 2], [3]]
    >>> holdfast.uninstall()

    As a context manager it ends with the block:

    >>> with holdfast.install(on_bad_sample="skip"):
    ...     len(list(torch.utils.data.DataLoader([1, 2, 3])))
    3
    """
    checked = option_sources.check(options)
    with _lock:
        bootstrap.withdraw()
        # A call without `with` replaces one before it, so that many of them do not pile up.
        replaced = [one for one in _chain[:-1] if not one._entered]
        _chain[:] = [one for one in _chain if one not in replaced]
        made = Installation(checked)
        _chain.append(made)
        _put_into_effect()
        return made


def uninstall() -> None:
    """Undo every `install`. Persistent workers that are there keep their engine until they end.

    Without an `install` before it, it does nothing.
    """
    with _lock:
        bootstrap.withdraw()
        _chain.clear()
        _put_into_effect()


def _put_into_effect() -> None:
    if _chain:
        option_sources.install(_chain[-1].options)
        _patch()
    else:
        _unpatch()
        option_sources.install(None)


# -- torch's methods -----------------------------------------------------------------------

_REPLACED = (
    (TorchLoader, "__iter__"),
    (TorchLoader, "_get_iterator"),
    (TorchLoader, "__reduce_ex__"),
    (BaseDataLoaderIter, "__init__"),
)
_torchs: dict[tuple[type, str], Any] = {
    (kind, name): bootstrap.original(kind, name) for kind, name in _REPLACED
}
"""What was there before ours; None if the class had none of its own."""


def _iter(self: Any) -> Any:
    if not _chain:
        return _torchs[TorchLoader, "__iter__"](self)
    return iteration.iterate(self)


def _get_iterator(self: Any) -> Any:
    torchs = functools.partial(_torchs[TorchLoader, "_get_iterator"], self)
    if not _chain or isinstance(self, DataLoader):  # one of ours comes here for torch's own
        return torchs()
    return iteration.new_iterator(self, torchs, ours=False)


def _reduce_ex(self: Any, protocol: Any) -> Any:
    return runtime.reduced(super(TorchLoader, self).__reduce_ex__(protocol))


def _init(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
    _torchs[BaseDataLoaderIter, "__init__"](self, loader, *args, **kwargs)
    if _chain and not iteration.is_ours(self):
        _see_that_it_is_not_ours(type(self), loader)


_ours: dict[tuple[type, str], Callable[..., Any]] = dict(
    zip(_REPLACED, (_iter, _get_iterator, _reduce_ex, _init), strict=True)
)


def method(kind: type, name: str) -> Callable[..., Any]:
    """The one that stands for torch's, installed or not."""
    return _ours[kind, name]


def _patch() -> None:
    for (kind, name), ours in _ours.items():
        there = kind.__dict__.get(name)
        if not _is_below(there, ours):
            _torchs[kind, name] = there
            setattr(kind, name, ours if there is None else functools.wraps(there)(ours))


def _unpatch() -> None:
    for (kind, name), ours in _ours.items():
        if kind.__dict__.get(name) is not ours:
            continue  # not replaced; or another library has put its own around ours
        if _torchs[kind, name] is None:
            delattr(kind, name)
        else:
            setattr(kind, name, _torchs[kind, name])


def _is_below(there: Any, ours: Any) -> bool:
    """Whether it is ours, or one that another library has put around ours."""
    while there is not None and there is not ours:
        there = getattr(there, "__wrapped__", None)
    return there is not None


def _see_that_it_is_not_ours(kind: type, loader: Any) -> None:
    if iteration.makes_torchs.get() or torch.utils.data.get_worker_info() is not None:
        return
    workers = getattr(loader, "num_workers", 0)
    if not workers and option_sources.combine({})["on_bad_sample"] == "raise":
        return  # nothing is lost
    iteration.keep_torchs(loader, f"it makes an iterator of its own ({kind.__qualname__})")


def _in_child(new_lock: Callable[[], Any] = _Lock) -> None:
    global _lock
    _lock = new_lock()  # another thread may have held it


at_fork.in_child(_in_child)
