"""Small batches, encoded by shorter ways.

Most batches are a few ordinary tensors, and if they are small they come at the highest rate:
pickling them, and describing them anew each time, would be most of their cost. So a batch of up to
16 tensors in a list, tuple or dict is described by an *outline* instead of a pickle; and because
such a batch differs from earlier ones only in its bytes, all that is before them in the frame is
cached. What is not that simple goes the way of every other batch (`encoding`).
"""

from __future__ import annotations

import ctypes
import marshal
from typing import Any

import torch

from holdfast.transport.arena import Arena
from holdfast.transport.codec.frame import ALIGN, BARE, HEADER, PADDING, SMALL, Entry
from holdfast.transport.codec.tensors import (
    CODE,
    KEY,
    NBYTES,
    SIZE,
    Span,
    is_unusual,
    span_of_tensor,
)

FEW = 16
"""Batches that are up to this many tensors, and nothing else, are described without pickle."""

_heads: dict[Any, bytes] = {}


def small_frame(tensor: torch.Tensor) -> bytes | None:
    """As `plain_frame` for one small tensor, because such batches come at the highest rate. None
    if it is not that simple."""
    if is_unusual(tensor):
        return None  # checked first: a sparse tensor has no `nbytes`
    nbytes, shape = tensor.nbytes, tensor.shape
    # Where a length is 1, a contiguous tensor may have any stride.
    if not 0 < nbytes < SMALL or 1 in shape or not tensor.is_contiguous():
        return None
    address = tensor.data_ptr()
    if not address:
        return None
    padding = -nbytes % ALIGN
    head = _heads.get((tensor.dtype, shape))
    if head is None:
        head = _head_of([span_of_tensor(tensor, 0)], BARE, [], nbytes + padding)
        if len(_heads) < 256:
            _heads[tensor.dtype, shape] = head
    content = ctypes.string_at(address, nbytes)
    return b"".join((head, content, PADDING[:padding])) if padding else head + content


def plain_frame(spans: list[Span], outline: Any, arena: Arena | None) -> bytes | None:
    """As `_frame` for a few tensors that are small, or fill a block each; None for other batches.
    Such a batch differs from earlier ones only in its bytes, so the head before them is cached."""
    small: list[bytes] = []
    blocks: list[int] = []
    total = 0
    for _, address, nbytes, _, _, layout, _ in spans:
        if not nbytes or layout is not None:
            return None
        if nbytes >= SMALL:
            found = None if arena is None else arena.find(address, nbytes)
            if arena is None or found is None or arena.nbytes_of(found[0]) != nbytes:
                return None
            if found[0] in blocks:
                return None  # two storages on one block must not become one storage
            blocks.append(found[0])
            continue
        small.append(ctypes.string_at(address, nbytes))
        if nbytes % ALIGN:
            small.append(PADDING[nbytes % ALIGN :])
            nbytes += ALIGN - nbytes % ALIGN
        total += nbytes
    if total > SMALL:
        return None
    shapes = [(span[CODE], span[SIZE]) for span in spans]
    key = (tuple(outline) if isinstance(outline, list) else outline, *blocks, *shapes)
    head = _heads.get(key)
    if head is None:
        head = _head_of(spans, outline, blocks, total)
        if len(_heads) < 256:
            _heads[key] = head
    if arena is not None:
        for offset in blocks:
            arena.publish(offset)
    return b"".join((head, *small))


def _head_of(spans: list[Span], outline: Any, blocks: list[int], total: int) -> bytes:
    entries: list[Entry] = []
    sizes: list[int] = []
    at = 0
    for span in spans:
        nbytes, place = span[NBYTES], (-1, at)
        if nbytes >= SMALL:
            place = (len(sizes), 0)
            sizes.append(nbytes)
        else:
            at += nbytes + -nbytes % ALIGN
        entries.append((span[CODE], place, span[SIZE], None))
    table = marshal.dumps((blocks, sizes, [], [], entries, outline, None), 2)
    return HEADER.pack(len(table), 0, total) + table


def outline_of(batch: Any, spans: list[Span]) -> Any:
    """The structure of a batch that is a few ordinary tensors in a list, tuple or dict.

    Most batches are, and pickling would be most of their cost. None for all other batches.
    """
    kind = type(batch)
    things: Any
    outline: Any
    if kind is torch.Tensor:
        outline, things = BARE, (batch,)
    elif kind is list or kind is tuple:
        outline = kind is tuple
        things = batch
    elif kind is dict:
        outline = list(batch)
        things = batch.values()
        if not all(type(key) is str for key in outline):
            return None
    else:
        return None
    if not 0 < len(things) <= FEW:
        return None
    if not all(type(thing) is torch.Tensor for thing in things):
        return None
    for tensor in things:
        if is_unusual(tensor):
            break
        spans.append(span_of_tensor(tensor, 0))
    # The same tensor, or the same storage, more than once: pickle knows what to do.
    if len({span[KEY] for span in spans}) < len(things):
        spans.clear()
        return None
    return outline
