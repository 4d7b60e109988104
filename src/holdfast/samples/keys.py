"""The keys by which a sampler names the samples of a batch.

Whether an index names one sample or a batch of them depends on the loader (``batch_size=None`` or
not). The type does not tell: a list may be one sample's key, an array a batch of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["keep", "keys_of"]


def keys_of(index: Any, batched: bool) -> Sequence[Any]:
    """The keys of the samples that `index` asks for, in order."""
    if not batched:
        return (index,)
    if type(index) is list:
        return index
    return list(index) if hasattr(index, "__len__") else (index,)


def keep(index: Any) -> Any:
    """A copy of the index, because a sampler may reuse its list or array for the next one, and a
    batch may have to be ordered again."""
    if type(index) is list:
        return index.copy()
    if isinstance(index, np.ndarray):
        return index.copy()
    return index.clone() if isinstance(index, torch.Tensor) else index
