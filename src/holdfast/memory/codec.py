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

Tensors on one storage share one afterwards, if their spans fill at least half of what they span
together; two rows of a huge dataset do not drag the rest of it along. Arrays come out independent
of each other, as pickle has it, and so do tensors whose storages merely overlap.

A frame: header | table (marshal) | pickle | small spans | large spans.
"""

from __future__ import annotations

import copyreg
import ctypes
import io
import marshal
import pickle
import struct
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.multiprocessing import reductions
from torch.utils.hooks import warn_if_has_hooks

from .arena import Arena, Block, Bytes, Window

__all__ = ["AS_NUMPY", "SMALL", "Parcel", "decode", "encode", "receive"]

SMALL = 16 << 10
"""Spans below this travel in the frame (up to this much in all); larger ones get a block each."""
COMMON = 256 << 10
"""Small spans that do not fit into the frame share blocks of this size."""
_ALIGN = 16
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

# What an entry of the table says in its first field: for a tensor its dtype and these two bits ...
_REQUIRES_GRAD, _SHARED = 1, 2
# ... and a negative number for all else.
_ARRAY, _STORAGE, _BUFFER = -1, -2, -3
_NOWHERE = -1

Frame = bytes | bytearray | memoryview
"""What `encode` returns and a socket delivers."""
_Entry = tuple[Any, ...]
_MARK = pickle.PickleBuffer(bytearray(1))
_by_torch: Callable[[torch.Tensor], Any] = reductions.reduce_tensor


class _Spans:
    """The raw memory found while pickling: one entry for each object taken out of the stream."""

    __slots__ = ("addresses", "entries", "keys", "objects", "sizes", "storages")

    def __init__(self) -> None:
        self.storages = 0
        self.objects: list[Any] = []  # alive until their bytes are copied
        self.keys: list[int] = []  # equal for what shares one torch storage
        self.addresses: list[int] = []
        self.sizes: list[int] = []
        self.entries: list[_Entry] = []

    def add(self, thing: Any, key: int, address: int, nbytes: int, *entry: Any) -> None:
        self.objects.append(thing)
        self.keys.append(key)
        self.addresses.append(address)
        self.sizes.append(nbytes)
        self.entries.append(entry)

    def add_tensor(self, tensor: torch.Tensor) -> None:
        code = _CODES[tensor.dtype]
        if tensor.requires_grad:
            code |= _REQUIRES_GRAD
        size = tuple(tensor.shape)
        stride = tensor.stride()
        if 0 in size:
            self.add(tensor, _NOWHERE - len(self.keys), 0, 0, code, size, stride)
            return
        layout = None if stride == _contiguous(size) else stride
        if layout is None:
            nbytes = tensor.nbytes
        else:
            nbytes = _extent(size, stride) * tensor.itemsize
        key = tensor.untyped_storage()._cdata
        self.add(tensor, key, tensor.data_ptr(), nbytes, code, size, layout)

    def add_array(self, array: np.ndarray[Any, Any], dtype: str | bytes) -> None:
        order = None if array.flags.c_contiguous else "F"
        address = array.__array_interface__["data"][0]
        key = _NOWHERE - len(self.keys)
        self.add(array, key, address, array.nbytes, _ARRAY, array.shape, (dtype, order))

    def add_storage(self, storage: torch.UntypedStorage) -> None:
        self.storages += 1
        self.add(
            storage, storage._cdata, storage.data_ptr(), storage.nbytes(), _STORAGE, None, None
        )

    def add_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Called by pickle for what wants to travel beside the stream. True: it stays in it."""
        if buffer is _MARK:
            return False
        raw = buffer.raw()
        if raw.nbytes < SMALL:
            return True
        address = np.frombuffer(raw, np.uint8).__array_interface__["data"][0]
        self.add(raw, _NOWHERE - len(self.keys), address, raw.nbytes, _BUFFER, raw.nbytes, None)
        return False


