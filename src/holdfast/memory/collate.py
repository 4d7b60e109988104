"""Default collation straight into the arena.

`install` replaces what torch's ``default_collate`` does with a list of tensors, in a worker: the
result is stacked into an arena block instead of a file in ``/dev/shm``. Everything else about it
stays torch's: dtypes, errors, what happens to subclasses.

`Placement` goes one step further for large samples: each is copied to its place in the batch as
soon as it is fetched, while it is still in the cache, and its own memory serves the next one.
Stacking then finds that the work is done. Whatever is not as the first sample was is left alone
and stacked in the ordinary way, so that results and errors are those of ``default_collate``.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import collate as torch_collate

from .arena import Arena, Bytes
from .codec import SMALL

__all__ = ["PLACED", "Placement", "install"]

PLACED = 64 << 10
"""Tensors and arrays from this size on are worth a copy of their own."""
DEPTH = 4
"""How deep in a sample they are looked for."""

_Tensors = list[torch.Tensor]
_torch_stack: Callable[..., torch.Tensor] = torch_collate.collate_tensor_fn
_sparse = {
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
    known: dict[Any, Any] = torch_collate.default_collate_fn_map
    current = known.get(torch.Tensor)
    if current is _torch_stack or isinstance(current, _Stack):
        known[torch.Tensor] = _Stack(arena)


class _Stack:
    """Stands in for torch's ``collate_tensor_fn``, and does what that does inside a worker."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena

    def __call__(self, batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        first = batch[0]
        if first.is_nested or first.layout in _sparse:
            return _torch_stack(batch, collate_fn_map=collate_fn_map)  # raises
        if type(first) is torch.Tensor and first.is_cpu:
            placed = _placed(batch, first)
            if placed is not None:
                return placed
            shape = (len(batch), *first.shape)
            nbytes = len(batch) * first.nbytes
            # With `out`, torch keeps the first one's dtype and a contiguous layout, or refuses.
            return torch.stack(batch, 0, out=self._room(shape, first.dtype, nbytes))
        return torch.stack(batch, 0, out=self._room_like(first, len(batch)))

    def _room(self, shape: tuple[int, ...], dtype: torch.dtype, nbytes: int) -> torch.Tensor:
        if nbytes >= SMALL:
            block = self.arena.take(nbytes)
            if block is not None:
                return _tensor(block.array, shape, dtype)
        return torch.empty(shape, dtype=dtype)

    def _room_like(self, first: torch.Tensor, length: int) -> torch.Tensor:
        """For subclasses and other devices: step for step what torch does, on other memory."""
        nbytes = length * first.nbytes
        block = None
        if nbytes >= SMALL and first.device.type == "cpu":
            block = self.arena.take(nbytes)
        if block is not None:
            untyped = torch.from_numpy(block.array).untyped_storage()
        else:
            untyped = torch.UntypedStorage(nbytes, device=first.device)  # type: ignore[no-untyped-call]
        storage = torch.TypedStorage(wrap_storage=untyped, dtype=first.dtype, _internal=True)
        room: torch.Tensor = first.new(storage).resize_(length, *first.size())
        return room


def _tensor(array: Bytes, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the first bytes of the array: no view, with a storage of just its size."""
    count = math.prod(shape)
    return torch.frombuffer(array, dtype=dtype, count=count).resize_(shape)


class _Column:
    """One leaf of all samples of a batch: the rows 0, 1, 2, ... of one block."""

    def __init__(self, array: Bytes, leaf: Any) -> None:
        self.is_array = isinstance(leaf, np.ndarray)
        self.shape = tuple(leaf.shape)
        self.dtype = leaf.dtype
        self.nbytes: int = leaf.nbytes
        self.memory: Bytes | None = array
        self.address: int = array.__array_interface__["data"][0]

    def put(self, row: int, leaf: Any) -> Any:
        """The leaf's copy in its row; the leaf itself if it is not like the first."""
        if (
            self.memory is None
            or type(leaf) is not (np.ndarray if self.is_array else torch.Tensor)
            or leaf.dtype != self.dtype
            or tuple(leaf.shape) != self.shape
            or not _is_plain(leaf)
        ):
            return leaf
        at = row * self.nbytes
        if self.is_array:
            copy: np.ndarray[Any, Any] = np.ndarray(self.shape, self.dtype, self.memory, at)
            np.copyto(copy, leaf)
            return copy
        return _tensor(self.memory[at : at + self.nbytes], self.shape, self.dtype).copy_(leaf)
