"""What identifies a sample: in a run, by its index; in a file, by text."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

Key = Hashable


def key_of(index: Any) -> Key:
    """A hashable key that identifies a sample in this run: equal for equal indices.

    Numbers, text, bytes and lists and tuples of them have a number or text as key, the same in
    every run and in a file. Other objects are compared by their own ``__eq__`` if they are
    hashable.
    """
    if type(index) is int:
        return index
    if _is_plain(index):
        return _written(index)
    if isinstance(index, (list, tuple)):
        return (type(index).__name__, *map(key_of, index))
    if isinstance(index, _Described) or not isinstance(index, Hashable):
        description = description_of(index)
        return _Same(index) if description is None else description
    try:
        hash(index)
    except TypeError:  # a frozen dataclass that holds a list
        return _Same(index)
    return ("object", index)


def description_of(index: Any) -> int | str | None:
    """The key of a sample in a file; None for an object that its ``repr`` does not identify."""
    return index if type(index) is int else _written(index) if _is_told(index) else None


class _Same:
    """An object that can only be compared by identity."""

    def __init__(self, it: Any) -> None:
        self._it = it  # kept alive, or another could take its address

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._it is self._it

    def __hash__(self) -> int:
        return id(self._it)


def _is_plain(index: Any) -> bool:
    if isinstance(index, (list, tuple)):
        return all(map(_is_plain, index))
    return index is None or isinstance(index, (bool, str, int, float, bytes)) or _is_number(index)


def _is_number(index: Any) -> bool:
    """NumPy's numbers and tensors of one element."""
    return getattr(index, "ndim", None) == 0 and callable(getattr(index, "item", None))


def _is_told(index: Any) -> bool:
    if isinstance(index, (list, tuple)):
        return all(map(_is_told, index))
    if isinstance(index, _Described):
        return index.identified
    return _is_plain(index) or _identifies(repr(index), index)


def _identifies(text: str, index: Any) -> bool:
    """Whether another object with this ``repr`` is likely to mean the same sample."""
    address = id(index)
    return not (
        "..." in text
        or _ADDRESS.search(text)
        or f"{address:x}" in text.lower()
        or str(address) in text
    )


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def _written(index: Any) -> int | str:
    as_json = encoded(index)
    return as_json if type(as_json) is int else json.dumps(as_json, sort_keys=True)


def encoded(index: Any) -> Any:
    """An index as JSON. Tuples, bytes and other objects become an object that names the type."""
    if index is None or isinstance(index, (bool, str, int, float)):
        return index
    if isinstance(index, bytes):
        return {"bytes": index.hex()}
    if isinstance(index, list):
        return [encoded(one) for one in index]
    if isinstance(index, tuple):
        return {"tuple": [encoded(one) for one in index]}
    if _is_number(index):
        return encoded(index.item())
    if _is_told(index):
        return {"repr": repr(index)}
    return {"object": _ADDRESS.sub("", repr(index))}  # only for human readers


def decoded(as_json: Any) -> Any:
    """The index that `encoded` wrote; ValueError if it is none."""
    if isinstance(as_json, list):
        return [decoded(one) for one in as_json]
    if isinstance(as_json, dict):
        for word, value in as_json.items():
            if word == "tuple" and isinstance(value, list):
                return tuple(decoded(one) for one in value)
            if word == "bytes" and isinstance(value, str):
                return bytes.fromhex(value)
            if word in ("repr", "object") and isinstance(value, str):
                return _Described(value, word == "repr")
        raise ValueError(f"its index is {as_json!r}")
    return as_json


@dataclass(frozen=True, slots=True, repr=False)
class _Described:
    """An index that JSON cannot hold, with its description, which may identify it or not."""

    text: str
    identified: bool

    def __repr__(self) -> str:
        return self.text
