"""What a dataset refers to: all objects within a few steps of attributes and small containers.

This includes what its functions hold (variables of closures, bound and default arguments) and the
attributes of its classes; and, on request, the globals that the user's own functions name. None of
the user's code runs: no property, no ``__getattr__``, no ``__class__``, no ``__repr__`` of a key.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from types import (
    BuiltinMethodType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any, Final

import numpy as np
import torch
import torch.utils.data

from holdfast.code_origin import module_of, of_file, well_known
from holdfast.introspection.attributes import attributes_of, dict_of, is_a, slots_of

_DEPTH = 5
WIDTH = 256
"""How many entries of a container are visited."""
_PLAIN = (type(None), str, bytes, int, float, complex, type, ModuleType)
_NO_PARTS = (np.ndarray, np.generic, torch.Tensor)
_LEAVES: Final[frozenset[Any]] = frozenset(
    {type(None), str, bytes, bytearray, int, bool, float, complex, ModuleType}
    | {np.ndarray, torch.Tensor, torch.Size, torch.dtype, torch.nn.Parameter, range, slice}
)
_NONE: Final[frozenset[type]] = frozenset()
_SHAPES: Final[tuple[Any, ...]] = (
    dict,
    list,
    deque,
    tuple,
    FunctionType,
    MethodType,
    BuiltinMethodType,
    functools.partial,
)
KEYS: Final = (str, bytes, int, float, complex, bool, type(None))
"""Classes of keys that can be looked up and shown without any of the user's code."""
_LOOSE: Final = object()  # marks a part that its owner cannot exchange for another


class Part:
    """One object, and how it was reached. The label is text, or the number and key of an entry in a
    container: most labels are never read, and formatting all would take longer than the walk."""

    __slots__ = ("_label", "holder", "key", "owner", "value")

    def __init__(
        self, owner: Part | None, label: Any, value: Any, holder: Any = _LOOSE, key: Any = None
    ) -> None:
        self.owner = owner
        self._label = label
        self.value = value
        self.holder = holder
        self.key = key

    @property
    def label(self) -> str:
        label = self._label
        if type(label) is str:
            return label
        number, key = label
        return f"[{key!r}]" if type(key) in KEYS else f"[<key {number}>]"

    @property
    def path(self) -> str:
        return self.label if self.owner is None else self.owner.path + self.label

    @property
    def exchangeable(self) -> bool:
        """Whether its owner may put another object in its place."""
        return self.holder is not _LOOSE

    def now(self) -> Any:
        """What its owner has in this place now. LookupError or AttributeError if nothing."""
        holder = self.holder
        kind = type(holder)
        if holder is _LOOSE:
            return self.value
        if is_a(holder, dict) and type(self.key) not in KEYS:
            return _by_identity(holder, self.key)
        if kind is dict or kind is list or kind is MappingProxyType:
            return holder[self.key]
        if kind is CellType:
            try:
                return holder.cell_contents
            except ValueError:
                raise LookupError("not bound") from None
        if is_a(holder, dict):
            return dict.__getitem__(holder, self.key)
        if is_a(holder, list):
            return list.__getitem__(holder, self.key)
        if is_a(holder, deque):
            return deque.__getitem__(holder, self.key)
        return self.key.__get__(holder)  # one of its ``__slots__``


def _by_identity(holder: Any, key: Any) -> Any:
    """What a dict has for this very key, whose class defines a hash perhaps. LookupError if
    nothing, or if it is not among the entries that are visited."""
    for one, entry in list(islice(dict.items(holder), WIDTH)):
        if one is key:
            return entry
    raise LookupError("not there any more")


class _Kind:
    """What the walk needs to know of a class, computed once for all its objects."""

    __slots__ = ("attributes", "kind", "known", "looks_into", "shape", "slots")

    def __init__(self, kind: type, closed: tuple[type, ...]) -> None:
        self.kind = kind  # so that it lives as long as this
        self.looks_into = not issubclass(kind, closed)
        self.shape = next((shape for shape in _SHAPES if issubclass(kind, shape)), None)
        self.attributes = attributes_of(kind)
        self.slots = slots_of(kind)
        self.known = well_known(module_of(kind))


class _Kinds(dict[int, _Kind]):
    """By the class's identity: its metaclass may define a hash, and no user code may run."""

    def __init__(self, closed: tuple[type, ...]) -> None:
        self._closed = closed

    def of(self, value: Any) -> _Kind:
        kind = type(value)
        found = self.get(id(kind))
        if found is None:
            found = self[id(kind)] = _Kind(kind, self._closed)
        return found


def homes(dataset: Any) -> Iterator[type]:
    """The classes of this dataset and of datasets inside it, except torch's, NumPy's, Python's and
    ours."""
    seen: set[type] = set()
    for number, (_, value) in enumerate(parts(dataset)):
        if number == 0 or is_a(value, torch.utils.data.Dataset):
            for kind in type(value).__mro__:
                if kind not in seen and not well_known(module_of(kind)):
                    seen.add(kind)
                    yield kind


def parts(dataset: Any, *, named: bool = False) -> Iterator[tuple[str, Any]]:
    """Paths and values, depth first, beginning with the dataset itself. Each object appears once,
    plain values each time they are met. `named`: also the globals that the user's functions name.
    """
    yield from _deep(Part(None, "dataset", dataset), _DEPTH, set(), _Kinds(_NO_PARTS), named)


