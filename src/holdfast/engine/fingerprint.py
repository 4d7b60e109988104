"""Eight bytes that stand for a batch, to see whether a stream makes the same one again.

A worker leaves one with every batch of an iterable dataset; a process that takes up its stream
compares with them what it makes (see `continuation`). So it is made for every batch and has to be
quick whatever the batch's size: some ten microseconds for one tensor, and never all its bytes.

What goes in: how the batch is built (types, lengths, keys in their order), dtypes and shapes,
numbers whole, and of texts and memory a bounded sample: of each row of a tensor some pieces, spread
over the row and away from its ends, where images have borders. Two batches of other samples
therefore differ, short of samples that are alike where it looks. One byte changed in a large tensor
is not seen; that is not what it is for.

It has to be the same in another process, so nothing goes in that is not: no address, no ``hash()``,
no order of a set. Nothing of the user's runs for it either. Of objects that are not known here
only the type's name goes in; what is inside may differ from process to process for good reasons.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import pathlib
import struct
import sys
import uuid
from collections import UserDict
from hashlib import blake2b
from itertools import islice
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.memory.attributes import is_a, own_one
from holdfast.memory.codec import AS_NUMPY

__all__ = ["DROPPED_BATCH", "NO_BATCH", "fingerprint", "fingerprint_of_error"]

NO_BATCH: Final = 0  # of an answer that is none to a task; no fingerprint is this number
DROPPED_BATCH: Final = 1  # of a batch with nothing left in it
_RESERVED: Final = 2

ALL: Final = 2048  # bytes of an array up to which all of them go in
PIECE: Final = 32  # bytes of a piece of a larger one
PIECES: Final = 256  # of a batch, at most; each array gets half of what is left, and a few
FEW: Final = 8
NODES: Final = 96  # values that are looked at in all,
HEAVY: Final = 10  # of which an array counts as so many
ENTRIES: Final = (32, 16, 8)  # of a list or dict, by its depth; of longer ones, spread over it
DEPTH: Final = 8
TEXT: Final = 256  # bytes of a text up to which all go in; of longer ones the ends and the middle
POINTS: Final = 16  # of a picture
HEADS: Final = 1000  # types and shapes that are remembered

_DOUBLE = struct.Struct("<d")
_LONG = struct.Struct("<q")
_PLAIN = (  # whose repr says all, and is the same everywhere
    bool,
    type(None),
    type(...),
    complex,
    range,
    slice,
    datetime.date,
    datetime.datetime,
    datetime.time,
    datetime.timedelta,
    decimal.Decimal,
    fractions.Fraction,
    uuid.UUID,
    pathlib.PosixPath,
    pathlib.PurePosixPath,
    torch.Size,
    torch.dtype,
    torch.device,
)
_PLAIN_TYPES = frozenset(_PLAIN)
_heads: dict[tuple[torch.dtype, tuple[int, ...]], bytes] = {}


def fingerprint(batch: Any) -> int:
    """The same for the same batch, in this process and in others."""
    walk = _Walk()
    try:
        walk.value(batch, 0)
    except Exception:  # a tensor without memory, a picture that was closed: as far as it came
        walk.add(b"?" + _name(type(batch)))
    return walk.result()


def fingerprint_of_error(error: BaseException) -> int:
    """Of what was raised in place of a batch: its type. The text may name an address or a time."""
    walk = _Walk()
    walk.add(b"!" + _name(type(error)))
    return walk.result()


def _name(kind: type) -> bytes:
    return f"{kind.__module__}.{kind.__qualname__}".encode(errors="replace")


class _Walk:
    """Through one batch."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=8)
        self.add = self._hash.update
        self._pieces = PIECES
        self._nodes = NODES

    def result(self) -> int:
        return max(_RESERVED, int.from_bytes(self._hash.digest(), "little"))

    def value(self, value: Any, depth: int) -> None:
        self._nodes -= 1
        if self._nodes < 0 or depth > DEPTH:
            return
        kind = type(value)
        if kind is torch.Tensor:
            self._tensor(value)
        elif kind is int:
            self._int(value)
        elif kind is float:
            self.add(b"f" + _DOUBLE.pack(value))
        elif kind is str:
            self._text(b"s", value.encode(errors="surrogatepass"))
        elif kind in _PLAIN_TYPES:
            self._text(b"r", repr(value).encode(errors="replace"))
        else:
            self._other(value, kind, depth)

    def _other(self, value: Any, kind: type, depth: int) -> None:
        self.add(b"t" + _name(kind))
        if issubclass(kind, dict):
            self._dict(value, depth)
        elif issubclass(kind, (list, tuple)):
            self._sequence(value, depth)
        elif issubclass(kind, np.ndarray):
            self._array(value.view(np.ndarray), depth)
        elif issubclass(kind, np.generic):
            self._text(b"g", str(value.dtype).encode())
            if not value.dtype.hasobject:
                self._text(b"g", np.ndarray.tobytes(np.asarray(value)))
        elif issubclass(kind, torch.Tensor):
            with torch._C.DisableTorchFunctionSubclass():
                self._tensor(value.detach().as_subclass(torch.Tensor))
        elif issubclass(kind, (int, float, str, bytes, bytearray)):
            self._scalar(value)
        elif issubclass(kind, (set, frozenset)):
            self._set(value, depth)
        elif issubclass(kind, UserDict):
            self._dict(own_one(value, "data"), depth)
        elif hasattr(kind, "__dataclass_fields__"):
            self._dataclass(value, kind, depth)
        elif _is_picture(kind):
            self._picture(value)

    # -- small things ---------------------------------------------------------------------

    def _scalar(self, value: Any) -> None:
        """Of a subclass: what it is below it, without a method of its own."""
        if is_a(value, str):
            self._text(b"s", str.encode(value, errors="surrogatepass"))
        elif is_a(value, int):
            self._int(int.__int__(value))
        elif is_a(value, float):
            self.add(b"f" + _DOUBLE.pack(float.__float__(value)))
        else:
            self._text(b"b", memoryview(value))

    def _int(self, value: int) -> None:
        try:
            self.add(b"i" + _LONG.pack(value))
        except struct.error:
            self.add(
                b"I"
                + _LONG.pack(value.bit_length())
                + (value & (1 << 64) - 1).to_bytes(8, "little")
            )

    def _text(self, mark: bytes, text: bytes | memoryview) -> None:
        length = len(text)
        self.add(mark + _LONG.pack(length))
        if length <= TEXT:
            self.add(text)
            return
        middle = length // 2
        part = TEXT // 4
        for piece in (text[:part], text[middle : middle + part], text[-part:]):
            self.add(piece)

    # -- what holds others ----------------------------------------------------------------

    def _sequence(self, values: Any, depth: int) -> None:
        base = list if is_a(values, list) else tuple
        length = base.__len__(values)
        self.add(_LONG.pack(length))
        for at in _spread(length, depth):
            self.value(base.__getitem__(values, at), depth + 1)

    def _dict(self, values: Any, depth: int) -> None:
        if not is_a(values, dict):
            return
        self.add(_LONG.pack(dict.__len__(values)))
        for key, value in islice(dict.items(values), _entries(depth)):
            self.value(key, depth + 1)
            self.value(value, depth + 1)

    def _set(self, values: Any, depth: int) -> None:
        """In whatever order: that of a set is another in another process."""
        base: Any = set if is_a(values, set) else frozenset
        length = base.__len__(values)
        self.add(_LONG.pack(length))
        if length > _entries(depth):
            return
        total = 0
        for value in base.__iter__(values):
            part = _Walk()
            part.value(value, depth + 1)
            total += part.result()
        self.add((total & (1 << 64) - 1).to_bytes(8, "little"))

    def _dataclass(self, value: Any, kind: Any, depth: int) -> None:
        for name in islice(kind.__dataclass_fields__, _entries(depth)):
            try:
                found = own_one(value, name)
            except KeyError:
                continue  # not set, or not on the object itself
            self.add(name.encode())
            self.value(found, depth + 1)

    # -- memory ---------------------------------------------------------------------------

    def _tensor(self, tensor: torch.Tensor) -> None:
        try:
            array = tensor.numpy()  # refuses all that is not plain memory of a type it knows
        except (TypeError, RuntimeError):
            self._unusual(tensor)
            return
        self.add(_head(tensor.dtype, array.shape))
        if array.size:
            self._memory(array)

    def _unusual(self, tensor: torch.Tensor) -> None:
        self.add(_head(tensor.dtype, ()))
        if tensor.layout is not torch.strided or not tensor.is_cpu or tensor.is_nested:
            return
        self.add(_head(tensor.dtype, tuple(tensor.shape)))
        if tensor.is_quantized or not tensor.numel():
            return
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if tensor.dtype not in AS_NUMPY:  # its bytes, in a type of their width
            tensor = tensor.view(_OF_WIDTH[tensor.element_size()])
        self._memory(tensor.numpy())

    def _array(self, array: NDArray[Any], depth: int) -> None:
        dtype = array.dtype
        self.add(str(dtype).encode(errors="replace"))
        self.add(repr(array.shape).encode())
        if dtype.hasobject:
            if dtype.kind == "O":
                for at in _spread(array.size, depth):
                    self.value(array.item(at), depth + 1)
        elif array.size:
            self._memory(array)

    def _memory(self, array: NDArray[Any]) -> None:
        """Some of the bytes, of each row if there are not too many rows."""
        self._nodes -= HEAVY
        nbytes = array.nbytes
        if nbytes <= ALL:
            self.add(array.tobytes())
            return
        pieces = max(FEW, self._pieces // 2)
        self._pieces -= pieces
        if not array.flags.c_contiguous:
            array = _thinned(array, pieces * PIECE // array.itemsize)
            self.add(array.tobytes())
            return
        rows = array.shape[0] if array.ndim > 1 else 1
        if rows > pieces or nbytes // rows < 2 * PIECE:
            rows = pieces  # stretches of memory, whatever they are
        flat = array.reshape(-1).view(np.uint8)
        length = nbytes // rows
        table = flat[: rows * length].reshape(rows, length)
        columns = max(1, min(pieces // rows, length // (2 * PIECE)))
        for column in range(columns):
            at = (2 * column + 1) * length // (2 * columns) - PIECE // 2
            self.add(table[:, at : at + PIECE].tobytes())
        self.add(flat[-PIECE:].tobytes())

    def _picture(self, picture: Any) -> None:
        self._nodes -= HEAVY
        width, height = picture.size
        self._text(b"p", f"{picture.mode} {width} {height}".encode())
        if not width or not height:
            return
        for number in range(POINTS):
            x = (number * 37 % POINTS * width) // POINTS
            y = number * height // POINTS
            self.add(repr(picture.getpixel((x, y))).encode())


def _head(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """What all tensors of that type and shape begin with: most are like the one before."""
    head = _heads.get((dtype, shape))
    if head is None:
        if len(_heads) >= HEADS:
            _heads.clear()
        head = _heads[dtype, shape] = f"{dtype} {shape}".encode()
    return head


def _entries(depth: int) -> int:
    return ENTRIES[min(depth, len(ENTRIES) - 1)]


def _spread(length: int, depth: int) -> range:
    """Places in something of this length, from the first to near the last."""
    return range(0, length, max(1, -(-length // _entries(depth))))


_OF_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def _thinned(array: NDArray[Any], elements: int) -> NDArray[Any]:
    """Every so many of each dimension, so that no more than about so many elements are left."""
    left = max(1, elements)
    steps = []
    for number, size in enumerate(array.shape):
        share = max(1, int(left ** (1 / (array.ndim - number))))
        taken = min(size, share)
        steps.append(slice(size // taken // 2, None, -(-size // taken)))
        left = max(1, left // taken)
    return array[tuple(steps)]


def _is_picture(kind: type) -> bool:
    module = sys.modules.get("PIL.Image")
    return module is not None and issubclass(kind, module.Image)
