"""Fingerprints of a dataset and its modules, to find what changes while samples are loaded.

They are compared in a worker, before and after some samples: whatever differs is state that every
worker has its own copy of.
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

from holdfast.introspection.attributes import is_a
from holdfast.introspection.dataset_parts import homes, parts

_ENDS = 8  # entries compared at either end of a container
_COMPARED_BYTES = 1 << 16
_MISSING = object()
_LRU_CACHED = type(functools.lru_cache(id))  # of functions with a cache


def fingerprint(dataset: Any, marks: Sequence[int] = ()) -> dict[str, Any]:
    """A value for every attribute of the dataset, and every global of the modules of its classes.

    Of large containers only the ends are read, and the entries at `marks`, the indices of the
    samples that are loaded. Reading all entries would copy them into this worker.
    """
    found = {path: _inspect(value, marks) for path, value in parts(dataset)}
    for name, module in _modules(dataset):
        for key, value in list(vars(module).items()):
            if not key.startswith("__") and not is_a(
                value, (type, ModuleType, FunctionType, torch.nn.Module)
            ):
                found[f"{name}.{key}"] = _inspect(value, marks)
    return found


def changed(
    before: dict[str, Any], after: dict[str, Any], first: dict[str, Any] | None = None
) -> list[str]:
    """Paths that differ; of a container that differs only its own path.

    `first` is the fingerprint after the first sample. What was None or missing before it and has
    not changed since is no state: it was opened or built when it was first needed.
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
    """The prefixes of a path: "a" and "a.b" for "a.b[0]"."""
    for at, sign in enumerate(path):
        if sign in ".[":
            yield path[:at]


def _modules(dataset: Any) -> Iterator[tuple[str, ModuleType]]:
    """Modules of the dataset's classes, and all loaded modules of the same packages."""
    packages = {kind.__module__.partition(".")[0] for kind in homes(dataset)}
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] in packages and is_a(module, ModuleType):
            yield name, module


def _inspect(value: Any, marks: Sequence[int]) -> Any:
    if is_a(value, (type(None), bool, int, float, complex, str, bytes)):
        return value
    if is_a(value, np.ndarray):
        return (id(value), value.shape, _crc(value), _rows(value, marks))
    if is_a(value, torch.Tensor):
        if value.device.type != "cpu" or value.layout is not torch.strided:
            return id(value)
        return (id(value), *_inspect(_plain(value), marks)[1:])
    if is_a(value, random.Random):
        return hash(value.getstate())
    if is_a(value, torch.Generator):
        return zlib.crc32(value.get_state().numpy().tobytes())
    if is_a(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if is_a(value, np.random.RandomState):
        return repr(value.get_state())
    if is_a(value, _LRU_CACHED):
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
    """A tensor's bytes, whatever its dtype, row by row."""
    rows = tensor.detach() if tensor.ndim else tensor.detach().reshape(1)
    if not rows.is_contiguous():
        rows = rows[:_ENDS]  # a contiguous copy of all of it would double its memory
    return rows.resolve_conj().resolve_neg().contiguous().view(torch.uint8).numpy()


def _rows(array: np.ndarray[Any, Any], marks: Sequence[int]) -> tuple[int, ...]:
    return tuple(_crc(array[mark]) for mark in marks if array.ndim and mark < len(array))


def _crc(array: Any) -> int:
    plain = np.asarray(array)
    if plain.dtype.hasobject:
        return 0
    return zlib.crc32(plain.flat[:_COMPARED_BYTES].tobytes())