class _Pickler(ForkingPickler):
    """Pickle, but tensors and arrays leave only a mark in the stream."""

    def __init__(self, file: io.BytesIO, spans: _Spans) -> None:
        # Not ForkingPickler's own: its table is a ChainMap, slow to make and to search.
        pickle.Pickler.__init__(self, file, 5, buffer_callback=spans.add_buffer)
        self.spans = spans
        self.dispatch_table = {
            **copyreg.dispatch_table,
            **ForkingPickler._extra_reducers,  # type: ignore[attr-defined]
        }

    def reducer_override(self, thing: Any) -> Any:
        kind = type(thing)
        if kind is torch.Tensor:
            return self._reduce_tensor(thing)
        if kind is np.ndarray:
            return self._reduce_array(thing)
        if kind is torch.UntypedStorage and thing.device.type == "cpu":
            self.spans.add_storage(thing)
            return _taken_out, (
                _MARK,
            )  # a new tuple: pickle would write a known one as a reference
        if kind is torch.nn.Parameter:
            return _parameter, (thing.detach(), thing.requires_grad, thing.__dict__ or None)
        return NotImplemented

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.requires_grad:
            if not tensor.is_leaf:
                return _by_torch(tensor)  # raises, in torch's own words
            warn_if_has_hooks(tensor)
        if not tensor.is_cpu:
            return _by_torch(tensor)
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            return _reduce_unusual(tensor)
        if tensor.is_neg() or tensor.is_conj():
            resolved = tensor.detach().resolve_conj().resolve_neg()
            tensor = resolved.requires_grad_(tensor.requires_grad)
        self.spans.add_tensor(tensor)
        return _taken_out, (_MARK,)

    def _reduce_array(self, array: np.ndarray[Any, Any]) -> Any:
        dtype = _array_dtype(array.dtype)
        flags = array.flags
        if (
            dtype is None
            or not (flags.c_contiguous or flags.f_contiguous)
            or np.ndarray in self.dispatch_table
        ):
            return NotImplemented
        self.spans.add_array(array, dtype)
        return _taken_out, (_MARK,)


def _reduce_unusual(tensor: torch.Tensor) -> Any:
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
    else:  # quantized, and whatever torch can pickle but we do not know
        return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    return _sparse_compressed, (indices, bare.values(), tuple(bare.shape), layout, grad)


_known_array_dtypes: dict[np.dtype[Any], str | bytes | None] = {}


def _array_dtype(dtype: np.dtype[Any]) -> str | bytes | None:
    """How to write down a dtype; None if its elements are more than their bytes."""
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
    """Spans of one torch storage joined, where that does not drag too much along."""

    def __init__(self, spans: _Spans) -> None:
        self.addresses: list[int] = []
        self.sizes: list[int] = []
        self.of_span = [0] * len(spans.keys)
        self.shared: dict[int, int] = {}  # segment: its number among the shared ones
        by_key: dict[int, list[int]] = {}
        for number, key in enumerate(spans.keys):
            by_key.setdefault(key, []).append(number)
        for members in by_key.values():
            if len(members) > 1:
                self._join(spans, sorted(members, key=spans.addresses.__getitem__))
            else:
                self._add(spans.addresses[members[0]], spans.sizes[members[0]], members)
            if len(members) > 1 or spans.entries[members[0]][0] == _STORAGE:
                for number in members:
                    self.shared.setdefault(self.of_span[number], len(self.shared))

    def _join(self, spans: _Spans, members: list[int]) -> None:
        first = spans.objects[members[0]]
        storage = first if isinstance(first, torch.UntypedStorage) else first.untyped_storage()
        base = storage.data_ptr()
        runs: list[tuple[int, int, list[int]]] = []
        for number in members:
            start = spans.addresses[number]
            end = start + spans.sizes[number]
            start -= (start - base) % _ALIGN  # so that every dtype's offset is a whole number
            if runs and start <= runs[-1][1]:
                first_byte, last_byte, together = runs[-1]
                runs[-1] = (first_byte, max(last_byte, end), [*together, number])
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
            self.of_span[number] = len(self.addresses)
        self.addresses.append(address)
        self.sizes.append(nbytes)


