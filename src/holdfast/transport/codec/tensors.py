"""Tensors as spans of raw memory, and those that are more than that.

Sparse and nested tensors are reduced to the strided tensors they consist of; quantized ones, and
those on other devices, are left to torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.multiprocessing import reductions

from holdfast.private_names import (
    is_zero_tensor,
    nested_from,
    nested_parts,
    sparse_parts,
    storage_key,
)
from holdfast.transport.codec.frame import DTYPES, contiguous, extent

BY_TORCH: Callable[[torch.Tensor], Any] = reductions.reduce_tensor
_CODES = {dtype: code << 2 for code, dtype in enumerate(DTYPES)}

# Raw memory of an object that was taken out of the stream:
#   key (equal for what shares one torch storage), address, nbytes,
#   the three last fields of its table entry: code, size, layout,
#   the object itself, so that it lives until its bytes are copied.
# A plain tuple, because making spans is most of the work for a small batch.
Span = tuple[int, int, int, int, Any, Any, Any]
KEY: Final = 0
ADDRESS: Final = 1
NBYTES: Final = 2
CODE: Final = 3
SIZE: Final = 4
OWNER: Final = 6


def is_unusual(tensor: torch.Tensor) -> bool:
    """Whether there is more to an exact torch.Tensor than its bytes, dtype, size and stride."""
    return (
        tensor.requires_grad
        or not tensor.is_cpu
        or tensor.layout is not torch.strided
        or tensor.is_nested
        or tensor.is_quantized
        or tensor.is_neg()
        or tensor.is_conj()
    )


def span_of_tensor(tensor: torch.Tensor, flags: int) -> Span:
    size = tuple(tensor.shape)
    code = _CODES[tensor.dtype] | flags
    if 0 in size:
        return (-id(tensor), 0, 0, code, size, tensor.stride(), tensor)
    key, address = storage_key(tensor.untyped_storage()), tensor.data_ptr()
    if not address:
        if not is_zero_tensor(tensor):
            raise RuntimeError("a tensor whose storage was freed cannot be sent")
        return span_of_tensor(tensor.clone(), flags)
    if tensor.is_contiguous() and (1 not in size or tensor.stride() == contiguous(size)):
        return (key, address, tensor.nbytes, code, size, None, tensor)
    stride = tensor.stride()
    return (key, address, extent(size, stride) * tensor.itemsize, code, size, stride, tensor)


def reduce_composite(tensor: torch.Tensor) -> Any:
    """Exact tensors on the CPU that are not one strided piece of memory."""
    grad = tensor.requires_grad
    bare = tensor.detach()
    layout = tensor.layout
    if tensor.is_nested:
        parts = nested_parts(bare)
        return BY_TORCH(tensor) if parts is None else (_nested, (parts, grad))
    if layout is torch.sparse_coo:
        parts = sparse_parts(bare)
        if parts is None:
            return BY_TORCH(tensor)
        return _sparse_coo, (*parts, tuple(bare.shape), bare.is_coalesced(), grad)
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        indices = (bare.crow_indices(), bare.col_indices())
    elif layout in (torch.sparse_csc, torch.sparse_bsc):
        indices = (bare.ccol_indices(), bare.row_indices())
    else:  # quantized, and layouts that torch can pickle but we do not know
        return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    return _sparse_compressed, (indices, bare.values(), tuple(bare.shape), layout, grad)


# -- functions that the pickles in frames refer to by name ----------------------------------


def rebuild_parameter(data: torch.Tensor, requires_grad: bool, state: Any) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(data, requires_grad)
    if state:
        parameter.__dict__.update(state)
    return parameter


# torch's own _rebuild_sparse_tensor keeps every tensor in a global list until a torch.load, which
# never comes, validates it.


def _sparse_coo(
    indices: torch.Tensor,
    values: torch.Tensor,
    size: tuple[int, ...],
    is_coalesced: bool,
    requires_grad: bool,
) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        indices, values, size, check_invariants=False, is_coalesced=is_coalesced
    ).requires_grad_(requires_grad)


def _sparse_compressed(
    indices: tuple[torch.Tensor, torch.Tensor],
    values: torch.Tensor,
    size: tuple[int, ...],
    layout: torch.layout,
    requires_grad: bool,
) -> torch.Tensor:
    return torch.sparse_compressed_tensor(
        *indices, values, size, layout=layout, check_invariants=False
    ).requires_grad_(requires_grad)


def _nested(parts: tuple[torch.Tensor, ...], requires_grad: bool) -> torch.Tensor:
    nested: torch.Tensor = nested_from(*parts).requires_grad_(requires_grad)
    return nested
