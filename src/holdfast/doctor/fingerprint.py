"""What a dataset and its modules look like, so that a change is seen.

Compared before and after some samples were loaded, in a worker: whatever differs is state that
every worker has for itself.
"""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from holdfast.doctor.parts import parts

__all__ = ["changed", "fingerprint"]

_ENDS = 8  # entries looked at on either side of a container
_BYTES = 1 << 16


def fingerprint(dataset: Any) -> dict[str, Any]:
    """A value for every attribute of the dataset, and every global of the modules of its classes."""
    found = {path: _look(value) for path, value in parts(dataset)}
    for name, module in _modules(dataset):
        for key, value in vars(module).items():
            if not key.startswith("__") and not isinstance(
                value, (type, ModuleType, FunctionType, torch.nn.Module)
            ):
                found[f"{name}.{key}"] = _look(value)
    return found


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Paths that differ; a container that differs stands for all that is in it."""
    missing = object()
    different = {
        path
        for path in {**before, **after}
        if before.get(path, missing) != after.get(path, missing)
    }
    return sorted(path for path in different if not different.intersection(_above(path)))


def _above(path: str) -> Iterator[str]:
    """What a path leads through: "a.b[0]" is in "a.b", and that in "a"."""
    for at, sign in enumerate(path):
        if sign in ".[":
            yield path[:at]


def _modules(dataset: Any) -> Iterator[tuple[str, ModuleType]]:
    seen = set()
    for _, value in parts(dataset):
        for kind in type(value).__mro__:
            name = kind.__module__
            home = name.partition(".")[0]
            if name in seen or home in ("torch", "numpy", "holdfast", *sys.stdlib_module_names):
                continue
            seen.add(name)
            module = sys.modules.get(name)
            if module is not None and hasattr(kind, "__getitem__") | hasattr(kind, "__iter__"):
                yield name, module


def _look(value: Any) -> Any:
    if isinstance(value, (type(None), bool, int, float, str, bytes)):
        return value
    if isinstance(value, np.ndarray):
        return (id(value), value.shape, _crc(value))
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.layout is not torch.strided:
            return id(value)
        return (id(value), tuple(value.shape), _crc(value.detach().reshape(-1)[:_BYTES].numpy()))
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if isinstance(value, torch.Generator):
        return zlib.crc32(value.get_state().numpy().tobytes())
    if isinstance(value, (np.random.Generator, np.random.RandomState)):
        state = (
            value.bit_generator.state
            if isinstance(value, np.random.Generator)
            else value.get_state()
        )
        return repr(state)
    if isinstance(value, dict):
        return (id(value), len(value), *map(id, list(value.values())[-_ENDS:]))
    if isinstance(value, (list, tuple)):
        return (id(value), len(value), *map(id, (*value[:_ENDS], *value[-_ENDS:])))
    if isinstance(value, (set, frozenset)):
        return (id(value), len(value))
    return id(value)


def _crc(array: np.ndarray[Any, Any]) -> int:
    if array.dtype.hasobject:
        return 0
    return zlib.crc32(np.ascontiguousarray(array.reshape(-1)[:_BYTES]).tobytes())