class _Room:
    """Finds a place for each segment: (number of a memory, offset in it).

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
        self._claims: dict[int, list[tuple[int, int]]] = {}

    def place_all(self, addresses: list[int], sizes: list[int]) -> list[tuple[int, int] | None]:
        places: list[tuple[int, int] | None] = []
        small: list[int] = []
        total = 0
        for number, nbytes in enumerate(sizes):
            if nbytes >= SMALL:
                places.append(self._place_large(addresses[number], nbytes))
            else:
                places.append(None)
                if nbytes:
                    small.append(number)
                    total += nbytes + -nbytes % _ALIGN
        if small and (total <= SMALL or not self._share_blocks(addresses, sizes, small, places)):
            for number in small:
                if places[number] is None:
                    places[number] = self._place_small(addresses[number], sizes[number])
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

    def _place_large(self, address: int, nbytes: int) -> tuple[int, int]:
        if self.arena is not None:
            found = self.arena.find(address, nbytes)
            if found is not None and self._claim(found[0], found[1], nbytes):
                return self._number(found[0], self.arena.nbytes_of(found[0])), found[1]
            block = self._take(nbytes)
            if block is not None:
                ctypes.memmove(self.arena.base + block.offset, address, nbytes)
                return self.blocks[block.offset], 0
        self.large.append(_raw(address, nbytes))
        return -1 - len(self.large), 0

    def _place_small(self, address: int, nbytes: int) -> tuple[int, int]:
        at = self.small_bytes
        self.small.append(ctypes.string_at(address, nbytes))
        padding = -nbytes % _ALIGN
        if padding:
            self.small.append(b"\0" * padding)
        self.small_bytes += nbytes + padding
        return -1, at

    def _share_blocks(
        self,
        addresses: list[int],
        sizes: list[int],
        numbers: list[int],
        places: list[tuple[int, int] | None],
    ) -> bool:
        if self.arena is None:
            return False
        first = 0
        while first < len(numbers):
            total = 0
            last = first
            while last < len(numbers) and total < COMMON:
                total += sizes[numbers[last]] + -sizes[numbers[last]] % _ALIGN
                last += 1
            block = self._take(total)
            if block is None:
                return False
            at = 0
            for number in numbers[first:last]:
                ctypes.memmove(
                    self.arena.base + block.offset + at, addresses[number], sizes[number]
                )
                places[number] = (self.blocks[block.offset], at)
                at += sizes[number] + -sizes[number] % _ALIGN
            first = last
        return True

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

    def _claim(self, offset: int, start: int, nbytes: int) -> bool:
        """Whether these bytes of a block may go without a copy.

        Not if something else in this batch already has them, for two storages must not become
        one; and not if they are a small part of the block, for who keeps them would keep it all.
        """
        if self.arena is None or 4 * nbytes < self.arena.nbytes_of(offset):
            return False
        claims = self._claims.setdefault(offset, [])
        if any(start < end and other < start + nbytes for other, end in claims):
            return False
        claims.append((start, start + nbytes))
        return True


class _Address:
    """Raw memory as NumPy likes to be told about it."""

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
    spans = _Spans()
    stream = io.BytesIO()
    _Pickler(stream, spans).dump(batch)
    pickled = stream.getvalue()
    room = _Room(arena)
    pickle_block = None
    if len(pickled) > SMALL and arena is not None:
        pickle_block = room.place_bytes(pickled)
        if pickle_block is not None:
            pickled = b""
    if not spans.keys and pickle_block is None:
        return _HEADER.pack(0, len(pickled), 0) + pickled
    entries, shared = _place(spans, room)
    table = marshal.dumps(
        (
            list(room.blocks),
            room.block_sizes,
            [part.nbytes for part in room.large],
            shared,
            entries,
            pickle_block,
        ),
        2,
    )
    header = _HEADER.pack(len(table), len(pickled), room.small_bytes)
    large: list[Any] = room.large  # bytes-like, though NumPy's types do not say so
    frame = b"".join([header, table, pickled, *room.small, *large])
    room.publish()
    return frame


def _place(spans: _Spans, room: _Room) -> tuple[list[_Entry], list[_Entry]]:
    """The table's entries, and where the storages lie that several of them share."""
    keys = spans.keys
    if not spans.storages and (len(keys) == 1 or len(set(keys)) == len(keys)):
        places = room.place_all(spans.addresses, spans.sizes)
        return [
            (code, place, size, layout)
            for place, (code, size, layout) in zip(places, spans.entries, strict=True)
        ], []
    segments = _Segments(spans)
    places = room.place_all(segments.addresses, segments.sizes)
    entries = []
    for number, (code, size, layout) in enumerate(spans.entries):
        segment = segments.of_span[number]
        place = places[segment]
        if place is not None and segment in segments.shared:
            shift = spans.addresses[number] - segments.addresses[segment]
            place = (segments.shared[segment], shift)
            if code >= 0:
                code |= _SHARED
        entries.append((code, place, size, layout))
    shared: list[_Entry] = [
        (places[segment], segments.sizes[segment]) for segment in segments.shared
    ]
    return entries, shared


