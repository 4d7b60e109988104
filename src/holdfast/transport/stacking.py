"""Default collation without shared memory, for worker threads.

torch's ``default_collate`` stacks tensors into a file of shared memory where ``get_worker_info()``
is not None. A thread's batch is in the right process already.
"""

from __future__ import annotations

from typing import Any

import torch

from holdfast import private_names

__all__ = ["install_for_threads", "stack_in_thread", "stack_into", "stack_plainly"]


def install_for_threads() -> None:
    """From now on ``default_collate`` uses no shared memory in worker threads of this process. A
    user's own function for tensors, registered before, is left in place."""
    known = private_names.collate_functions
    if known.get(torch.Tensor) is private_names.collate_tensors is not None:
        known[torch.Tensor] = stack_in_thread


def stack_in_thread(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    """torch's function for tensors; in a worker thread in ordinary memory, where that makes no
    difference to the result."""
    if private_names.is_worker_thread():
        first = batch[0]
        stacked = stack_plainly(batch, first)
        if stacked is not None:
            return stacked
        strided = type(first) is torch.Tensor and first.layout is torch.strided
        if strided and first.is_cpu and not (first.is_nested or first.is_quantized):
            return stack_into(torch.empty((len(batch), *first.shape), dtype=first.dtype), batch)
    return private_names.collate_tensors(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]


def stack_into(room: torch.Tensor, batch: list[torch.Tensor]) -> torch.Tensor:
    """Stack into this memory. With `out`, torch keeps the first one's dtype and a contiguous
    layout, or refuses."""
    try:
        return torch.stack(batch, 0, out=room)
    except TypeError as error:
        refused = error
    for thing in batch:
        thing.numel()  # torch calls this first, so users get the error they know
    raise refused


def stack_plainly(batch: list[torch.Tensor], first: torch.Tensor) -> torch.Tensor | None:
    """Stack tensors into memory that torch allocates. None if that fails or differs from the result
    with `out`, as in torch's workers: users know the errors they get there."""
    try:
        stacked = torch.stack(batch)
    except Exception:
        return None
    if stacked.dtype is first.dtype and stacked.is_contiguous() and not stacked.requires_grad:
        return stacked if type(stacked) is torch.Tensor else None
    return None
