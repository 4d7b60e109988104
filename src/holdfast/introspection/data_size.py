"""How many bytes of data a sample or a batch has.

Data counts as it would arrive in a batch, not Python objects: a number is eight bytes. Samples may
be any objects.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
import torch

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
        if is_image(sample):
            return int(sample.width * sample.height * len(sample.getbands()))
    return sys.getsizeof(sample)


def _parts(sample: Any) -> Iterable[Any] | None:
    if isinstance(sample, Mapping):
        return sample.values()
    if isinstance(sample, (list, tuple, set, frozenset)):
        return sample
    if is_image(sample):
        return None
    state = getattr(sample, "__dict__", None)
    return state.values() if isinstance(state, dict) and not callable(sample) else None


def is_image(sample: Any) -> bool:
    """One of Pillow's, which need not be installed."""
    return hasattr(sample, "getbands") and hasattr(sample, "tobytes")