class Parcel:
    """A frame that has arrived: its blocks are safe, its objects are not made yet.

    Dropping it unopened releases the blocks.
    """

    __slots__ = ("_frame", "_leases", "_table", "nbytes")

    def __init__(self, frame: Frame, window: Window | None) -> None:
        self._frame: memoryview | None = memoryview(frame)
        self._leases: list[Bytes] = []
        self._table: Any = None
        self.nbytes = len(frame)
        length = _HEADER.unpack_from(frame)[0]
        if length:
            table = marshal.loads(self._frame[_HEADER.size : _HEADER.size + length])
            self._table = table
            if table[0]:
                if window is None:
                    raise ValueError("the frame refers to an arena, but there is no window on it")
                for offset, nbytes in zip(table[0], table[1], strict=True):
                    self._leases.append(window.lease(offset, nbytes))
                    self.nbytes += nbytes

    def unpack(self) -> Any:
        """The batch. Only once: from then on it is the batch that holds the blocks."""
        frame, table = self._frame, self._table
        memories: list[Any] = self._leases
        if frame is None:
            raise ValueError("this parcel has been unpacked")
        self._frame, self._table, self._leases = None, None, []
        length, pickled, small = _HEADER.unpack_from(frame)
        at = _HEADER.size + length
        stream: Any = frame[at : at + pickled]
        if table is None:
            return pickle.loads(stream)
        _, _, large, shared, entries, pickle_block = table
        if pickle_block is not None:
            stream = memories[pickle_block]
            memories[pickle_block] = None  # released as soon as it is read
        at += pickled + small
        parts = []
        for nbytes in large:
            parts.append(np.frombuffer(frame[at : at + nbytes], np.uint8).copy())
            at += nbytes
        at = _HEADER.size + length + pickled
        memories += reversed(parts)
        memories.append(bytearray(frame[at : at + small]))
        return pickle.loads(stream, buffers=_objects(entries, shared, memories))


def receive(frame: Frame, window: Window | None) -> Parcel:
    """Take in a frame. Do this as soon as it is read: the sender's successor will be told to spare
    the blocks that are lent out by then, and no others."""
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
    """A tensor with a storage of its own, exactly as large as the tensor, and no view."""
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
    """How many elements lie between the first and the last, these included."""
    return 1 + sum([(length - 1) * step for length, step in zip(size, stride, strict=True)])


def _array(
    memories: list[Any],
    place: tuple[int, int] | None,
    shape: tuple[int, ...],
    dtype: str | bytes,
    order: str | None,
) -> np.ndarray[Any, Any]:
    kind = pickle.loads(dtype) if isinstance(dtype, bytes) else dtype
    if place is None:
        return np.empty(shape, kind, "F" if order else "C")
    return np.ndarray(shape, kind, memories[place[0]], place[1], None, "F" if order else "C")


# The functions that frames name.


def _taken_out(thing: Any) -> Any:
    return thing


def _parameter(data: torch.Tensor, requires_grad: bool, state: Any) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(data, requires_grad)
    if state:
        parameter.__dict__.update(state)
    return parameter


# torch's own _rebuild_sparse_tensor keeps every tensor in a global list, to be validated by a
# torch.load that never comes.


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
