"""From a batch to a frame, in the worker."""

from __future__ import annotations

import io
import marshal
import pickle
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import warn_if_has_hooks

from holdfast.private_names import reducers, storage_key
from holdfast.transport.arena import Arena
from holdfast.transport.codec.frame import (
    ARRAY,
    BUFFER,
    HEADER,
    REQUIRES_GRAD,
    SMALL,
    STORAGE,
)
from holdfast.transport.codec.placing import Room, place_spans
from holdfast.transport.codec.small import outline_of, plain_frame, small_frame
from holdfast.transport.codec.tensors import (
    BY_TORCH,
    Span,
    is_unusual,
    rebuild_parameter,
    reduce_composite,
    span_of_tensor,
)

_MARK = pickle.PickleBuffer(bytearray(1))
_REGISTERED = reducers


def encode(batch: Any, arena: Arena | None) -> bytes:
    """The batch as a frame. Blocks it refers to are published; if pickling fails, none is."""
    if type(batch) is torch.Tensor:
        frame = small_frame(batch)
        if frame is not None:
            return frame
    spans: list[Span] = []
    outline = outline_of(batch, spans)
    if outline is None:
        return _frame(spans, None, _pickle(batch, spans, _Pickler), arena)
    return plain_frame(spans, outline, arena) or _frame(spans, outline, b"", arena)


def encode_for_start(value: Any) -> bytes:
    """A frame for processes that are being started, without blocks.

    Tensors that the user has put into shared memory stay shared, as with multiprocessing's spawn.
    All others arrive as copies, and nothing is put into ``/dev/shm`` for them.
    """
    spans: list[Span] = []
    return _frame(spans, None, _pickle(value, spans, _StartPickler), None)


def _frame(spans: list[Span], outline: Any, pickled: bytes, arena: Arena | None) -> bytes:
    if not spans and (arena is None or len(pickled) <= SMALL):
        return HEADER.pack(0, len(pickled), 0) + pickled
    room = Room(arena)
    entries, shared = place_spans(spans, room)
    pickle_block = room.place_bytes(pickled) if len(pickled) > SMALL else None
    if pickle_block is not None:
        pickled = b""
    large: list[Any] = room.large  # bytes-like, though NumPy's types do not say so
    sizes = [part.nbytes for part in large]
    table = marshal.dumps(
        (list(room.blocks), room.block_sizes, sizes, shared, entries, outline, pickle_block), 2
    )
    header = HEADER.pack(len(table), len(pickled), room.small_bytes)
    frame = b"".join([header, table, pickled, *room.small, *large])
    room.publish()
    return frame


def _pickle(batch: Any, spans: list[Span], kind: type[_Pickler]) -> bytes:
    stream = io.BytesIO()
    pickler = kind(stream, 5, buffer_callback=partial(_beside_the_stream, spans))
    pickler.spans = spans
    pickler.dump(batch)
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    """Pickle, but tensors and arrays leave only a mark in the stream.

    Reducers registered with multiprocessing's ForkingPickler are used here too. This is not a
    subclass of it, because its lookup of them takes longer than pickling a small batch.
    """

    spans: list[Span]

    def reducer_override(self, thing: Any) -> Any:
        kind = type(thing)
        if kind is torch.Tensor:
            if is_unusual(thing):
                return self._reduce_unusual(thing)
            self.spans.append(span_of_tensor(thing, 0))
            return _taken_out, (_MARK,)  # a new tuple: pickle writes known ones as references
        if kind is np.ndarray and kind not in _REGISTERED:
            return self._reduce_array(thing)
        if kind is torch.UntypedStorage and thing.device.type == "cpu":
            nbytes = thing.nbytes()
            self.spans.append(
                (storage_key(thing), thing.data_ptr(), nbytes, STORAGE, None, None, thing)
            )
            return _taken_out, (_MARK,)
        if kind is torch.nn.Parameter:
            return rebuild_parameter, (thing.detach(), thing.requires_grad, thing.__dict__ or None)
        reducer = _REGISTERED.get(kind)
        return NotImplemented if reducer is None else reducer(thing)

    def _reduce_unusual(self, tensor: torch.Tensor) -> Any:
        if tensor.requires_grad:
            if not tensor.is_leaf:
                return BY_TORCH(tensor)  # raises, in torch's own words
            warn_if_has_hooks(tensor)
        if not tensor.is_cpu:
            return BY_TORCH(tensor)
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            return reduce_composite(tensor)
        bare = tensor.detach().resolve_conj().resolve_neg()
        self.spans.append(span_of_tensor(bare, REQUIRES_GRAD if tensor.requires_grad else 0))
        return _taken_out, (_MARK,)

    def _reduce_array(self, array: np.ndarray[Any, Any]) -> Any:
        dtype = _array_dtype(array.dtype)
        flags = array.flags
        if dtype is None or not flags.forc:
            return NotImplemented
        layout = (dtype, "C" if flags.c_contiguous else "F")
        self.spans.append(_span_of_array(array, ARRAY, array.shape, layout))
        return _taken_out, (_MARK,)


class _StartPickler(_Pickler):
    """For a dataset on its way to new processes."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, (torch.Tensor, torch.UntypedStorage)) and thing.is_shared():
            reducer = _REGISTERED.get(type(thing))
            return NotImplemented if reducer is None else reducer(thing)
        return super().reducer_override(thing)


def _taken_out(thing: Any) -> Any:
    return thing


def _span_of_array(array: np.ndarray[Any, Any], code: int, size: Any, layout: Any) -> Span:
    address = array.__array_interface__["data"][0]
    return (-id(array), address, array.nbytes, code, size, layout, array)


def _beside_the_stream(spans: list[Span], buffer: pickle.PickleBuffer) -> bool:
    """Called by pickle for each buffer. If true, pickle writes the buffer into the stream."""
    if buffer is _MARK:
        return False
    raw = np.frombuffer(buffer.raw(), np.uint8)
    if raw.nbytes < SMALL:
        return True
    spans.append(_span_of_array(raw, BUFFER, raw.nbytes, None))
    return False


_known_array_dtypes: dict[np.dtype[Any], str | bytes | None] = {}


def _array_dtype(dtype: np.dtype[Any]) -> str | bytes | None:
    """The dtype in a form that marshal can write; None if its elements are more than bytes."""
    try:
        return _known_array_dtypes[dtype]
    except KeyError:
        pass
    code: str | bytes | None = None
    if dtype.kind in "biufcmMSUV" and not dtype.hasobject:
        plain = np.dtype(dtype.str)
        same = type(plain) is type(dtype) and plain == dtype and dtype.metadata is None
        code = dtype.str if same else pickle.dumps(dtype)
    if len(_known_array_dtypes) < 1000 and dtype.metadata is None:
        _known_array_dtypes[dtype] = code
    return code
