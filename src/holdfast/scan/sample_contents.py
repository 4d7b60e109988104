"""Whether two samples hold the same.

Data is considered as it would arrive in a batch, not Python objects: two arrays with equal contents
are equal. Samples may be any objects, so contents that cannot be compared are not an error:
`digest` returns None for them.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from holdfast.introspection.data_size import is_image

_DEPTH: Final = 12


class _Opaque(Exception):
    """The contents cannot be read."""


def digest(sample: Any) -> bytes | None:
    """Equal for samples with equal contents; None if the contents cannot be compared."""
    hasher = hashlib.blake2b(digest_size=16)
    try:
        _feed(hasher, sample, _DEPTH)
    except _Opaque:
        return None
    return hasher.digest()


def _feed(hasher: Any, sample: Any, depth: int) -> None:
    hasher.update(type(sample).__qualname__.encode())
    if isinstance(sample, torch.Tensor) and sample.layout is torch.strided:
        flat = sample.detach().cpu().contiguous()
        hasher.update(f"{sample.dtype}{tuple(sample.shape)}".encode())
        hasher.update(flat.reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(sample, (np.ndarray, np.generic)) and not sample.dtype.hasobject:
        hasher.update(f"{sample.dtype}{sample.shape}".encode())
        hasher.update(sample.tobytes())
    elif sample is None or isinstance(sample, (bool, int, float, complex, str)):
        hasher.update(repr(sample).encode(errors="surrogatepass"))
    elif isinstance(sample, (bytes, bytearray)):
        hasher.update(len(sample).to_bytes(8, "little"))
        hasher.update(sample)
    elif is_image(sample):
        hasher.update(f"{sample.mode}{sample.size}".encode())
        hasher.update(sample.tobytes())
    else:
        _feed_parts(hasher, sample, depth)


def _feed_parts(hasher: Any, sample: Any, depth: int) -> None:
    if not depth:
        raise _Opaque
    if isinstance(sample, Mapping):
        parts: list[Any] = [part for item in sample.items() for part in item]
    elif isinstance(sample, (list, tuple)):
        parts = list(sample)
    elif isinstance(sample, (set, frozenset)):
        digests = [digest(part) for part in sample]
        parts = sorted(one for one in digests if one is not None)
        if len(parts) < len(digests):
            raise _Opaque
    elif isinstance(getattr(sample, "__dict__", None), dict) and not callable(sample):
        parts = [part for item in vars(sample).items() for part in item]
    else:
        try:
            parts = [pickle.dumps(sample)]
        except Exception:  # a handle, a generator: nothing to compare
            raise _Opaque from None
    hasher.update(len(parts).to_bytes(8, "little"))
    for part in parts:
        _feed(hasher, part, depth - 1)
