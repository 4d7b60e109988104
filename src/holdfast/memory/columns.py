"""Python values as columns of raw memory, and back.

A list of a million small objects is a million headers with reference counts; the same values side
by side in a few arrays have none. `encode` looks at what the values are and picks a form:

* numbers of one type: an array in the smallest width that holds them;
* strings, bytes, paths: one blob and the offset of each;
* few distinct values: each once, and a number per item;
* tuples, lists and dicts of one shape: a column per position or key (rows of numbers: one array);
* tuples and lists of different lengths: all elements in one column, and the offset of each row;
* arrays and tensors: their raw bytes and shapes;
* mixtures: a column per kind, and for each item its column and the position in it;
* anything else: pickled, one by one.

Every form is described by a plain tuple (a *plan*, which is pickled along) and read through two
functions: `get` for one value and `many` for a run of them. Values are made anew at each access:
equal to the original and of the same type, but never the same object twice.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import PosixPath, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast.memory.codec import AS_NUMPY
from holdfast.memory.sealed import Writer

__all__ = ["Column", "encode", "pickled_items", "reader"]

Plan = tuple[Any, ...]

_DEPTH = 8  # values nested deeper than this, and cycles, are pickled
_WIDE = 64  # more positions or keys than this do not get a column each
_KINDS = 16  # more shapes of dicts than this in one column are stored as pairs
_CACHED = 4096  # up to this many repeated values are kept as objects after the first access
_BLOCK = 1 << 16  # items per write
_PATHS: dict[str, Callable[[str], Any]] = {"PosixPath": PosixPath, "PurePosixPath": PurePosixPath}


class Column(NamedTuple):
    """How to read a column: the value at a position, or the values of a range."""

    get: Callable[[int], Any]
    many: Callable[[int, int], list[Any]]


# -- writing ------------------------------------------------------------------------------


def encode(items: Sequence[Any], writer: Writer, depth: int = 0) -> Plan:
    """Write `items`; returns the plan to read them by."""
    kinds = _kinds(items, depth)
    groups: dict[Any, list[Any]] = {}
    for kind, item in zip(kinds, items, strict=True):
        groups.setdefault(kind, []).append(item)
    if len(groups) > 1:
        return _encode_mixture(kinds, groups, writer, depth)
    for kind in groups:
        return _encode_kind(kind, items, writer, depth)
    return ("nothing",)


def pickled_items(plan: Plan) -> int:
    """How many values found no better form than pickle."""
    count = plan[1] if plan[0] == "pickled" else 0
    for part in plan[1:]:
        if isinstance(part, tuple):
            if part and isinstance(part[0], str):
                count += pickled_items(part)
            else:
                count += sum(pickled_items(one) for one in part if _is_plan(one))
    return int(count)


def _is_plan(part: Any) -> bool:
    return isinstance(part, tuple) and bool(part) and isinstance(part[0], str)


def _kinds(items: Sequence[Any], depth: int) -> list[Any]:
    types = set(map(type, items))
    if len(types) == 1:
        only = types.pop()
        if only in _SIMPLE:
            return [only.__name__] * len(items)
    kinds = [_kind(item, depth) for item in items]
    shapes = {kind for kind in kinds if kind[0] == "dict"}
    if len(shapes) > _KINDS:
        kinds = ["pairs" if kind in shapes else kind for kind in kinds]
    if len(set(kinds)) > 255:
        return ["pickled"] * len(items)
    return kinds


_SIMPLE = (float, bool, str, bytes, type(None))


def _kind(item: Any, depth: int) -> Any:
    kind: Any = type(item)
    if kind is int:
        return "int" if -(1 << 63) <= item < 1 << 63 else "pickled"
    if kind in _SIMPLE:
        return kind.__name__
    if isinstance(item, np.generic):
        return ("scalar", item.dtype.str) if _is_plain(item.dtype) else "pickled"
    if kind is np.ndarray:
        return _kind_of_array(item)
    if kind is torch.Tensor:
        return _kind_of_tensor(item)
    if kind is PosixPath or kind is PurePosixPath:
        return ("path", kind.__name__)
    if depth >= _DEPTH:
        return "pickled"
    if kind is tuple or kind is list:
        return kind.__name__
    if isinstance(item, tuple) and hasattr(kind, "_make") and hasattr(kind, "_fields"):
        return ("named", kind) if _is_importable(kind) else "pickled"
    if kind is dict:
        if len(item) <= _WIDE and all(type(key) is str for key in item):
            return ("dict", tuple(item))
        return "pairs"
    return "pickled"


def _is_importable(kind: type) -> bool:
    try:
        return pickle.loads(pickle.dumps(kind)) is kind
    except (pickle.PicklingError, AttributeError, ImportError):
        return False


def _is_plain(dtype: np.dtype[Any]) -> bool:
    """Whether ``dtype.str`` describes it completely, and its elements are plain bytes."""
    return dtype.kind in "biufcmM" and np.dtype(dtype.str) == dtype and dtype.metadata is None


def _kind_of_array(item: np.ndarray[Any, Any]) -> Any:
    if _is_plain(item.dtype) and item.flags.c_contiguous:
        return ("array", item.dtype.str, item.ndim)
    return "pickled"


def _kind_of_tensor(item: torch.Tensor) -> Any:
    ordinary = (
        item.is_cpu
        and item.layout is torch.strided
        and not item.is_nested
        and not item.is_quantized
        and item.dtype in AS_NUMPY
        and not item.requires_grad
        and not item.is_conj()
        and not item.is_neg()
        and item.is_contiguous()
        and not getattr(item, "__dict__", None)
    )
    return ("tensor", AS_NUMPY[item.dtype].str, item.ndim) if ordinary else "pickled"


def _encode_mixture(
    kinds: list[Any], groups: dict[Any, list[Any]], writer: Writer, depth: int
) -> Plan:
    numbers = {kind: number for number, kind in enumerate(groups)}
    which = array("B", [numbers[kind] for kind in kinds])
    seen = [0] * len(groups)
    where = array("Q")
    for number in which:
        where.append(seen[number])
        seen[number] += 1
    return (
        "mixture",
        _numbers(which, writer),
        _numbers(where, writer),
        tuple(_encode_kind(kind, group, writer, depth) for kind, group in groups.items()),
    )


def _encode_kind(kind: Any, items: Sequence[Any], writer: Writer, depth: int) -> Plan:
    name = kind[0] if isinstance(kind, tuple) else kind
    if name == "NoneType":
        return ("none",)
    if name == "int":
        return ("numbers", *_numbers(array("q", items), writer))
    if name == "float":
        return ("numbers", *_numbers(array("d", items), writer))
    if name == "bool":
        return ("numbers", "?", *_numbers(array("B", items), writer)[1:])
    if name == "scalar":
        return ("scalars", kind[1], writer.write(_raw(np.array(items, kind[1]))), len(items))
    repeated = _encode_repeated(kind, items, writer, depth)
    if repeated is not None:
        return repeated
    if name in ("str", "bytes", "path", "pickled"):
        return _encode_texts(kind, items, writer)
    if name in ("array", "tensor"):
        return _encode_arrays(kind, items, writer)
    if name == "dict":
        keys = kind[1]
        columns = [encode([item[key] for item in items], writer, depth + 1) for key in keys]
        return ("dicts", keys, tuple(columns))
    if name == "pairs":
        names = [list(item) for item in items]
        values = [list(item.values()) for item in items]
        return (
            "pairs",
            _encode_rows("list", names, writer, depth),
            _encode_rows("list", values, writer, depth),
        )
    return _encode_rows(kind, items, writer, depth)


def _encode_repeated(kind: Any, items: Sequence[Any], writer: Writer, depth: int) -> Plan | None:
    """Each of a few distinct values once. Texts are compared by value, others by identity."""
    keys: Iterable[Any] = items if kind in ("str", "bytes") else map(id, items)
    most = len(items) // 4
    numbers: dict[Any, int] = {}
    distinct: list[Any] = []
    codes = array("Q")
    for key, item in zip(keys, items, strict=True):
        code = numbers.setdefault(key, len(distinct))
        if code == len(distinct):
            if code >= most:
                return None
            distinct.append(item)
        codes.append(code)
    return (
        "repeated",
        _numbers(codes, writer),
        _encode_kind(kind, distinct, writer, depth),
        len(distinct) if kind in ("str", "bytes") else 0,
    )


def _encode_texts(kind: Any, items: Sequence[Any], writer: Writer) -> Plan:
    to_bytes: Callable[[Any], bytes]
    errors = "strict"
    if kind == "bytes":
        to_bytes = bytes
    elif kind == "pickled":
        to_bytes = _pickle
    else:
        errors = _errors(items)

        def to_bytes(item: Any) -> bytes:
            return str(item).encode("utf-8", errors)

    offsets = array("Q", [writer.write(b"")])
    for first in range(0, len(items), _BLOCK):
        pieces = [to_bytes(item) for item in items[first : first + _BLOCK]]
        writer.write(b"".join(pieces), align=1)
        for piece in pieces:
            offsets.append(offsets[-1] + len(piece))
    head: Plan = ("pickled", len(items)) if kind == "pickled" else ("texts", kind, errors)
    return (*head, _numbers(offsets, writer))


def _errors(items: Sequence[Any]) -> str:
    """The error handler to encode with. File names that are not valid text hold lone surrogates,
    which UTF-8 encodes only with ``surrogatepass``."""
    try:
        for item in items:
            str(item).encode()
    except UnicodeEncodeError:
        return "surrogatepass"
    return "strict"


def _pickle(item: Any) -> bytes:
    return pickle.dumps(item, 5)


def _encode_arrays(kind: Any, items: Sequence[Any], writer: Writer) -> Plan:
    name, dtype, ndim = kind
    shapes = array("q")
    offsets = array("Q")
    base = None
    for item in items:
        plain = item.numpy() if name == "tensor" else item
        at = writer.write(_raw(plain))
        base = at if base is None else base
        offsets.append(at - base)
        shapes.extend(plain.shape)
    return (
        "arrays",
        name,
        dtype,
        ndim,
        base or 0,
        _numbers(offsets, writer),
        _numbers(shapes, writer),
    )


def _encode_rows(kind: Any, rows: Sequence[Any], writer: Writer, depth: int) -> Plan:
    """Tuples or lists: a column per position, or all elements in one."""
    lengths = set(map(len, rows))
    types = {type(element) for row in rows for element in row}
    same = len(lengths) == 1
    width = next(iter(lengths)) if same else 0
    numbers = types in ({int}, {float}, {bool})
    if same and not numbers and 0 < width <= _WIDE:
        columns = [encode([row[at] for row in rows], writer, depth + 1) for at in range(width)]
        return ("records", kind, tuple(columns))
    elements = encode([element for row in rows for element in row], writer, depth + 1)
    if same:
        return ("rows", kind, width, None, elements)
    offsets = array("Q", [0])
    for row in rows:
        offsets.append(offsets[-1] + len(row))
    return ("rows", kind, 0, _numbers(offsets, writer), elements)


_WIDTHS = {False: "BHIQ", True: "bhiq"}


def _numbers(values: array[Any], writer: Writer) -> Plan:
    """Whole numbers in the smallest width that holds them all; floats as they are."""
    code: str = values.typecode
    if code != "d" and len(values):
        data = np.frombuffer(values, code)
        low, high = int(data.min()), int(data.max())
        for code in _WIDTHS[low < 0]:
            limits = np.iinfo(np.dtype(code))
            if limits.min <= low and high <= limits.max:
                break
        return (code, writer.write(_raw(data.astype(code))), len(values))
    return (code, writer.write(values), len(values))


def _raw(data: np.ndarray[Any, Any]) -> Any:
    return data.reshape(-1).view(np.uint8)


# -- reading ------------------------------------------------------------------------------


def reader(plan: Plan, memory: memoryview) -> Column:
    """How to read what was written according to `plan`."""
    return _READERS[plan[0]](memory, *plan[1:])


def _cast(memory: memoryview, code: str, at: int, count: int) -> memoryview:
    nbytes = count * np.dtype(code).itemsize
    return memory[at : at + nbytes].cast(code)  # type: ignore[call-overload,no-any-return]


def _nothing(memory: memoryview) -> Column:
    return Column(lambda _: None, lambda first, end: [])


def _nones(memory: memoryview) -> Column:
    return Column(lambda _: None, lambda first, end: [None] * (end - first))


def _read_numbers(memory: memoryview, code: str, at: int, count: int) -> Column:
    cells = _cast(memory, code, at, count)
    return Column(cells.__getitem__, lambda first, end: cells[first:end].tolist())


def _scalars(memory: memoryview, dtype: str, at: int, count: int) -> Column:
    cells = np.frombuffer(memory, dtype, count, at)
    return Column(cells.__getitem__, lambda first, end: list(cells[first:end]))


def _repeated(memory: memoryview, codes: Plan, values: Plan, constants: int) -> Column:
    cells = _cast(memory, *codes)
    column = reader(values, memory)
    if not 0 < constants <= _CACHED:
        value = column.get
        return Column(
            lambda at: value(cells[at]),
            lambda first, end: [value(code) for code in cells[first:end]],
        )
    table: list[Any] = []

    def get(at: int) -> Any:
        try:
            return table[cells[at]]
        except IndexError:
            if table:
                raise
            table[:] = column.many(0, constants)  # one copy per process, and small
            return table[cells[at]]

    return Column(get, lambda first, end: [get(at) for at in range(first, end)])


def _texts(memory: memoryview, kind: Any, errors: str, offsets: Plan) -> Column:
    raw: Any = memory.obj  # bytes or mmap: their slices are bytes, in half the time of a view's
    starts = _cast(memory, *offsets)
    if kind == "bytes":
        return _pieces(raw, starts, None)
    if kind != "str":
        path = _PATHS[kind[1]]
        return _pieces(raw, starts, lambda piece: path(piece.decode("utf-8", errors)))

    def get(at: int) -> str:
        return raw[starts[at] : starts[at + 1]].decode()  # type: ignore[no-any-return]

    def get_wild(at: int) -> str:
        return raw[starts[at] : starts[at + 1]].decode("utf-8", errors)  # type: ignore[no-any-return]

    one = get if errors == "strict" else get_wild

    def many(first: int, end: int) -> list[Any]:
        bounds = starts[first : end + 1].tolist()
        if not bounds:
            return []
        base = bounds[0]
        text = raw[base : bounds[-1]].decode("utf-8", errors)
        if text.isascii():  # then positions in the text are positions in the bytes
            return [text[start - base : stop - base] for start, stop in pairwise(bounds)]
        return [one(at) for at in range(first, end)]

    return Column(one, many)


def _pickled(memory: memoryview, count: int, offsets: Plan) -> Column:
    return _pieces(memory.obj, _cast(memory, *offsets), pickle.loads)


def _pieces(raw: Any, starts: memoryview, make: Callable[[Any], Any] | None) -> Column:
    if make is None:

        def get(at: int) -> Any:
            return raw[starts[at] : starts[at + 1]]
    else:

        def get(at: int) -> Any:
            return make(raw[starts[at] : starts[at + 1]])

    return Column(get, lambda first, end: [get(at) for at in range(first, end)])


def _arrays(
    memory: memoryview, name: str, dtype: str, ndim: int, base: int, offsets: Plan, shapes: Plan
) -> Column:
    starts = _cast(memory, *offsets)
    sizes = _cast(memory, *shapes)
    kind = np.dtype(dtype)

    def get(at: int) -> Any:
        shape = tuple(sizes[at * ndim : (at + 1) * ndim])
        value: Any = np.ndarray(shape, kind, memory, base + starts[at]).copy()
        return torch.from_numpy(value) if name == "tensor" else value

    return Column(get, lambda first, end: [get(at) for at in range(first, end)])


def _dicts(memory: memoryview, keys: tuple[str, ...], columns: tuple[Plan, ...]) -> Column:
    parts = [reader(plan, memory) for plan in columns]
    named = [(key, part.get) for key, part in zip(keys, parts, strict=True)]

    def many(first: int, end: int) -> list[Any]:
        if not parts:
            return [{} for _ in range(first, end)]
        rows = zip(*[part.many(first, end) for part in parts], strict=True)
        return [dict(zip(keys, row, strict=True)) for row in rows]

    return Column(lambda at: {key: get(at) for key, get in named}, many)


def _pairs(memory: memoryview, keys: Plan, values: Plan) -> Column:
    names, things = reader(keys, memory), reader(values, memory)

    def get(at: int) -> dict[Any, Any]:
        return dict(zip(names.get(at), things.get(at), strict=True))

    return Column(get, lambda first, end: [get(at) for at in range(first, end)])


def _factory(kind: Any) -> Callable[[Iterable[Any]], Any]:
    if kind == "tuple":
        return tuple
    if kind == "list":
        return list
    make: Callable[[Iterable[Any]], Any] = kind[1]._make
    return make


def _records(memory: memoryview, kind: Any, columns: tuple[Plan, ...]) -> Column:
    parts = [reader(plan, memory) for plan in columns]
    gets = [part.get for part in parts]
    make = _factory(kind)

    def many(first: int, end: int) -> list[Any]:
        return [make(row) for row in zip(*[part.many(first, end) for part in parts], strict=True)]

    if kind == "tuple" and len(gets) == 2:  # (path, label), the commonest record there is
        one, other = gets
        return Column(lambda at: (one(at), other(at)), many)
    return Column(lambda at: make([get(at) for get in gets]), many)


def _rows(memory: memoryview, kind: Any, width: int, offsets: Plan | None, plan: Plan) -> Column:
    elements = reader(plan, memory).many
    make = None if kind == "list" else _factory(kind)
    starts = None if offsets is None else _cast(memory, *offsets)

    def get(at: int) -> Any:
        if starts is None:
            row = elements(at * width, at * width + width)
        else:
            row = elements(starts[at], starts[at + 1])
        return row if make is None else make(row)

    return Column(get, lambda first, end: [get(at) for at in range(first, end)])


def _mixture(memory: memoryview, which: Plan, where: Plan, columns: tuple[Plan, ...]) -> Column:
    kinds = _cast(memory, *which)
    places = _cast(memory, *where)
    gets = [reader(plan, memory).get for plan in columns]

    def get(at: int) -> Any:
        return gets[kinds[at]](places[at])

    return Column(get, lambda first, end: [get(at) for at in range(first, end)])


_READERS: dict[str, Callable[..., Column]] = {
    "nothing": _nothing,
    "none": _nones,
    "numbers": _read_numbers,
    "scalars": _scalars,
    "repeated": _repeated,
    "texts": _texts,
    "pickled": _pickled,
    "arrays": _arrays,
    "dicts": _dicts,
    "pairs": _pairs,
    "records": _records,
    "rows": _rows,
    "mixture": _mixture,
}
