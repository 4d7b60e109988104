"""What a sampler calls the samples of a batch.

Whether an index names one sample or a batch of them is for the loader to say (``batch_size=None``
or not) and cannot be seen from its type: a list may be one sample's key, an array a batch of keys.
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
    """The index, safe from a sampler that uses its list or array again for the next one: a batch
    may have to be asked for once more."""
    if type(index) is list:
        return index.copy()
    if isinstance(index, np.ndarray):
        return index.copy()
    return index.clone() if isinstance(index, torch.Tensor) else index
