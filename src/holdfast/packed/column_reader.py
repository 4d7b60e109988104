"""Reading values that `column_writer` has written.

A column is read through two functions: `get` for one value and `many` for a run of them. Values are
made anew at each access: equal to the original and of the same type, but never the same object
twice.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import PosixPath, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast.packed.column_writer import Plan

_CACHED = 4096  # up to this many repeated values are kept as objects after the first access
_PATHS: dict[str, Callable[[str], Any]] = {"PosixPath": PosixPath, "PurePosixPath": PurePosixPath}


class Column(NamedTuple):
    """How to read a column: the value at a position, or the values of a range."""

    get: Callable[[int], Any]
    many: Callable[[int, int], list[Any]]


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
