"""Python values as columns of raw memory: which form they get, and how they are written.

A list of a million small objects is a million headers with reference counts; the same values side
by side in a few arrays have none. `encode` picks a form for the values:

* numbers of one type: an array in the smallest width that holds them;
* strings, bytes, paths: one blob and the offset of each;
* few distinct values: each once, and a number per item;
* tuples, lists and dicts of one shape: a column per position or key (rows of numbers: one array);
* tuples and lists of different lengths: all elements in one column, and the offset of each row;
* arrays and tensors: their raw bytes and shapes;
* mixtures: a column per kind, and for each item its column and the position in it;
* anything else: pickled, one by one.

Every form is described by a plain tuple, its *plan*, which is pickled along. `column_reader` reads
the values by it.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import PosixPath, PurePosixPath
from typing import Any

import numpy as np
import torch

from holdfast.introspection.dtypes import AS_NUMPY
from holdfast.packed.sealed import Writer

Plan = tuple[Any, ...]

_DEPTH = 8  # values nested deeper than this, and cycles, are pickled
_WIDE = 64  # more positions or keys than this do not get a column each
_KINDS = 16  # more shapes of dicts than this in one column are stored as pairs
_BLOCK = 1 << 16  # items per write


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
