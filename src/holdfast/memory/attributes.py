"""What is set on an object itself, in its ``__dict__`` or in ``__slots__``.

Read past properties, ``__getattr__`` and ``__getattribute__``: nothing of the user's runs because
somebody looks. Nor does a ``__class__`` that pretends, hence `is_a` in place of `isinstance`: an
object that is made when it is first used answers it with all that its making may do.
"""

from __future__ import annotations

from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

__all__ = ["attributes_of", "dict_of", "has_attributes", "is_a", "own", "own_one", "slots_of"]


def is_a(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """`isinstance`, without asking the value what it takes itself for."""
    return issubclass(type(value), kinds)


def own(value: Any) -> dict[str, Any]:
    """Names and values; those not set are left out."""
    found: dict[str, Any] = {}
    for name, member in slots_of(type(value)):
        try:
            found[name] = member.__get__(value)
        except AttributeError:
            continue  # not set
    return {**_inside(value), **found}


def own_one(value: Any, name: str) -> Any:
    """One of them, without a copy of all. KeyError if it is not set."""
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
    """Its ``__dict__`` itself; empty if there is none, or only one that a property makes up."""
    member = attributes_of(type(value))
    if member is None:
        return {}
    try:
        inside = member.__get__(value)
    except AttributeError:
        return {}
    return inside if is_a(inside, dict) else {}


def attributes_of(kind: type) -> Any:
    """What reads the ``__dict__`` of objects of this class; None if they have none, or only one
    that a property makes up."""
    members = (vars(base).get("__dict__") for base in kind.__mro__)
    member: Any = next((one for one in members if one is not None), None)
    return member if type(member) in (GetSetDescriptorType, MemberDescriptorType) else None


def has_attributes(kind: type) -> bool:
    """Whether objects of this class can have any."""
    return kind.__dictoffset__ != 0 or any(True for _ in slots_of(kind))


def slots_of(kind: type) -> list[tuple[str, Any]]:
    """The names in ``__slots__`` of a class and its bases, each with what reads it."""
    return [
        (name, member)
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if type(member) is MemberDescriptorType
    ]
