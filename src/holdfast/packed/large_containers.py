"""Large containers of Python objects that a dataset refers to: where they are, how large, and a
line for the log when forked workers are going to copy them.

Every start of a loader uses this, so it imports nothing that only `pack` needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.utils.data

from holdfast.autopsy.machine_facts import in_words
from holdfast.code_origin import module_of, well_known
from holdfast.introspection.attributes import has_attributes, is_a, own, own_one
from holdfast.packed.object_sizes import SAMPLE, measure

LARGE = 1 << 20
"""Smaller containers, in bytes, are not reported."""
_OBJECTS = 1000
_FEW = 64  # containers with up to this many entries are searched for large ones
_DEPTH = 4
_SOME = 50  # items from which `advice` estimates a size
_WORTH_A_WORD = 256 << 20  # bytes, in all workers together, that are reported on a small machine
_ALWAYS_WORTH_A_WORD = 4 << 30  # and on a large one
_CONTAINERS = (list, dict, tuple, set, frozenset, np.ndarray)


@dataclass(frozen=True)
class Location:
    """Where a container is found: an attribute of an object, or an entry of a small container."""

    path: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    # (class, attribute) for every step of the path: whose methods might change it
    chain: tuple[tuple[type, str], ...]


@dataclass(frozen=True)
class Candidate:
    """A large container, under all the paths that lead to it."""

    places: tuple[Location, ...]
    size: int

    @property
    def path(self) -> str:
        return " = ".join(place.path for place in self.places)

    @property
    def kind(self) -> str:
        return type(self.places[0].read()).__name__

    @property
    def items(self) -> int:
        return len(self.places[0].read())


def large_containers(
    dataset: Any, *, minimum: int = LARGE, sample: int = SAMPLE
) -> Iterator[Candidate]:
    """Containers of many Python objects that a dataset refers to, largest first. Their size is
    estimated from `sample` of their items."""
    by_identity: dict[int, list[Location]] = {}
    for place in _walk(dataset, "dataset", (), _DEPTH, set()):
        by_identity.setdefault(id(place.read()), []).append(place)
    found = []
    for places in by_identity.values():
        value = places[0].read()
        size, objects = measure(value, sample)
        if objects >= _OBJECTS and size >= minimum:
            found.append(Candidate(tuple(places), size))
    return iter(sorted(found, key=lambda one: -one.size))


def advice(dataset: Any, workers: int, available: int) -> str | None:
    """One line for the log, if forked workers will copy a good part of the available memory.

    Workers start only when this is done, so sizes are estimated from few items.
    """
    if type(dataset) is list:
        total, path, words = measure(dataset, _SOME)[0], "dataset", "PackedList(dataset)"
    else:
        found = list(large_containers(dataset, sample=_SOME))
        total, words = sum(one.size for one in found), "pack(dataset)"
        path = ", ".join(one.path for one in found[:3])
    if total * workers < max(_WORTH_A_WORD, min(available // 10, _ALWAYS_WORTH_A_WORD)):
        return None
    return (
        f"{in_words(total)} of Python objects in {path}: every worker that reads them copies them, "
        f"up to {in_words(total * workers)} for {workers} workers. holdfast.{words} before the "
        "loader is made keeps one copy for all (see docs/memory.md)"
    )


def _walk(
    thing: Any, path: str, chain: tuple[tuple[type, str], ...], depth: int, seen: set[int]
) -> Iterator[Location]:
    if id(thing) in seen:
        return
    seen.add(id(thing))
    for name in own(thing):
        steps = (*chain, (type(thing), name))
        place = _attribute(thing, name, f"{path}.{name}", steps)
        yield from _look_into(place, depth, seen)


def _look_into(place: Location, depth: int, seen: set[int]) -> Iterator[Location]:
    value = place.read()
    if is_a(value, _CONTAINERS):
        inner = list(_entries(value, place))
        if not inner:
            if not is_a(value, np.ndarray) or (value.dtype == object and value.ndim == 1):
                yield place
            return
        for entry in inner:
            if depth:
                yield from _look_into(entry, depth - 1, seen)
    elif depth and _is_walkable(value):
        yield from _walk(value, place.path, place.chain, depth - 1, seen)


def _entries(value: Any, place: Location) -> Iterator[Location]:
    """Entries of a small container that may themselves be large, or hold large ones."""
    if type(value) not in (list, dict, tuple) or not 0 < len(value) <= _FEW:
        return
    keys = list(value) if is_a(value, dict) else range(len(value))
    if any(is_a(value[key], _CONTAINERS) or _is_walkable(value[key]) for key in keys):
        for key in keys:
            yield _entry(value, key, f"{place.path}[{key!r}]", place.chain)


def _is_walkable(value: Any) -> bool:
    """Whether it is an object of a user's class with attributes: a dataset, an index, settings."""
    if any(module_of(base).startswith("holdfast.") for base in type(value).__mro__):
        return False  # a packed container of the user's own kind
    if is_a(value, torch.utils.data.Dataset):
        return True
    if is_a(value, (type, ModuleType, torch.Tensor, torch.nn.Module)) or callable(value):
        return False
    return has_attributes(type(value)) and not well_known(module_of(type(value)))


def _attribute(owner: Any, name: str, path: str, chain: tuple[tuple[type, str], ...]) -> Location:
    return Location(
        path, lambda: own_one(owner, name), lambda value: setattr(owner, name, value), chain
    )


def _entry(owner: Any, key: Any, path: str, chain: tuple[tuple[type, str], ...]) -> Location:
    def write(value: Any) -> None:
        owner[key] = value

    return Location(path, lambda: owner[key], write, chain)
