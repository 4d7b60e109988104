"""From a frame to a batch, in the main process."""

from __future__ import annotations

import marshal
import pickle
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import torch

from holdfast.introspection.dtypes import AS_NUMPY
from holdfast.transport.arena import Bytes
from holdfast.transport.codec.frame import (
    ALIGN,
    ARRAY,
    BARE,
    BUFFER,
    DTYPES,
    HEADER,
    REQUIRES_GRAD,
    SHARED,
    STORAGE,
    Entry,
    contiguous,
    extent,
)
from holdfast.transport.window import Window

Frame = bytes | bytearray | memoryview
"""What `encode` returns and a socket delivers."""
_NUMPY_DTYPES = [AS_NUMPY.get(dtype) for dtype in DTYPES]
_SOURCE = bytearray(ALIGN)
_EMPTY_STORAGE: Callable[[], torch.UntypedStorage] = torch.UntypedStorage
_tables: dict[bytes, Any] = {}
"""Tables of frames that refer to no block, by their marshalled bytes: small batches of one loader
have equal tables."""


class Parcel:
    """A frame that has arrived: its blocks are leased, its objects are not made yet.

    Dropping it without `unpack` releases the blocks.
    """

    __slots__ = ("_frame", "_leases", "_table", "_window", "nbytes")

    def __init__(self, frame: Frame, window: Window | None) -> None:
        self._frame = memoryview(frame)
        self._window = window
        self._leases: list[Bytes] = []
        self._table: Any = None
        self.nbytes = len(frame)
        length = HEADER.unpack_from(frame)[0]
        if length:
            head = self._frame[HEADER.size : HEADER.size + length].tobytes()
            table = _tables.get(head)
            if table is None:
                table = marshal.loads(head)
                if not table[0] and len(_tables) < 256 and length < 4096:
                    _tables[head] = table
            self._table = table
            if table[0]:
                if window is None:
                    raise ValueError("the frame refers to an arena, but there is no window on it")
                for offset, nbytes in zip(table[0], table[1], strict=True):
                    self._leases.append(window.lease(offset, nbytes))
                    self.nbytes += nbytes

    def blocks(self) -> Iterator[tuple[Window, int, Bytes]]:
        """The blocks of the arena that it lies in: window, offset, memory."""
        if self._window is not None and self._leases:
            for offset, lease in zip(self._table[0], self._leases, strict=True):
                yield self._window, offset, lease

    def detach(self, offset: int) -> None:
        """Copy one of these blocks to memory of its own, and release it."""
        number = self._table[0].index(offset)
        self._leases[number] = self._leases[number].copy()

    def unpack(self) -> Any:
        """The batch. If an exception interrupts it, it can be called again. Drop the parcel
        afterwards: it holds the blocks as well as the batch does."""
        frame, table = self._frame, self._table
        length, pickled, small = HEADER.unpack_from(frame)
        start = HEADER.size + length
        at = start + pickled
        if table is None:
            return pickle.loads(frame[start:at])
        blocks, _, large, shared, entries, outline, pickle_block = table
        if blocks and self._window is not None:
            self._window.deliver(blocks)
        memories: list[Any] = [*self._leases]
        if large:
            memories += reversed(list(_parts(frame[at + small :], large)))
        memories.append(bytearray(frame[at : at + small]))
        if outline == BARE and not shared:
            ((code, place, size, layout),) = entries
            if place is not None and not code & REQUIRES_GRAD:
                return _tensor(memories[place[0]], place[1], code >> 2, size, layout)
        objects = _objects(entries, shared, memories)
        if outline is None:
            stream: Any = frame[start:at] if pickle_block is None else memories[pickle_block]
            return pickle.loads(stream, buffers=objects)
        if outline == BARE:
            return next(objects)
        if isinstance(outline, bool):
            return tuple(objects) if outline else list(objects)
        return dict(zip(outline, objects, strict=True))


def _parts(frame: memoryview, sizes: list[int]) -> Iterator[Bytes]:
    """Copies of consecutive parts of the frame."""
    at = 0
    for nbytes in sizes:
        yield np.frombuffer(frame[at : at + nbytes], np.uint8).copy()
        at += nbytes


def decode(frame: Frame, window: Window | None) -> Any:
    """The batch in a frame, without a copy of what lies in the arena."""
    return Parcel(frame, window).unpack()


def _objects(entries: list[Entry], shared: list[Entry], memories: list[Any]) -> Iterator[Any]:
    """The objects that left a mark in the stream, in the order of their marks."""
    storages: list[torch.UntypedStorage | None] = [None] * len(shared)

    def storage(number: int) -> torch.UntypedStorage:
        known = storages[number]
        if known is None:
            (memory, at), nbytes = shared[number]
            raw: Bytes = np.ndarray(nbytes, np.uint8, memories[memory], at)
            known = storages[number] = torch.from_numpy(raw).untyped_storage()
        return known

    for code, place, size, layout in entries:
        if code == ARRAY:
            yield _array(memories, place, size, *layout)
        elif code == BUFFER:
            yield np.ndarray(size, np.uint8, memories[place[0]], place[1])
        elif code == STORAGE:
            yield _EMPTY_STORAGE() if place is None else storage(place[0])
        else:
            dtype = DTYPES[code >> 2]
            if place is None:
                tensor = torch.empty_strided(size, layout, dtype=dtype)
            elif code & SHARED:
                tensor = _tensor_on(storage(place[0]), dtype, place[1], size, layout)
            else:
                tensor = _tensor(memories[place[0]], place[1], code >> 2, size, layout)
            yield tensor.requires_grad_() if code & REQUIRES_GRAD else tensor


def _tensor(
    memory: Any, at: int, code: int, size: tuple[int, ...], stride: tuple[int, ...] | None
) -> torch.Tensor:
    """A tensor with a storage of its own, exactly as large as the tensor; not a view."""
    numpy_dtype = _NUMPY_DTYPES[code]
    if numpy_dtype is None:
        dtype = DTYPES[code]
        stride = contiguous(size) if stride is None else stride
        flat = torch.frombuffer(memory, dtype=dtype, count=extent(size, stride), offset=at)
        return flat.as_strided_(size, stride)
    if stride is None:
        return torch.from_numpy(np.ndarray(size, numpy_dtype, memory, at))
    width = numpy_dtype.itemsize
    steps = tuple([step * width for step in stride])
    return torch.from_numpy(np.ndarray(size, numpy_dtype, memory, at, steps))


def _tensor_on(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    at: int,
    size: tuple[int, ...],
    stride: tuple[int, ...] | None,
) -> torch.Tensor:
    empty = torch.frombuffer(_SOURCE, dtype=dtype, count=1)
    return empty.set_(
        storage, at // dtype.itemsize, size, contiguous(size) if stride is None else stride
    )


def _array(
    memories: list[Any],
    place: tuple[int, int] | None,
    shape: tuple[int, ...],
    dtype: str | bytes,
    order: Literal["C", "F"],
) -> np.ndarray[Any, Any]:
    kind = pickle.loads(dtype) if isinstance(dtype, bytes) else dtype
    if place is None:
        return np.empty(shape, kind, order)
    return np.ndarray(shape, kind, memories[place[0]], place[1], None, order)
