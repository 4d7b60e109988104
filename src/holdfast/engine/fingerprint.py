"""Eight bytes that stand for a batch, to see whether a stream makes the same one again.

A worker leaves one with every batch of an iterable dataset; a process that takes up its stream
compares with them what it makes (see `continuation`). So it is made for every batch and has to be
quick whatever the batch's size: some ten microseconds for one tensor, and never all its bytes.

What goes in: how the batch is built (types, lengths, keys in their order), dtypes and shapes,
numbers whole, texts and arrays of up to 64 KiB whole, and of larger ones a sample: both ends and
words at places that are spread over all of it, drawn once and the same everywhere. Of objects of
Python classes their attributes, of containers some entries, in all a bounded number of values. Two
batches of other samples therefore differ, short of samples that are alike where it looks. A few
bytes changed in a large tensor are not seen; that is not what it is for.

It has to be the same in another process, so nothing goes in that is not: no address, no ``hash()``,
no order of a set. Nothing of the user's runs for it either. So some objects cannot be looked into:
those of extension types that are not known here, large sets, tensors that are not plain memory. Of
these only the type goes in, and the fingerprint says so by being odd (`unseen`): equal ones are no
evidence then.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import pathlib
import re
import struct
import sys
import uuid
import weakref
import zlib
from array import array as Array
from collections import UserDict, deque
from collections.abc import Iterable
from hashlib import blake2b
from itertools import islice
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.memory.attributes import attributes_of, is_a, own_one, slots_of
from holdfast.memory.codec import AS_NUMPY

__all__ = ["DROPPED_BATCH", "NO_BATCH", "fingerprint", "fingerprint_of_error", "unseen"]

NO_BATCH: Final = 0  # of an answer that is none to a task; no fingerprint is this number
DROPPED_BATCH: Final = 1  # of a batch with nothing left in it
_RESERVED: Final = 2

SMALL: Final = 2048  # bytes of an array up to which they go in as they are,
WHOLE: Final = 1 << 16  # and up to which their checksum does;
IN_ALL: Final = 1 << 18  # of a batch, no more bytes than this in that way
WORD: Final = 8  # bytes that are read at one place of a larger one
PLACES: Final = 4096  # of a batch, at most; each array gets half of what is left, and a few
FEW: Final = 64
ENDS: Final = 64  # bytes at either end
NODES: Final = 96  # values that are looked at in all,
HEAVY: Final = 10  # of which an array counts as so many
ENTRIES: Final = (32, 16, 8)  # of a list or dict, by its depth; of longer ones, spread over it
DEPTH: Final = 8
ATTRIBUTES: Final = 32  # of an object
TEXT: Final = 256  # bytes of a text up to which they go in as they are; longer ones as arrays
POINTS: Final = 16  # of a picture
REMEMBERED: Final = 1000  # types and shapes
LENGTHS: Final = 32  # of large arrays, with the places where they are read

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
    datetime.timezone,
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
_NAMED = (type, FunctionType, BuiltinFunctionType, ModuleType)  # no data: the name says all
_OBJECT = object.__basicsize__
_POINTER = struct.calcsize("P")
_heads: dict[tuple[torch.dtype, tuple[int, ...]], bytes] = {}
_anatomies: dict[int, _Anatomy] = {}
_places_of: dict[tuple[int, int], NDArray[np.int64]] = {}
_SPREAD = np.random.default_rng(0).random(PLACES)  # the same in every process


def fingerprint(batch: Any) -> int:
    """The same for the same batch, in this process and in others."""
    walk = _Walk()
    try:
        walk.value(batch, 0)
    except Exception:  # a tensor without memory, a picture that was closed: as far as it came
        walk.unseen(type(batch))
    return walk.result()


def unseen(marks: Iterable[int]) -> int:
    """How many of these fingerprints are of batches of which something could not be looked at."""
    return sum(mark & 1 for mark in marks if mark >= _RESERVED)


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
        self._places = PLACES
        self._whole = IN_ALL
        self._nodes = NODES
        self._blind = False
        self._met: set[int] = set()  # objects, which may hold each other

    def result(self) -> int:
        number = int.from_bytes(self._hash.digest(), "little") & ~1
        return max(_RESERVED, number) | self._blind

    def unseen(self, kind: type) -> None:
        """Something of this type is in the batch, and no more can be said of it."""
        self._blind = True
        self.add(b"?" + _name(kind))

    def value(self, value: Any, depth: int) -> None:
        self._nodes -= 1
        if self._nodes < 0:
            return
        if depth > DEPTH:
            self.unseen(type(value))
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
        anatomy = _anatomies.get(id(kind))
        if anatomy is not None:
            self.add(anatomy.name)
            self._object(value, anatomy, depth)
            return
        self.add(b"t" + _name(kind))
        if issubclass(kind, dict):
            self._dict(value, depth)
        elif issubclass(kind, (list, tuple)):
            self._sequence(value, depth)
        elif issubclass(kind, np.ndarray):
            self._array(value.view(np.ndarray), depth)
        elif issubclass(kind, np.generic):
            self._text(b"g", str(value.dtype).encode())
            if value.dtype.hasobject:
                self.unseen(kind)
            else:
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
        else:
            self._rest(value, kind, depth)

    def _rest(self, value: Any, kind: type, depth: int) -> None:
        if issubclass(kind, _NAMED):
            name = value.__name__ if issubclass(kind, ModuleType) else value.__qualname__
            self._text(b"n", str(name).encode(errors="replace"))
        elif issubclass(kind, weakref.ref):
            return  # to something that is elsewhere
        elif issubclass(kind, deque):
            self._sequence(list(deque.__iter__(value)), depth)
        elif issubclass(kind, (Array, memoryview)):
            self._text(b"b", memoryview(value).cast("B"))
        elif issubclass(kind, np.dtype):
            self._text(b"r", str(value).encode())
        elif issubclass(kind, re.Pattern):
            self.value(value.pattern, depth + 1)
        elif issubclass(kind, _PLAIN):
            base: Any = next(one for one in kind.__mro__ if one in _PLAIN_TYPES)
            self._text(b"r", base.__repr__(value).encode(errors="replace"))
        else:
            self._object(value, _anatomy(kind), depth)

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
        else:
            self._bytes(np.frombuffer(text, np.uint8))

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
            self.unseen(type(values))  # there is no telling which of them another process sees
            return
        total = 0
        for value in base.__iter__(values):
            part = _Walk()
            part.value(value, depth + 1)
            total += part.result()
            self._blind |= part._blind
        self.add((total & (1 << 64) - 1).to_bytes(8, "little"))

    def _dataclass(self, value: Any, kind: Any, depth: int) -> None:
        for name in islice(kind.__dataclass_fields__, ATTRIBUTES):
            try:
                found = own_one(value, name)
            except KeyError:
                continue  # not set, or not on the object itself
            self.add(name.encode())
            self.value(found, depth + 1)

    def _object(self, value: Any, anatomy: _Anatomy, depth: int) -> None:
        """Its attributes, read without a method of its own."""
        if id(value) in self._met:
            return
        self._met.add(id(value))
        if anatomy.hidden:
            self.unseen(anatomy.kind)
        entries: list[tuple[Any, Any]] = []
        if anatomy.attributes is not None:
            inside = anatomy.attributes.__get__(value)
            if is_a(inside, dict):
                entries += islice(dict.items(inside), ATTRIBUTES)
                self.add(_LONG.pack(dict.__len__(inside)))
        for name, member in anatomy.slots:
            try:
                entries.append((name, member.__get__(value)))
            except AttributeError:
                continue  # not set
        if len(entries) > 1:
            entries.sort(key=_by_name)
        for name, found in entries:
            if type(name) is str:
                self.add(b"a" + name.encode(errors="replace"))
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
            self.unseen(torch.Tensor)
            return
        self.add(_head(tensor.dtype, tuple(tensor.shape)))
        if tensor.is_quantized:
            self.unseen(torch.Tensor)
            return
        if not tensor.numel():
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
            else:
                self.unseen(type(array))
        elif array.size:
            self._memory(array)

    def _memory(self, array: NDArray[Any]) -> None:
        """All of the bytes, or some."""
        self._nodes -= HEAVY
        nbytes = array.nbytes
        if nbytes <= SMALL:
            self.add(array.tobytes())
        elif array.flags.c_contiguous:
            self._bytes(array.reshape(-1).view(np.uint8))
        elif nbytes <= WHOLE and nbytes <= self._whole:
            self._bytes(np.frombuffer(array.tobytes(), np.uint8))
        else:
            array = _thinned(array, self._share() * WORD // array.itemsize)
            self.add(_checksum(array.tobytes()))

    def _bytes(self, flat: NDArray[np.uint8]) -> None:
        """Of a stretch of memory."""
        nbytes = len(flat)
        if nbytes <= WHOLE and nbytes <= self._whole:
            self._whole -= nbytes
            self.add(_checksum(flat))
            return
        self.add(flat[:ENDS].tobytes())
        self.add(flat[-ENDS:].tobytes())
        words = nbytes // WORD
        places = min(self._share(), words)
        table = flat[: words * WORD].reshape(words, WORD)  # as bytes: they may not be aligned
        self.add(_checksum(table.take(_places(words, places), axis=0, mode="clip")))

    def _share(self) -> int:
        """At how many places this array may be read."""
        share = max(FEW, self._places // 2)
        self._places -= share
        return share

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


def _places(words: int, count: int) -> NDArray[np.int64]:
    """Where a stretch of memory is read: one place in each of so many stretches of equal length,
    somewhere in it. A fixed distance could be that of the rows, and pictures have equal borders."""
    found = _places_of.get((words, count))
    if found is None:
        if len(_places_of) >= LENGTHS:
            _places_of.clear()
        found = ((np.arange(count) + _SPREAD[:count]) * (words / count)).astype(np.int64)
        _places_of[words, count] = found
    return found


class _Anatomy(NamedTuple):
    """What objects of a class consist of."""

    kind: type  # so that it lives as long as this
    name: bytes
    attributes: Any  # reads the ``__dict__``, if there is one
    slots: list[tuple[str, Any]]
    hidden: bool  # something that is not an attribute: memory of an extension type


def _anatomy(kind: type) -> _Anatomy:
    found = _anatomies.get(id(kind))  # its metaclass may define a hash, and no user code may run
    if found is None:
        if len(_anatomies) >= REMEMBERED:
            _anatomies.clear()
        slots, attributes = slots_of(kind), attributes_of(kind)
        pointers = len(slots) + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
        hidden = (
            kind.__itemsize__ != 0
            or kind.__basicsize__ > _OBJECT + _POINTER * pointers
            or (kind.__dictoffset__ != 0 and attributes is None)
        )
        found = _Anatomy(kind, b"t" + _name(kind), attributes, slots, hidden)
        _anatomies[id(kind)] = found
    return found


def _by_name(entry: tuple[Any, Any]) -> str:
    return entry[0] if type(entry[0]) is str else ""


def _checksum(memory: Any) -> bytes:
    return zlib.crc32(memory).to_bytes(4, "little")


def _head(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """What all tensors of that type and shape begin with: most are like the one before."""
    head = _heads.get((dtype, shape))
    if head is None:
        if len(_heads) >= REMEMBERED:
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
