"""Default collation straight into the arena.

`install` replaces what torch's ``default_collate`` does with a list of tensors, in a worker: the
result is stacked into an arena block instead of a file in ``/dev/shm``. Dtypes, errors and the
treatment of subclasses stay torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from holdfast import private_names

from .arena import Arena
from .codec import SMALL
from .placement import placed, tensor_on
from .stacking import Stacking, stack_in_thread, stack_into, stack_plainly

_torch_stack: Callable[..., torch.Tensor] = private_names.collate_tensors
_SPARSE = {
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_bsr,
    torch.sparse_csc,
    torch.sparse_bsc,
}


def install(arena: Arena) -> None:
    """From now on ``default_collate`` in this process uses the arena.

    A user's own function for tensors, registered before, is left in place.
    """
    known = private_names.collate_functions
    current = known.get(torch.Tensor)
    torchs = current is not None and current in (_torch_stack, stack_in_thread)
    if isinstance(current, _Stack) or torchs:
        known[torch.Tensor] = _Stack(arena)


class _Stack(Stacking):
    """Replaces torch's ``collate_tensor_fn`` in a worker, and gives the same results."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena

    def __call__(self, batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        first = batch[0]
        if first.is_nested or first.layout in _SPARSE:
            return _torch_stack(batch, collate_fn_map=collate_fn_map)  # raises
        if type(first) is torch.Tensor and first.is_cpu and not first.is_quantized:
            whole = placed(batch, first)
            if whole is not None:
                return whole
            nbytes = len(batch) * first.nbytes
            if nbytes < SMALL:
                stacked = stack_plainly(batch, first)  # too small for the arena
                if stacked is not None:
                    return stacked
            room = self._room((len(batch), *first.shape), first.dtype, nbytes)
        elif private_names.typed_storage is None:
            return _torch_stack(batch, collate_fn_map=collate_fn_map)
        else:
            room = self._room_like(first, len(batch))
        return stack_into(room, batch)

    def _room(self, shape: tuple[int, ...], dtype: torch.dtype, nbytes: int) -> torch.Tensor:
        if nbytes >= SMALL:
            block = self.arena.take(nbytes)
            if block is not None:
                return tensor_on(block.array, shape, dtype)
        return torch.empty(shape, dtype=dtype)

    def _room_like(self, first: torch.Tensor, length: int) -> torch.Tensor:
        """For subclasses and other devices: the same steps as torch, on the arena's memory."""
        nbytes = length * first.nbytes
        block = None
        if nbytes >= SMALL and first.device.type == "cpu":
            block = self.arena.take(nbytes)
        if block is not None:
            untyped = torch.from_numpy(block.array).untyped_storage()
        else:
            untyped = torch.UntypedStorage(nbytes, device=first.device)  # type: ignore[no-untyped-call]
        assert private_names.typed_storage is not None
        storage = private_names.typed_storage(untyped, first.dtype)
        room: torch.Tensor = first.new(storage).resize_(length, *first.size())
        return room
