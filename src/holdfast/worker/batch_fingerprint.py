"""Eight bytes that identify a batch, to see whether a stream makes the same batch again.

A worker sends one with every batch of an iterable dataset. A process that takes up its stream
compares the batches that it makes with them (see `continuation`). It is made for every batch, so it
has to be quick whatever the size: some ten microseconds for one tensor, and never all its bytes.

What goes in: the structure of the batch (types, lengths, keys in their order), dtypes and shapes,
numbers, texts and arrays of up to 64 KiB, and a sample of larger ones (`fingerprint_memory`); the
attributes of objects of Python classes, and some entries of containers; in all a bounded number of
values. So two batches of different samples differ, unless they are equal wherever they are read. A
few changed bytes in a large tensor are not noticed; that is not the purpose.

It has to be the same in another process, so no address, no ``hash()`` and no order of a set goes
in. None of the user's code runs. So some objects cannot be read: those of unknown extension types,
large sets, tensors that are not plain memory. Of these only the type goes in, and the fingerprint
is an odd number (`unseen`): equal ones are no evidence then.
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

from holdfast.introspection.attributes import attributes_of, is_a, own_one, slots_of
from holdfast.introspection.dtypes import AS_NUMPY
from holdfast.private_names import without_torch_function
from holdfast.worker.fingerprint_memory import MemoryReader

NO_BATCH: Final = 0  # for an answer without a batch; no fingerprint is this number
DROPPED_BATCH: Final = 1  # for a batch in which no sample is left
_RESERVED: Final = 2

NODES: Final = 96  # values that are read in all,
HEAVY: Final = 10  # of which an array counts as so many
ENTRIES: Final = (32, 16, 8)  # of a list or dict, by its depth
DEPTH: Final = 8
ATTRIBUTES: Final = 32  # of an object
TEXT: Final = 256  # bytes of a text up to which they go in as they are; longer ones as arrays
POINTS: Final = 16  # pixels of an image that are read
REMEMBERED: Final = 1000  # types and shapes

_DOUBLE = struct.Struct("<d")
_LONG = struct.Struct("<q")
_PLAIN = (  # types with a complete ``repr`` that is the same in every process
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
_NAMED = (type, FunctionType, BuiltinFunctionType, ModuleType)  # only the name goes in
_OBJECT = object.__basicsize__
_POINTER = struct.calcsize("P")
_heads: dict[tuple[torch.dtype, tuple[int, ...]], bytes] = {}
_anatomies: dict[int, _Anatomy] = {}


def fingerprint(batch: Any) -> int:
    """The same for the same batch, in this process and in others."""
    walk = _Walk()
    try:
        walk.value(batch, 0)
    except Exception:  # a tensor without memory, an image that was closed
        walk.unseen(type(batch))
    return walk.result()


def unseen(marks: Iterable[int]) -> int:
    """How many of these fingerprints are of batches of which something could not be read."""
    return sum(mark & 1 for mark in marks if mark >= _RESERVED)


def fingerprint_of_error(error: BaseException) -> int:
    """For an exception in place of a batch: its type. The text may contain an address or a time."""
    walk = _Walk()
    walk.add(b"!" + _name(type(error)))
    return walk.result()


def _name(kind: type) -> bytes:
    return f"{kind.__module__}.{kind.__qualname__}".encode(errors="replace")


class _Walk:
    """Reads one batch."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=8)
        self.add = self._hash.update
        self._memory = MemoryReader(self.add)
        self._nodes = NODES
        self._blind = False
        self._met: set[int] = set()  # objects, because there may be cycles

    def result(self) -> int:
        number = int.from_bytes(self._hash.digest(), "little") & ~1
        return max(_RESERVED, number) | self._blind

    def unseen(self, kind: type) -> None:
        """Something of this type is in the batch, and cannot be read."""
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
            with without_torch_function():
                self._tensor(value.detach().as_subclass(torch.Tensor))
        elif issubclass(kind, (int, float, str, bytes, bytearray)):
            self._scalar(value)
        elif issubclass(kind, (set, frozenset)):
            self._set(value, depth)
        elif issubclass(kind, UserDict):
            self._dict(own_one(value, "data"), depth)
        elif hasattr(kind, "__dataclass_fields__"):
            self._dataclass(value, kind, depth)
        elif _is_image(kind):
            self._image(value)
        else:
            self._rest(value, kind, depth)

    def _rest(self, value: Any, kind: type, depth: int) -> None:
        if issubclass(kind, _NAMED):
            name = value.__name__ if issubclass(kind, ModuleType) else value.__qualname__
            self._text(b"n", str(name).encode(errors="replace"))
        elif issubclass(kind, weakref.ref):
            return  # its object does not belong to the batch
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
        """A subclass: its value as the base type has it, without its own methods."""
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
            self._memory.flat(np.frombuffer(text, np.uint8))

    # -- containers and objects ------------------------------------------------------------

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
        """The sum of its entries: their order differs between processes."""
        base: Any = set if is_a(values, set) else frozenset
        length = base.__len__(values)
        self.add(_LONG.pack(length))
        if length > _entries(depth):
            self.unseen(type(values))  # another process would read other entries
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
        """Its attributes, read without its own methods."""
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
            array = tensor.numpy()  # raises if it is not plain memory of a type that NumPy knows
        except (TypeError, RuntimeError):
            self._unusual(tensor)
            return
        self.add(_head(tensor.dtype, array.shape))
        if array.size:
            self._read(array)

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
        if tensor.dtype not in AS_NUMPY:  # as another type of the same width
            tensor = tensor.view(_OF_WIDTH[tensor.element_size()])
        self._read(tensor.numpy())

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
            self._read(array)

    def _read(self, array: NDArray[Any]) -> None:
        self._nodes -= HEAVY
        self._memory.array(array)

    def _image(self, picture: Any) -> None:
        self._nodes -= HEAVY
        width, height = picture.size
        self._text(b"p", f"{picture.mode} {width} {height}".encode())
        if not width or not height:
            return
        for number in range(POINTS):
            x = (number * 37 % POINTS * width) // POINTS
            y = number * height // POINTS
            self.add(repr(picture.getpixel((x, y))).encode())


class _Anatomy(NamedTuple):
    """The parts of objects of a class."""

    kind: type  # so that it lives as long as this
    name: bytes
    attributes: Any  # reads the ``__dict__``, if there is one
    slots: list[tuple[str, Any]]
    hidden: bool  # whether there is memory that is no attribute, as in extension types


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


def _head(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """What goes in for all tensors of this type and shape, cached."""
    head = _heads.get((dtype, shape))
    if head is None:
        if len(_heads) >= REMEMBERED:
            _heads.clear()
        head = _heads[dtype, shape] = f"{dtype} {shape}".encode()
    return head


def _entries(depth: int) -> int:
    return ENTRIES[min(depth, len(ENTRIES) - 1)]


def _spread(length: int, depth: int) -> range:
    """Positions in a sequence of this length, spread over all of it."""
    return range(0, length, max(1, -(-length // _entries(depth))))


_OF_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def _is_image(kind: type) -> bool:
    module = sys.modules.get("PIL.Image")
    return module is not None and issubclass(kind, module.Image)
