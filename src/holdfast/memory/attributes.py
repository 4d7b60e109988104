"""What is set on an object itself, in its ``__dict__`` or in ``__slots__``.

Read past properties, ``__getattr__`` and ``__getattribute__``: nothing of the user's runs because
somebody looks.
"""

from __future__ import annotations

from types import MemberDescriptorType
from typing import Any

__all__ = ["has_attributes", "own"]


def own(value: Any) -> dict[str, Any]:
    """Names and values; those not set are left out."""
    found: dict[str, Any] = {}
    for name, member in _slots(type(value)):
        try:
            found[name] = member.__get__(value)
        except AttributeError:
            continue  # not set
    try:
        inside = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return found
    return {**inside, **found} if issubclass(type(inside), dict) else found


def has_attributes(kind: type) -> bool:
    """Whether objects of this class can have any."""
    return kind.__dictoffset__ != 0 or any(True for _ in _slots(kind))


def _slots(kind: type) -> list[tuple[str, Any]]:
    return [
        (name, member)
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if type(member) is MemberDescriptorType
    ]
