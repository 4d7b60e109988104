"""What a sample holds: how many bytes, and whether two of them hold the same.

Both consider data as it would arrive in a batch, not Python objects: a number is eight bytes, and
two arrays with equal contents are equal. Samples may be any objects, so contents that cannot be
compared are not an error: `digest` returns None for them.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
import torch

__all__ = ["digest", "weigh"]

_DEPTH: Final = 12
_NUMBER: Final = 8


def weigh(sample: Any, depth: int = _DEPTH) -> int:
    """Bytes of data in a sample."""
    if isinstance(sample, torch.Tensor):
        if sample.layout is torch.strided:
            return sample.numel() * sample.element_size()
        return len(pickle.dumps(sample))
    if isinstance(sample, (np.ndarray, np.generic)):
        return int(sample.nbytes)
    if sample is None or isinstance(sample, (bool, int, float, complex)):
        return _NUMBER
    if isinstance(sample, (str, bytes, bytearray)):
        return len(sample)
    if depth:
        parts = _parts(sample)
        if parts is not None:
            return sum(weigh(part, depth - 1) for part in parts)
        if _is_image(sample):
            return int(sample.width * sample.height * len(sample.getbands()))
    return sys.getsizeof(sample)


def _parts(sample: Any) -> Iterable[Any] | None:
    if isinstance(sample, Mapping):
        return sample.values()
    if isinstance(sample, (list, tuple, set, frozenset)):
        return sample
    if _is_image(sample):
        return None
    state = getattr(sample, "__dict__", None)
    return state.values() if isinstance(state, dict) and not callable(sample) else None


def _is_image(sample: Any) -> bool:
    """One of Pillow's, which need not be installed."""
    return hasattr(sample, "getbands") and hasattr(sample, "tobytes")


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
    elif _is_image(sample):
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
