"""The attributes of an object itself, in its ``__dict__`` or in ``__slots__``.

They are read without properties, ``__getattr__`` and ``__getattribute__``, so that none of the
user's code runs. `is_a` stands in for `isinstance` because that may run a ``__class__`` property: a
lazy object would create itself, with all that this may do, to answer it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any


def is_a(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """`isinstance`, without reading the value's ``__class__``."""
    return issubclass(type(value), kinds)


def weakly(value: Any) -> Callable[[], Any]:
    """Gives the value, or None once nothing else refers to it. A value that cannot be referred to
    weakly, such as a list, is kept."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def own(value: Any) -> dict[str, Any]:
    """Names and values of its attributes; slots that are not set are left out."""
    found: dict[str, Any] = {}
    for name, member in slots_of(type(value)):
        try:
            found[name] = member.__get__(value)
        except AttributeError:
            continue  # not set
    return {**_inside(value), **found}


def own_one(value: Any, name: str) -> Any:
    """The value of one attribute, without a copy of all. KeyError if it is not set."""
    for slot, member in slots_of(type(value)):
        if slot == name:
            try:
                return member.__get__(value)
            except AttributeError:
                break  # not set
    return dict.__getitem__(dict_of(value), name)


def _inside(value: Any) -> dict[str, Any]:
    """A copy of its ``__dict__``."""
    return dict(list(dict.items(dict_of(value))))


def dict_of(value: Any) -> dict[str, Any]:
    """Its ``__dict__`` itself; empty if there is none, or if ``__dict__`` is a property."""
    member = attributes_of(type(value))
    if member is None:
        return {}
    try:
        inside = member.__get__(value)
    except AttributeError:
        return {}
    return inside if is_a(inside, dict) else {}


def attributes_of(kind: type) -> Any:
    """The descriptor that reads the ``__dict__`` of objects of this class; None if they have none,
    or if ``__dict__`` is a property."""
    members = (vars(base).get("__dict__") for base in kind.__mro__)
    member: Any = next((one for one in members if one is not None), None)
    return member if type(member) in (GetSetDescriptorType, MemberDescriptorType) else None


def has_attributes(kind: type) -> bool:
    """Whether objects of this class can have attributes."""
    return kind.__dictoffset__ != 0 or any(True for _ in slots_of(kind))


def slots_of(kind: type) -> list[tuple[str, Any]]:
    """The names in ``__slots__`` of a class and its bases, each with its descriptor."""
    return [
        (name, member)
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if type(member) is MemberDescriptorType
    ]
