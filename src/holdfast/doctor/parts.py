"""What hangs on a dataset: everything within a few steps of attributes and small containers.

Also what its functions hold (variables they enclose, arguments they were given or have by default)
and what belongs to its classes. Nothing of the user's runs because we look: no properties, no
``__getattr__``, no ``__class__`` that pretends.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
import torch.utils.data

from holdfast.authors import well_known
from holdfast.memory.attributes import is_a, own

__all__ = ["homes", "parts"]

_DEPTH = 5
_WIDTH = 256  # of a container's entries
_PLAIN = (type(None), str, bytes, int, float, complex, type, ModuleType)
_NO_PARTS = (np.ndarray, np.generic, torch.Tensor)


def homes(dataset: Any) -> Iterator[type]:
    """The classes that the user has written, or chosen, for this dataset and those inside it."""
    seen: set[type] = set()
    for number, (_, value) in enumerate(parts(dataset)):
        if number == 0 or is_a(value, torch.utils.data.Dataset):
            for kind in type(value).__mro__:
                if kind not in seen and not well_known(kind.__module__):
                    seen.add(kind)
                    yield kind


def parts(thing: Any, path: str = "dataset") -> Iterator[tuple[str, Any]]:
    """Paths and values, the thing itself first, each object once, plain values each time."""
    yield from _walk(thing, path, _DEPTH, set())


def _walk(value: Any, path: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if is_a(value, _PLAIN):
        yield path, value  # many attributes may have the same one
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    yield path, value
    if depth and not is_a(value, _NO_PARTS):
        for name, part in _inside(value, path, seen):
            yield from _walk(part, name, depth - 1, seen)


def _inside(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if is_a(value, dict):
        for key, part in list(islice(dict.items(value), _WIDTH)):
            yield f"{path}[{key!r}]", part
    elif is_a(value, (list, tuple, deque)):
        for number, part in enumerate(islice(value, _WIDTH)):
            yield f"{path}[{number}]", part
    elif is_a(value, FunctionType):
        yield from _of_function(value, path)
    elif is_a(value, MethodType):
        yield f"{path}.__self__", value.__self__
    elif is_a(value, functools.partial):
        yield f"{path}.func", value.func
        yield f"{path}.args", value.args
        yield f"{path}.keywords", value.keywords
    for key, part in own(value).items():
        yield f"{path}.{key}", part
    if not well_known(type(value).__module__):
        yield from _of_class(type(value), seen)


def _of_function(function: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{path}.<closure>.{name}", cell.cell_contents
        except ValueError:
            continue  # not bound yet
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for number, default in enumerate(defaults):
        yield f"{path}.<defaults>[{number}]", default


def _of_class(kind: type, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """What all objects of a class share: its attributes, and what its methods keep."""
    for base in kind.__mro__:
        if id(base) in seen or well_known(base.__module__):
            continue
        seen.add(id(base))
        for name, part in list(vars(base).items()):
            if is_a(part, FunctionType):
                yield from _of_function(part, f"{base.__qualname__}.{name}")
            elif not name.startswith("__") and not hasattr(type(part), "__get__"):
                yield f"{base.__qualname__}.{name}", part
