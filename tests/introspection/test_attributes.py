"""Reading the attributes of objects runs none of their code."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest

from holdfast.introspection.attributes import is_a, own


class Touched(Exception):
    pass


def touch(*_: object) -> NoReturn:
    raise Touched


class Lazy:
    """Creates itself when it is first used, which fails here."""

    __class__ = property(touch)  # type: ignore[assignment]
    __getattr__ = __getattribute__ = touch


class MadeUp:
    __dict__ = property(touch)  # type: ignore[assignment]


class Slotted:
    __slots__ = ("one", "other")


class OddDict(dict[str, Any]):
    __iter__ = keys = items = __getitem__ = touch  # type: ignore[assignment]


def test_what_an_object_pretends_to_be_is_not_asked() -> None:
    with pytest.raises(Touched):
        isinstance(Lazy(), dict)
    assert is_a(Lazy(), Lazy)
    assert not is_a(Lazy(), (dict, list))


def test_attributes_are_read_past_everything() -> None:
    lazy = Lazy()
    object.__setattr__(lazy, "kept", [1])
    assert own(lazy) == {"kept": [1]}
    assert own(MadeUp()) == {}
    slotted = Slotted()
    slotted.one = 1
    assert own(slotted) == {"one": 1}
    assert own(7) == {}
    assert own(Slotted) == {}, "a class's is no dict of its own to copy"


def test_a_dict_of_the_users_is_copied_without_its_methods() -> None:
    value = type("Value", (), {})()
    value.__dict__ = OddDict(kept=1)
    assert own(value) == {"kept": 1}
