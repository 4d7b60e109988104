"""The format of a frame, as both sides know it."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch

SMALL = 16 << 10
"""Spans below this travel in the frame (up to this much in all); larger ones get a block each."""
ALIGN = 16
PADDING = bytes(ALIGN)
HEADER = struct.Struct("<IQQ")  # lengths of table, pickle, small spans

DTYPES: list[torch.dtype] = sorted(
    {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str
)
AS_NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.uint16: np.dtype(np.uint16),
    torch.uint32: np.dtype(np.uint32),
    torch.uint64: np.dtype(np.uint64),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float16: np.dtype(np.float16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
}

# The first field of a table entry: for a tensor its dtype and these two bits ...
REQUIRES_GRAD, SHARED = 1, 2
# ... and a negative number for anything else.
ARRAY, STORAGE, BUFFER = -1, -2, -3
BARE = "tensor"  # the outline of a batch that is one tensor

Entry = tuple[Any, ...]
"""Code, place, size and layout of an object that was taken out of the stream."""


def contiguous(size: tuple[int, ...]) -> tuple[int, ...]:
    steps = []
    step = 1
    for length in reversed(size):
        steps.append(step)
        step *= length
    return tuple(reversed(steps))


def extent(size: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """How many elements lie from the first to the last, both included."""
    return 1 + sum([(length - 1) * step for length, step in zip(size, stride, strict=True)])
