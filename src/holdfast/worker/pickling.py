"""Which part of an object does not pickle: the path to it, for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from holdfast.introspection.attributes import own

_DEPTH = 12
_WIDTH = 1000


Encode = Callable[[Any], object]
"""Raises if it cannot pickle its argument."""


def _encode(value: Any) -> object:
    from holdfast.transport import codec  # here: worker threads pickle nothing

    return codec.encode(value, None)


def explain_pickle_error(error: Exception, blueprint: Any, encode: Encode = _encode) -> None:
    """Add to `error` the path of the attribute that caused it. `encode` if that is not pickle, but
    takes lambdas and local functions too."""
    needs, functions = "not even by cloudpickle", ""
    if encode is _encode:
        needs = "which this start method needs"
        functions = (
            "; replace lambdas and local functions by functions of a module or functools.partial"
        )
    for name in ("dataset", "collate_fn", "worker_init_fn", "on_bad_sample"):
        path = find_unpicklable(getattr(blueprint, name), name, encode)
        if path is not None:
            error.args = (
                f"{error}\nholdfast: {path} cannot be pickled, {needs}. "
                "Open files, locks and connections when they are first used in the worker, or "
                f"leave them out in __getstate__{functions}.",
            )
            return


def find_unpicklable(value: Any, path: str, encode: Encode = _encode) -> str | None:
    """The path of the innermost part that does not pickle; None if all does."""
    if _pickles(value, encode):
        return None
    seen: set[int] = set()
    for _ in range(_DEPTH):
        seen.add(id(value))
        for name, part in _parts(value):
            if id(part) not in seen and not _pickles(part, encode):
                value, path = part, path + name
                break
        else:
            break
    return f"{path} ({type(value).__module__}.{type(value).__qualname__})"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if issubclass(type(value), dict):  # and no other mapping: to look into a file is to read it
        for number, (key, part) in enumerate(value.items()):
            if number >= _WIDTH:
                return
            yield f"[{key!r}]", part
    elif issubclass(type(value), (list, tuple, set, frozenset)):
        for number, part in enumerate(value):
            if number >= _WIDTH:
                return
            yield f"[{number}]", part
    for key, part in own(value).items():
        yield f".{key}", part
    if hasattr(value, "func") and hasattr(value, "args"):  # functools.partial
        yield ".func", value.func
        yield ".args", value.args
    if hasattr(value, "__self__"):
        yield ".__self__", value.__self__


def _pickles(value: Any, encode: Encode) -> bool:
    try:
        encode(value)
    except RuntimeError:
        return True  # locks and queues that pickle only while a process is being started
    except BaseException:  # a sample's own, from its __reduce__
        return False
    return True
