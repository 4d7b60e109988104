"""The format of a frame, as both sides know it."""

from __future__ import annotations

import struct
from typing import Any

import torch

SMALL = 16 << 10
"""Spans below this travel in the frame (up to this much in all); larger ones get a block each."""
ALIGN = 16
PADDING = bytes(ALIGN)
HEADER = struct.Struct("<IQQ")  # lengths of table, pickle, small spans

DTYPES: list[torch.dtype] = sorted(
    {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str
)

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