def _deep(
    part: Part, depth: int, seen: set[int], kinds: _Kinds, named: bool
) -> Iterator[tuple[str, Any]]:
    value = part.value
    if is_a(value, _PLAIN):
        yield part.path, value  # equal plain values may be one object
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    yield part.path, value
    if depth:
        for inner in _inside(part, kinds.of(value), seen, _NONE, named):
            yield from _deep(inner, depth - 1, seen, kinds, named)


def wide(
    roots: Iterable[tuple[str, Any]], *, depth: int, most: int, closed: tuple[type, ...]
) -> Iterator[Part]:
    """Objects within `depth` steps of the roots that are not numbers, text, arrays or the like, and
    globals that the user's own functions name. Breadth first, at most `most` objects. An object
    comes first by its shortest path, and again by others. Objects of the classes `closed` are not
    searched.

    The walk is bounded by a number, not by time, so two processes with the same dataset see the
    same.
    """
    seen: set[int] = set()
    queue = deque((Part(None, name, value), depth) for name, value in roots)
    kinds = _Kinds((*closed, *_PLAIN, *_NO_PARTS))
    while queue:
        part, left = queue.popleft()
        yield part
        value = part.value
        if not (left and most) or id(value) in seen:
            continue
        if not is_a(value, type):  # of which what its objects share is seen, and noted there
            seen.add(id(value))
        for inner in _inside(part, kinds.of(value), seen, _LEAVES, named=True):
            queue.append((inner, left - 1))
            most -= 1
            if not most:
                break


def _inside(
    part: Part, kind: _Kind, seen: set[int], without: frozenset[type], named: bool
) -> Iterator[Part]:
    """The parts of an object, except those whose exact class is in `without`."""
    if named and issubclass(kind.kind, type):  # a class by itself: one that functions name
        known = well_known(module_of(part.value))
        shared = () if known else _of_class(part.value, seen, named)
        yield from (one for one in shared if type(one.value) not in without)
    if not kind.looks_into:
        return
    value, shape = part.value, kind.shape
    if shape is not None:
        yield from _contents(part, value, shape, without, named)
    if kind.attributes is not None:
        inside = dict_of(value)
        for name, entry in list(dict.items(inside)):
            if type(entry) not in without:
                yield Part(part, f".{name}", entry, inside, name)
    for name, member in kind.slots:
        try:
            entry = member.__get__(value)
        except AttributeError:
            continue  # not set
        if type(entry) not in without:
            yield Part(part, f".{name}", entry, value, member)
    if not kind.known:
        for inner in _of_class(kind.kind, seen, named):
            if type(inner.value) not in without:
                yield inner


def _contents(
    part: Part, value: Any, shape: type, without: frozenset[type], named: bool
) -> Iterator[Part]:
    if shape is dict:
        for number, (key, entry) in enumerate(list(islice(dict.items(value), WIDTH))):
            if type(entry) not in without:
                yield Part(part, (number, key), entry, value, key)
    elif shape is list or shape is deque:
        for number, entry in enumerate(list(islice(shape.__iter__(value), WIDTH))):
            if type(entry) not in without:
                yield Part(part, (number, number), entry, value, number)
    elif shape is tuple:
        for number, entry in enumerate(islice(tuple.__iter__(value), WIDTH)):
            if type(entry) not in without:
                yield Part(part, (number, number), entry)
    elif shape is FunctionType:
        for inner in _of_function(part, "", value, named):
            if type(inner.value) not in without:
                yield inner
    elif shape is functools.partial:
        for name in ("func", "args", "keywords"):
            yield Part(part, f".{name}", getattr(functools.partial, name).__get__(value))
    else:  # a method
        yield Part(part, ".__self__", value.__self__)
        if shape is MethodType:
            yield Part(part, ".__func__", value.__func__)


def _of_function(owner: Part | None, path: str, function: Any, named: bool) -> Iterator[Part]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield Part(owner, f"{path}.<closure>.{name}", cell.cell_contents, cell)
        except ValueError:
            continue  # not bound yet
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for number, default in enumerate(defaults):
        yield Part(owner, f"{path}.<defaults>[{number}]", default)
    if named and _is_the_users(function):
        around = function.__globals__
        for name in _names(function.__code__):
            if name in around:
                yield Part(None, f"{around.get('__name__')}.{name}", around[name], around, name)


def _is_the_users(function: Any) -> bool:
    """Whether the user wrote it. The globals that libraries' functions name are left out: they are
    so many that the walk would end before it reaches the user's."""
    if function.__globals__.get("__name__") in ("__main__", "__mp_main__"):
        return True  # even if it was typed into an interpreter and is in no file
    return of_file(function.__code__.co_filename) == "user"


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if type(constant) is CodeType:
            yield from _names(constant)


def _of_class(kind: type, seen: set[int], named: bool) -> Iterator[Part]:
    """What all objects of a class share: its attributes, and what its methods hold."""
    for base in kind.__mro__:
        if id(base) in seen or well_known(module_of(base)):
            continue
        seen.add(id(base))
        inside = vars(base)
        for name, entry in list(inside.items()):
            function = _function_of(entry)
            path = f"{base.__qualname__}.{name}"
            if function is not None:
                yield from _of_function(None, path, function, named)
            elif not name.startswith("__") and not hasattr(type(entry), "__get__"):
                yield Part(None, path, entry, inside, name)


def _function_of(entry: Any) -> Any:
    """The function behind an attribute of a class; None if there is none."""
    if is_a(entry, (staticmethod, classmethod)):
        entry = entry.__func__
    elif is_a(entry, property):
        entry = entry.fget
    return entry if is_a(entry, FunctionType) else None
