"""What may be assumed of a sampler, by its type."""

from __future__ import annotations

from typing import Any

from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

_SAMPLERS = frozenset(
    f"torch.utils.data.{name}" for name in ("sampler", "distributed", "dataloader")
)
_PLAIN = frozenset(  # by name: NumPy may be missing
    {
        ("builtins", "list"),
        ("builtins", "tuple"),
        ("builtins", "range"),
        ("array", "array"),
        ("numpy", "ndarray"),
        ("torch", "Tensor"),
    }
)
_TRACELESS = (RandomSampler, SequentialSampler, WeightedRandomSampler, DistributedSampler)


def runs_no_user_code(sampler: Any) -> bool:
    """Whether drawing an index takes a moment only. A plain iterator may wait for anything: the
    type of a generator or a `map` does not show whose code it runs."""
    kind = type(sampler)
    if (kind.__module__, kind.__qualname__) in _PLAIN:
        return True
    if kind.__module__ not in _SAMPLERS:
        return False
    inner = (getattr(sampler, name) for name in ("sampler", "indices") if hasattr(sampler, name))
    return all(map(runs_no_user_code, inner))


def leaves_no_trace(sampler: Any) -> bool:
    """Whether it cannot be seen how much of a sampler was drawn when an epoch is broken off."""
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    return type(sampler) in _TRACELESS and getattr(sampler, "generator", None) is None
