"""What a dataset and its modules look like, so that a change is seen.

Compared before and after some samples were loaded, in a worker: whatever differs is state that
every worker has for itself.
"""

from __future__ import annotations

import functools
import random
import sys
import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from holdfast.memory.attributes import is_a
from holdfast.memory.parts import homes, parts

__all__ = ["changed", "fingerprint"]

_ENDS = 8  # entries looked at on either side of a container
_BYTES = 1 << 16
_MISSING = object()


def fingerprint(dataset: Any, marks: Sequence[int] = ()) -> dict[str, Any]:
    """A value for every attribute of the dataset, and every global of the modules of its classes.

    Of large containers the ends are looked at, and the entries at `marks`: those of the samples
    that are loaded. To look at all would copy them into this worker.
    """
    found = {path: _look(value, marks) for path, value in parts(dataset)}
    for name, module in _modules(dataset):
        for key, value in list(vars(module).items()):
            if not key.startswith("__") and not is_a(
                value, (type, ModuleType, FunctionType, torch.nn.Module)
            ):
                found[f"{name}.{key}"] = _look(value, marks)
    return found


def changed(
    before: dict[str, Any], after: dict[str, Any], first: dict[str, Any] | None = None
) -> list[str]:
    """Paths that differ; a container that differs stands for all that is in it.

    What was None or not there, came with the first sample (as it was `first`) and has stayed is no
    state: it was opened, or built, when it was needed.
    """
    different = {
        path
        for path in {**before, **after}
        if before.get(path, _MISSING) != after.get(path, _MISSING)
    }
    built = {
        path
        for path in different
        if first is not None
        and before.get(path) is None
        and first.get(path, _MISSING) == after.get(path, _MISSING)
    }
    left = different - built
    above = {path: set(_above(path)) for path in left}
    return sorted(path for path in left if not above[path] & (left | built))


def _above(path: str) -> Iterator[str]:
    """What a path leads through: "a.b[0]" is in "a.b", and that in "a"."""
    for at, sign in enumerate(path):
        if sign in ".[":
            yield path[:at]


def _modules(dataset: Any) -> Iterator[tuple[str, ModuleType]]:
    """Modules of the dataset's classes, and the others of the same packages that are loaded."""
    packages = {kind.__module__.partition(".")[0] for kind in homes(dataset)}
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] in packages and is_a(module, ModuleType):
            yield name, module


def _look(value: Any, marks: Sequence[int]) -> Any:
    if is_a(value, (type(None), bool, int, float, complex, str, bytes)):
        return value
    if is_a(value, np.ndarray):
        return (id(value), value.shape, _crc(value), _rows(value, marks))
    if is_a(value, torch.Tensor):
        if value.device.type != "cpu" or value.layout is not torch.strided:
            return id(value)
        return (id(value), *_look(_plain(value), marks)[1:])
    if is_a(value, random.Random):
        return hash(value.getstate())
    if is_a(value, torch.Generator):
        return zlib.crc32(value.get_state().numpy().tobytes())
    if is_a(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if is_a(value, np.random.RandomState):
        return repr(value.get_state())
    if is_a(value, functools._lru_cache_wrapper):
        return (id(value), value.cache_info().currsize)
    if is_a(value, dict):
        ends = islice(reversed(dict.values(value)), _ENDS)
        marked = [dict.get(value, mark) for mark in marks]
        return (id(value), len(value), *map(id, ends), *map(id, marked))
    if is_a(value, (list, tuple)):
        marked = [value[mark] for mark in marks if mark < len(value)]
        return (id(value), len(value), *map(id, (*value[:_ENDS], *value[-_ENDS:], *marked)))
    if is_a(value, (set, frozenset)):
        return (id(value), len(value))
    return id(value)


def _plain(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor's bytes, whatever its kind of number, row by row."""
    rows = tensor.detach() if tensor.ndim else tensor.detach().reshape(1)
    if not rows.is_contiguous():
        rows = rows[:_ENDS]  # to put all of it in order would take as much memory again
    return rows.resolve_conj().resolve_neg().contiguous().view(torch.uint8).numpy()


def _rows(array: np.ndarray[Any, Any], marks: Sequence[int]) -> tuple[int, ...]:
    return tuple(_crc(array[mark]) for mark in marks if array.ndim and mark < len(array))


def _crc(array: Any) -> int:
    plain = np.asarray(array)
    if plain.dtype.hasobject:
        return 0
    return zlib.crc32(plain.flat[:_BYTES].tobytes())
