"""Batches as nested tuples that are equal exactly when the batches are: structure, types, dtypes,
shapes, strides, bits."""

from __future__ import annotations

import collections
import hashlib
from typing import Any

import numpy as np
import torch


def fingerprint(value: Any) -> Any:
    """A hashable, printable description of `value`; small tensors are shown whole, large ones by
    their hash."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, torch.Tensor):
        return _tensor(kind, value)
    if isinstance(value, np.ndarray):
        order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
        what = (
            [fingerprint(item) for item in value.ravel()]
            if value.dtype.hasobject
            else _bits(value.tobytes())
        )
        return (
            kind,
            value.dtype.descr if value.dtype.names else str(value.dtype),
            value.shape,
            order,
            _frozen(what),
        )
    if isinstance(value, np.generic):
        return kind, str(value.dtype), _bits(value.tobytes())
    if isinstance(value, collections.defaultdict):
        return (
            kind,
            repr(value.default_factory),
            tuple((fingerprint(k), fingerprint(v)) for k, v in value.items()),
        )
    if isinstance(value, collections.abc.Mapping):
        return kind, tuple((fingerprint(key), fingerprint(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return kind, tuple(fingerprint(item) for item in value)
    if isinstance(value, (set, frozenset)):
        return kind, tuple(sorted((fingerprint(item) for item in value), key=repr))
    if isinstance(value, (str, bytes, int, bool, type(None))):
        return kind, value
    if isinstance(value, (float, complex)):
        return kind, repr(value)
    if hasattr(value, "__dict__") and vars(value):
        return kind, tuple((name, fingerprint(item)) for name, item in sorted(vars(value).items()))
    return kind, repr(value)


def _tensor(kind: str, value: torch.Tensor) -> Any:
    about = (kind, str(value.dtype), str(value.layout), tuple(value.shape), value.requires_grad)
    value = value.detach()
    if value.layout is not torch.strided:
        return about, fingerprint(value.to_dense())
    dense = value.contiguous().reshape(-1)
    raw = dense.view(torch.uint8) if dense.numel() else dense.new_empty(0, dtype=torch.uint8)
    return about, value.stride(), _bits(raw.numpy().tobytes())


def _bits(raw: bytes) -> str:
    return raw.hex() if len(raw) <= 64 else hashlib.sha256(raw).hexdigest()


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
