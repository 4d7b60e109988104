"""Default collation without shared memory, for worker threads.

torch's ``default_collate`` stacks tensors into a file of shared memory where ``get_worker_info()``
is not None. A thread's batch is in the right process already. Small ones are stacked into memory
that torch allocates, large ones into memory that is used again (`batch_memory`).
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

from holdfast import private_names
from holdfast.transport.placement import Memory, placed, tensor_on


class _Here(threading.local):
    """Where this worker thread makes its large batches."""

    memory: Memory | None = None


_here = _Here()


def use_memory(memory: Memory | None) -> None:
    """From now on large batches of this worker thread are made there."""
    _here.memory = memory


def install_for_threads() -> None:
    """From now on ``default_collate`` uses no shared memory in worker threads of this process. A
    user's own function for tensors, registered before, is left in place."""
    known = private_names.collate_functions
    if known.get(torch.Tensor) is private_names.collate_tensors is not None:
        known[torch.Tensor] = stack_in_thread


def stacks() -> bool:
    """Whether ``default_collate`` handles tensors and arrays by our function and torch's. A
    function that the user has registered for them must not see the rows of a `Placement`."""
    known = private_names.collate_functions
    arrays = known.get(np.ndarray)
    return isinstance(known.get(torch.Tensor), Stacking) and arrays is private_names.collate_array


class Stacking:
    """Replaces torch's ``collate_tensor_fn`` in a worker, and gives the same results. It returns a
    batch whose samples are in their places already as it is (`placement`)."""

    def __call__(self, batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        raise NotImplementedError


class _InThread(Stacking):
    """In ordinary memory in a worker thread, where that makes no difference to the result;
    elsewhere torch's function."""

    def __call__(self, batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        if private_names.is_worker_thread():
            stacked = _stack_here(batch, batch[0])
            if stacked is not None:
                return stacked
        return private_names.collate_tensors(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]


stack_in_thread = _InThread()


def _stack_here(batch: list[torch.Tensor], first: torch.Tensor) -> torch.Tensor | None:
    strided = type(first) is torch.Tensor and first.layout is torch.strided
    if not strided or not first.is_cpu or first.is_nested or first.is_quantized:
        return stack_plainly(batch, first)
    memory = _here.memory
    if memory is not None:
        whole = placed(batch, first)
        if whole is not None:
            return whole
        piece = memory.take(len(batch) * first.nbytes)
        if piece is not None:
            shape = (len(batch), *first.shape)
            return stack_into(tensor_on(piece.array, shape, first.dtype), batch)
    stacked = stack_plainly(batch, first)
    if stacked is not None:
        return stacked
    return stack_into(torch.empty((len(batch), *first.shape), dtype=first.dtype), batch)


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
