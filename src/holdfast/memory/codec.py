"""A batch as bytes: pickle for its structure, the arena for its tensors and arrays.

`encode` walks the batch with a pickler that takes tensors, storages, arrays and protocol-5 buffers
out of the stream, as spans of raw memory. Each span then finds its place:

* it already lies in an arena block (default collation put it there): nothing is copied;
* it is small: into the frame itself, or, if the small ones add up, into a common block;
* else: one copy, into a block of its own. One block for the whole batch would be simpler, but
  then a user who keeps the labels would keep the images with them;
* no arena, or no room in it: into the frame, whatever its size.

`receive` reads a frame in the main process and takes out a lease on each of its blocks, so that
nothing can recycle them; `Parcel.unpack` rebuilds the batch on the leases without a copy.

Tensors that share a storage share one afterwards too, if their spans fill at least half of the
range from the first to the last. So two rows of a huge dataset do not take the rest of it along.
Arrays come out independent of each other, as with pickle, and so do tensors whose storages merely
overlap.

A frame: header | table (marshal) | pickle | small spans | large spans.
"""

from __future__ import annotations

import ctypes
import io
import marshal
import pickle
import struct
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final, Literal

import numpy as np
import torch
from torch.multiprocessing import reductions
from torch.utils.hooks import warn_if_has_hooks

from .arena import Arena, Block, Bytes
from .window import Window

__all__ = ["AS_NUMPY", "SMALL", "Parcel", "decode", "encode", "encode_for_start", "receive"]

SMALL = 16 << 10
"""Spans below this travel in the frame (up to this much in all); larger ones get a block each."""
COMMON = 256 << 10
"""Small spans that do not fit into the frame share blocks of this size."""
FEW = 16
"""Batches that are up to this many tensors, and nothing else, are described without pickle."""
_ALIGN = 16
_PADDING = bytes(_ALIGN)
_HEADER = struct.Struct("<IQQ")  # lengths of table, pickle, small spans

