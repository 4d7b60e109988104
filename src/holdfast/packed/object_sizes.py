"""How much memory Python objects take, estimated from a sample of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
import torch

from holdfast.introspection.attributes import own

SAMPLE = 1000
"""Items of a container that are measured."""
_DEPTH = 8


def deep_size(value: Any) -> int:
    """Bytes of a value with all it holds; for large containers estimated from a thousand items."""
    return measure(value)[0]


def object_count(value: Any) -> int:
    """How many Python objects it consists of, estimated in the same way."""
    return measure(value)[1]


def measure(value: Any, sample: int = SAMPLE) -> tuple[int, int]:
    """Bytes and number of objects; estimated from `sample` items of each larger container."""
    return _measure(value, {}, 0, sample)


def _measure(value: Any, seen: dict[int, Any], depth: int, sample: int) -> tuple[int, int]:
    if id(value) in seen:
        return 0, 0
    seen[id(value)] = value
    if isinstance(value, torch.Tensor):
        data = value.nbytes if value.layout is torch.strided else 0
        return data + sys.getsizeof(value), 1
    if isinstance(value, np.ndarray):
        data = value.nbytes if value.base is not None else 0  # getsizeof counts data it owns
        if value.dtype != object:
            return data + sys.getsizeof(value), 1
        return _add(sys.getsizeof(value), value.reshape(-1), value.size, seen, depth, sample)
    size = sys.getsizeof(value)
    if depth >= _DEPTH:
        return size, 1
    if isinstance(value, dict):
        keys = _add(0, value, len(value), seen, depth, sample)
        values = _add(0, value.values(), len(value), seen, depth, sample)
        return size + keys[0] + values[0], 1 + keys[1] + values[1]
    if isinstance(value, (list, tuple, set, frozenset)):
        return _add(size, value, len(value), seen, depth, sample)
    state = {} if isinstance(value, type) or callable(value) else own(value)
    if state:
        inside = sys.getsizeof(state) if type(value).__dictoffset__ else 0
        return _add(size + inside, state.values(), len(state), seen, depth, sample)
    return size, 1


def _add(
    size: int, parts: Iterable[Any], count: int, seen: dict[int, Any], depth: int, sample: int
) -> tuple[int, int]:
    if not count:
        return size, 1
    if isinstance(parts, (list, tuple)) and count > sample:
        step = count // sample
        chosen: Iterable[Any] = (parts[at] for at in range(0, step * sample, step))
    else:
        chosen = islice(parts, sample)
    taken = nbytes = objects = 0
    for part in chosen:
        taken += 1
        one, other = _measure(part, seen, depth + 1, sample)
        nbytes += one
        objects += other
    return size + nbytes * count // taken, 1 + objects * count // taken