_DTYPES: list[torch.dtype] = sorted(
    {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str
)
_CODES = {dtype: code << 2 for code, dtype in enumerate(_DTYPES)}
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
_NUMPY_DTYPES = [AS_NUMPY.get(dtype) for dtype in _DTYPES]

# The first field of a table entry: for a tensor its dtype and these two bits ...
_REQUIRES_GRAD, _SHARED = 1, 2
_BARE = "tensor"  # the outline of a batch that is one tensor
# ... and a negative number for anything else.
_ARRAY, _STORAGE, _BUFFER = -1, -2, -3

Frame = bytes | bytearray | memoryview
"""What `encode` returns and a socket delivers."""
_Entry = tuple[Any, ...]
_MARK = pickle.PickleBuffer(bytearray(1))
_REGISTERED: dict[type, Callable[[Any], Any]] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
_by_torch: Callable[[torch.Tensor], Any] = reductions.reduce_tensor


# Raw memory of an object that was taken out of the stream:
#   key (equal for what shares one torch storage), address, nbytes,
#   the three last fields of its table entry: code, size, layout,
#   the object itself, so that it lives until its bytes are copied.
# A plain tuple, because making spans is most of the work for a small batch.
_Span = tuple[int, int, int, int, Any, Any, Any]
_KEY: Final = 0
_ADDRESS: Final = 1
_NBYTES: Final = 2
_CODE: Final = 3
_SIZE: Final = 4
_OWNER: Final = 6


class _Pickler(pickle.Pickler):
    """Pickle, but tensors and arrays leave only a mark in the stream.

    Reducers registered with multiprocessing's ForkingPickler are used here too. This is not a
    subclass of it, because its lookup of them takes longer than pickling a small batch.
    """

    spans: list[_Span]

    def reducer_override(self, thing: Any) -> Any:
        kind = type(thing)
        if kind is torch.Tensor:
            if _is_unusual(thing):
                return self._reduce_unusual(thing)
            self.spans.append(_span_of_tensor(thing, 0))
            return _taken_out, (_MARK,)  # a new tuple: pickle writes known ones as references
        if kind is np.ndarray and kind not in _REGISTERED:
            return self._reduce_array(thing)
        if kind is torch.UntypedStorage and thing.device.type == "cpu":
            nbytes = thing.nbytes()
            self.spans.append((thing._cdata, thing.data_ptr(), nbytes, _STORAGE, None, None, thing))
            return _taken_out, (_MARK,)
        if kind is torch.nn.Parameter:
            return _parameter, (thing.detach(), thing.requires_grad, thing.__dict__ or None)
        reducer = _REGISTERED.get(kind)
        return NotImplemented if reducer is None else reducer(thing)

    def _reduce_unusual(self, tensor: torch.Tensor) -> Any:
        if tensor.requires_grad:
            if not tensor.is_leaf:
                return _by_torch(tensor)  # raises, in torch's own words
            warn_if_has_hooks(tensor)
        if not tensor.is_cpu:
            return _by_torch(tensor)
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            return _reduce_composite(tensor)
        bare = tensor.detach().resolve_conj().resolve_neg()
        self.spans.append(_span_of_tensor(bare, _REQUIRES_GRAD if tensor.requires_grad else 0))
        return _taken_out, (_MARK,)

    def _reduce_array(self, array: np.ndarray[Any, Any]) -> Any:
        dtype = _array_dtype(array.dtype)
        flags = array.flags
        if dtype is None or not flags.forc:
            return NotImplemented
        layout = (dtype, "C" if flags.c_contiguous else "F")
        self.spans.append(_span_of_array(array, _ARRAY, array.shape, layout))
        return _taken_out, (_MARK,)


class _StartPickler(_Pickler):
    """For a dataset on its way to new processes."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, (torch.Tensor, torch.UntypedStorage)) and thing.is_shared():
            reducer = _REGISTERED.get(type(thing))
            return NotImplemented if reducer is None else reducer(thing)
        return super().reducer_override(thing)


def _is_unusual(tensor: torch.Tensor) -> bool:
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


def _span_of_tensor(tensor: torch.Tensor, flags: int) -> _Span:
    size = tuple(tensor.shape)
    code = _CODES[tensor.dtype] | flags
    if 0 in size:
        return (-id(tensor), 0, 0, code, size, tensor.stride(), tensor)
    key, address = tensor.untyped_storage()._cdata, tensor.data_ptr()
    if not address:
        if not tensor._is_zerotensor():
            raise RuntimeError("a tensor whose storage was freed cannot be sent")
        return _span_of_tensor(tensor.clone(), flags)
    if tensor.is_contiguous() and (1 not in size or tensor.stride() == _contiguous(size)):
        return (key, address, tensor.nbytes, code, size, None, tensor)
    stride = tensor.stride()
    return (key, address, _extent(size, stride) * tensor.itemsize, code, size, stride, tensor)


def _span_of_array(array: np.ndarray[Any, Any], code: int, size: Any, layout: Any) -> _Span:
    address = array.__array_interface__["data"][0]
    return (-id(array), address, array.nbytes, code, size, layout, array)


def _beside_the_stream(spans: list[_Span], buffer: pickle.PickleBuffer) -> bool:
    """Called by pickle for each buffer. If true, pickle writes the buffer into the stream."""
    if buffer is _MARK:
        return False
    raw = np.frombuffer(buffer.raw(), np.uint8)
    if raw.nbytes < SMALL:
        return True
    spans.append(_span_of_array(raw, _BUFFER, raw.nbytes, None))
    return False


def _reduce_composite(tensor: torch.Tensor) -> Any:
    """Exact tensors on the CPU that are not one strided piece of memory."""
    grad = tensor.requires_grad
    bare = tensor.detach()
    layout = tensor.layout
    if tensor.is_nested:
        parts = (
            bare.values(),
            bare._nested_tensor_size(),
            bare._nested_tensor_strides(),
            bare._nested_tensor_storage_offsets(),
        )
        return _nested, (parts, grad)
    if layout is torch.sparse_coo:
        return _sparse_coo, (
            bare._indices(),
            bare._values(),
            tuple(bare.shape),
            bare.is_coalesced(),
            grad,
        )
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        indices = (bare.crow_indices(), bare.col_indices())
    elif layout in (torch.sparse_csc, torch.sparse_bsc):
        indices = (bare.ccol_indices(), bare.row_indices())
    else:  # quantized, and layouts that torch can pickle but we do not know
        return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    return _sparse_compressed, (indices, bare.values(), tuple(bare.shape), layout, grad)


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


class _Segments:
    """Spans of one torch storage, joined where that does not copy too many unused bytes."""

    def __init__(self, spans: list[_Span]) -> None:
        self.pieces: list[tuple[int, int]] = []  # address and size
        self.of_span = [0] * len(spans)
        self.shared: dict[int, int] = {}  # piece: its number among the shared ones
        by_key: dict[int, list[int]] = {}
        for number, span in enumerate(spans):
            by_key.setdefault(span[_KEY], []).append(number)
        for members in by_key.values():
            first = spans[members[0]]
            if len(members) > 1:
                self._join(spans, sorted(members, key=lambda number: spans[number][_ADDRESS]))
            else:
                self._add(first[_ADDRESS], first[_NBYTES], members)
            if len(members) > 1 or first[_CODE] == _STORAGE:
                for number in members:
                    self.shared.setdefault(self.of_span[number], len(self.shared))

    def _join(self, spans: list[_Span], members: list[int]) -> None:
        owner: Any = spans[members[0]][_OWNER]
        storage = owner if isinstance(owner, torch.UntypedStorage) else owner.untyped_storage()
        base = storage.data_ptr()
        runs: list[tuple[int, int, list[int]]] = []
        for number in members:
            start = spans[number][_ADDRESS]
            end = start + spans[number][_NBYTES]
            start -= (start - base) % _ALIGN  # so that every dtype's offset is a whole number
            if runs and start <= runs[-1][1]:
                first_byte, last_byte, together = runs[-1]
                together.append(number)
                runs[-1] = (first_byte, max(last_byte, end), together)
            else:
                runs.append((start, end, [number]))
        covered = sum(end - start for start, end, _ in runs)
        start, end = runs[0][0], runs[-1][1]
        if end - start <= 2 * covered:
            runs = [(start, end, members)]
        for start, end, together in runs:
            self._add(start, end - start, together)

    def _add(self, address: int, nbytes: int, members: list[int]) -> None:
        for number in members:
            self.of_span[number] = len(self.pieces)
        self.pieces.append((address, nbytes))


_Place = tuple[int, int] | None


class _Room:
    """Finds a place for each piece of memory: (number of a memory, offset in it).

    Memories are numbered from 0 for blocks; -1 is the small part of the frame, and -2, -3, ... are
    its large parts, so that the reader can index one list.
    """

    def __init__(self, arena: Arena | None) -> None:
        self.arena = arena
        self.blocks: dict[int, int] = {}  # offset: number
        self.block_sizes: list[int] = []
        self.small: list[bytes] = []
        self.small_bytes = 0
        self.large: list[Bytes] = []
        self._taken: list[Block] = []  # alive until they are published
        self._claims: list[tuple[int, int]] = []

    def place_all(self, pieces: Iterable[tuple[int, int]]) -> list[_Place]:
        places: list[_Place] = []
        small: list[tuple[int, int, int]] = []
        total = 0
        for address, nbytes in pieces:
            if nbytes >= SMALL:
                places.append(self._place_large(address, nbytes))
            else:
                if nbytes:
                    small.append((len(places), address, nbytes))
                    total += nbytes + -nbytes % _ALIGN
                places.append(None)
        if total > SMALL and self.arena is not None:
            small = self._place_together(small, places)
        for number, address, nbytes in small:
            places[number] = self._place_small(address, nbytes)
        return places

    def place_bytes(self, data: bytes) -> int | None:
        """The number of a block that holds a copy of `data`."""
        block = self._take(len(data))
        if block is None:
            return None
        block.array[:] = np.frombuffer(data, np.uint8)
        return self.blocks[block.offset]

    def publish(self) -> None:
        if self.arena is not None:
            for offset in self.blocks:
                self.arena.publish(offset)

    def _place_large(self, address: int, nbytes: int) -> _Place:
        if self.arena is not None:
            found = self.arena.find(address, nbytes)
            if found is not None and self._claim(address, nbytes, found[0]):
                return self._number(found[0], self.arena.nbytes_of(found[0])), found[1]
            block = self._take(nbytes)
            if block is not None:
                ctypes.memmove(self.arena.base + block.offset, address, nbytes)
                return self.blocks[block.offset], 0
        self.large.append(_raw(address, nbytes))
        return -1 - len(self.large), 0

    def _place_small(self, address: int, nbytes: int) -> _Place:
        at = self.small_bytes
        self.small.append(ctypes.string_at(address, nbytes))
        if nbytes % _ALIGN:
            self.small.append(_PADDING[nbytes % _ALIGN :])
            nbytes += _ALIGN - nbytes % _ALIGN
        self.small_bytes = at + nbytes
        return -1, at

    def _place_together(
        self, pieces: list[tuple[int, int, int]], places: list[_Place]
    ) -> list[tuple[int, int, int]]:
        """Put small pieces into common blocks; returns the pieces that found no room."""
        first = 0
        while first < len(pieces):
            last, total = first, 0
            while last < len(pieces) and total < COMMON:
                total += pieces[last][2] + -pieces[last][2] % _ALIGN
                last += 1
            block = self._take(total)
            if block is None or self.arena is None:
                break
            at = 0
            for number, address, nbytes in pieces[first:last]:
                ctypes.memmove(self.arena.base + block.offset + at, address, nbytes)
                places[number] = (self.blocks[block.offset], at)
                at += nbytes + -nbytes % _ALIGN
            first = last
        return pieces[first:]

    def _take(self, nbytes: int) -> Block | None:
        block = self.arena.take(nbytes) if self.arena is not None else None
        if block is not None:
            self._taken.append(block)
            self._number(block.offset, nbytes)
        return block

    def _number(self, offset: int, nbytes: int) -> int:
        number = self.blocks.setdefault(offset, len(self.blocks))
        if number == len(self.block_sizes):
            self.block_sizes.append(nbytes)
        return number

    def _claim(self, address: int, nbytes: int, block: int) -> bool:
        """Whether these bytes of a block may be sent without a copy.

        Not if another span of this batch already covers them, because two storages must not become
        one. And not if they are a small part of the block, because a user who keeps them would keep
        the whole block.
        """
        if self.arena is None or 4 * nbytes < self.arena.nbytes_of(block):
            return False
        end = address + nbytes
        if any(address < other_end and other < end for other, other_end in self._claims):
            return False
        self._claims.append((address, end))
        return True


class _Address:
    """Raw memory, described in NumPy's array interface."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _raw(address: int, nbytes: int) -> Bytes:
    return np.asarray(_Address(address, nbytes))


def encode(batch: Any, arena: Arena | None) -> bytes:
    """The batch as a frame. Blocks it refers to are published; if pickling fails, none is."""
    if type(batch) is torch.Tensor:
        frame = _small_frame(batch)
        if frame is not None:
            return frame
    spans: list[_Span] = []
    outline = _outline(batch, spans)
    if outline is None:
        return _frame(spans, None, _pickle(batch, spans, _Pickler), arena)
    return _plain_frame(spans, outline, arena) or _frame(spans, outline, b"", arena)


def encode_for_start(value: Any) -> bytes:
    """A frame for processes that are being started, without blocks.

    Tensors that the user has put into shared memory stay shared, as with multiprocessing's spawn.
    All others arrive as copies, and nothing is put into ``/dev/shm`` for them.
    """
    spans: list[_Span] = []
    return _frame(spans, None, _pickle(value, spans, _StartPickler), None)


def _frame(spans: list[_Span], outline: Any, pickled: bytes, arena: Arena | None) -> bytes:
    if not spans and (arena is None or len(pickled) <= SMALL):
        return _HEADER.pack(0, len(pickled), 0) + pickled
    room = _Room(arena)
    entries, shared = _place(spans, room)
    pickle_block = room.place_bytes(pickled) if len(pickled) > SMALL else None
    if pickle_block is not None:
        pickled = b""
    large: list[Any] = room.large  # bytes-like, though NumPy's types do not say so
    sizes = [part.nbytes for part in large]
    table = marshal.dumps(
        (list(room.blocks), room.block_sizes, sizes, shared, entries, outline, pickle_block), 2
    )
    header = _HEADER.pack(len(table), len(pickled), room.small_bytes)
    frame = b"".join([header, table, pickled, *room.small, *large])
    room.publish()
    return frame


_heads: dict[Any, bytes] = {}


def _small_frame(tensor: torch.Tensor) -> bytes | None:
    """As `_plain_frame` for one small tensor, because such batches come at the highest rate. None
    if it is not that simple."""
    if _is_unusual(tensor):
        return None  # checked first: a sparse tensor has no `nbytes`
    nbytes, shape = tensor.nbytes, tensor.shape
    # Where a length is 1, a contiguous tensor may have any stride.
    if not 0 < nbytes < SMALL or 1 in shape or not tensor.is_contiguous():
        return None
    address = tensor.data_ptr()
    if not address:
        return None
    padding = -nbytes % _ALIGN
    head = _heads.get((tensor.dtype, shape))
    if head is None:
        head = _head_of([_span_of_tensor(tensor, 0)], _BARE, [], nbytes + padding)
        if len(_heads) < 256:
            _heads[tensor.dtype, shape] = head
    content = ctypes.string_at(address, nbytes)
    return b"".join((head, content, _PADDING[:padding])) if padding else head + content


def _plain_frame(spans: list[_Span], outline: Any, arena: Arena | None) -> bytes | None:
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
        if nbytes % _ALIGN:
            small.append(_PADDING[nbytes % _ALIGN :])
            nbytes += _ALIGN - nbytes % _ALIGN
        total += nbytes
    if total > SMALL:
        return None
    shapes = [(span[_CODE], span[_SIZE]) for span in spans]
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


def _head_of(spans: list[_Span], outline: Any, blocks: list[int], total: int) -> bytes:
    entries: list[_Entry] = []
    sizes: list[int] = []
    at = 0
    for span in spans:
        nbytes, place = span[_NBYTES], (-1, at)
        if nbytes >= SMALL:
            place = (len(sizes), 0)
            sizes.append(nbytes)
        else:
            at += nbytes + -nbytes % _ALIGN
        entries.append((span[_CODE], place, span[_SIZE], None))
    table = marshal.dumps((blocks, sizes, [], [], entries, outline, None), 2)
    return _HEADER.pack(len(table), 0, total) + table


def _pickle(batch: Any, spans: list[_Span], kind: type[_Pickler]) -> bytes:
    stream = io.BytesIO()
    pickler = kind(stream, 5, buffer_callback=partial(_beside_the_stream, spans))
    pickler.spans = spans
    pickler.dump(batch)
    return stream.getvalue()


def _outline(batch: Any, spans: list[_Span]) -> Any:
    """The structure of a batch that is a few ordinary tensors in a list, tuple or dict.

    Most batches are, and pickling would be most of their cost. None for all other batches.
    """
    kind = type(batch)
    things: Any
    outline: Any
    if kind is torch.Tensor:
        outline, things = _BARE, (batch,)
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
        if _is_unusual(tensor):
            break
        spans.append(_span_of_tensor(tensor, 0))
    # The same tensor, or the same storage, more than once: pickle knows what to do.
    if len({span[_KEY] for span in spans}) < len(things):
        spans.clear()
        return None
    return outline


def _place(spans: list[_Span], room: _Room) -> tuple[list[_Entry], list[_Entry]]:
    """The table's entries, and where the storages lie that several of them share."""
    if len({span[_KEY] for span in spans if span[_CODE] != _STORAGE}) == len(spans):
        places = room.place_all([(span[_ADDRESS], span[_NBYTES]) for span in spans])
        return [
            (code, place, size, layout)
            for (_, _, _, code, size, layout, _), place in zip(spans, places, strict=True)
        ], []
    segments = _Segments(spans)
    places = room.place_all(segments.pieces)
    entries = []
    for span, piece in zip(spans, segments.of_span, strict=True):
        _, address, _, code, size, layout, _ = span
        place = places[piece]
        if place is not None and piece in segments.shared:
            place = (segments.shared[piece], address - segments.pieces[piece][0])
            if code >= 0:
                code |= _SHARED
        entries.append((code, place, size, layout))
    return entries, [(places[piece], segments.pieces[piece][1]) for piece in segments.shared]


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
        length = _HEADER.unpack_from(frame)[0]
        if length:
            head = self._frame[_HEADER.size : _HEADER.size + length].tobytes()
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

    def unpack(self) -> Any:
        """The batch. If an exception interrupts it, it can be called again. Drop the parcel
        afterwards: it holds the blocks as well as the batch does."""
        frame, table = self._frame, self._table
        length, pickled, small = _HEADER.unpack_from(frame)
        start = _HEADER.size + length
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
        if outline == _BARE and not shared:
            ((code, place, size, layout),) = entries
            if place is not None and not code & _REQUIRES_GRAD:
                return _tensor(memories[place[0]], place[1], code >> 2, size, layout)
        objects = _objects(entries, shared, memories)
        if outline is None:
            stream: Any = frame[start:at] if pickle_block is None else memories[pickle_block]
            return pickle.loads(stream, buffers=objects)
        if outline == _BARE:
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


def receive(frame: Frame, window: Window | None) -> Parcel:
    """Lease the blocks of a frame. Call this as soon as the frame is read: if the sender dies, its
    successor may overwrite all blocks that are not lent out by then."""
    return Parcel(frame, window)


def decode(frame: Frame, window: Window | None) -> Any:
    """The batch in a frame, without a copy of what lies in the arena."""
    return Parcel(frame, window).unpack()


def _objects(entries: list[_Entry], shared: list[_Entry], memories: list[Any]) -> Iterator[Any]:
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
        if code == _ARRAY:
            yield _array(memories, place, size, *layout)
        elif code == _BUFFER:
            yield np.ndarray(size, np.uint8, memories[place[0]], place[1])
        elif code == _STORAGE:
            yield _EMPTY_STORAGE() if place is None else storage(place[0])
        else:
            dtype = _DTYPES[code >> 2]
            if place is None:
                tensor = torch.empty_strided(size, layout, dtype=dtype)
            elif code & _SHARED:
                tensor = _tensor_on(storage(place[0]), dtype, place[1], size, layout)
            else:
                tensor = _tensor(memories[place[0]], place[1], code >> 2, size, layout)
            yield tensor.requires_grad_() if code & _REQUIRES_GRAD else tensor


def _tensor(
    memory: Any, at: int, code: int, size: tuple[int, ...], stride: tuple[int, ...] | None
) -> torch.Tensor:
    """A tensor with a storage of its own, exactly as large as the tensor; not a view."""
    numpy_dtype = _NUMPY_DTYPES[code]
    if numpy_dtype is None:
        dtype = _DTYPES[code]
        stride = _contiguous(size) if stride is None else stride
        flat = torch.frombuffer(memory, dtype=dtype, count=_extent(size, stride), offset=at)
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
        storage, at // dtype.itemsize, size, _contiguous(size) if stride is None else stride
    )


_SOURCE = bytearray(_ALIGN)
_EMPTY_STORAGE: Callable[[], torch.UntypedStorage] = torch.UntypedStorage


def _contiguous(size: tuple[int, ...]) -> tuple[int, ...]:
    steps = []
    step = 1
    for length in reversed(size):
        steps.append(step)
        step *= length
    return tuple(reversed(steps))


def _extent(size: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """How many elements lie from the first to the last, both included."""
    return 1 + sum([(length - 1) * step for length, step in zip(size, stride, strict=True)])


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


# Functions that the pickles in frames refer to by name.


def _taken_out(thing: Any) -> Any:
    return thing


def _parameter(data: torch.Tensor, requires_grad: bool, state: Any) -> torch.nn.Parameter:
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
    return torch._nested_view_from_buffer_copy(*parts).requires_grad_(requires_grad)
