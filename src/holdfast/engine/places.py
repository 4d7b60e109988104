"""What is where before something is tried, so that what it has made can be taken away again.

A replacement sometimes makes a sample or a batch that does not count: a suspected sample by itself,
or a batch by which generators are to come into being for states that wait. A generator that is made
on that occasion, and was not to be, would be ahead of itself when it counts. So the place in which
it is gets back what was there before, and the dataset makes it once more.

This is done after a death only: it costs as much as looking for generators. Nothing of the user's
runs by it. Not every place can be given back: a variable that a function encloses, an entry of a
deque or of a very large container cannot.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from holdfast.memory.attributes import attributes_of, dict_of, is_a, slots_of
from holdfast.memory.parts import KEYS, Part

__all__ = ["Places"]

_LARGE: Final = 4096  # entries
_NOTHING: Final = object()


class Places:
    """What is in the places of these parts and inside them."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self._before: dict[int, tuple[Any, Any]] = {}  # a holder, and what it held
        for part in parts:
            value = part.value
            if is_a(value, (dict, list)):
                self._note(value)
            if attributes_of(type(value)) is not None:
                self._note(dict_of(value))
            slots = slots_of(type(value))
            if slots:
                held = [(member, _slot(value, member)) for _, member in slots]
                self._before.setdefault(id(value), (value, held))

    def _note(self, holder: Any) -> None:
        kind: Any = dict if is_a(holder, dict) else list
        if id(holder) not in self._before and kind.__len__(holder) <= _LARGE:
            held = list(dict.items(holder)) if kind is dict else list(list.__iter__(holder))
            self._before[id(holder)] = holder, held

    def take_away(self, part: Part) -> bool:
        """Give the place of what was made, or the one in which that was made, back what it had;
        whether there is such a place."""
        step: Part | None = part
        while step is not None:
            holder, held = self._before.get(id(step.holder), (None, None))
            if holder is not None and holder is step.holder:
                return _put_back(holder, held, step)
            step = step.owner
        return False


def _slot(value: Any, member: Any) -> Any:
    try:
        return member.__get__(value)
    except AttributeError:
        return _NOTHING


def _put_back(holder: Any, held: list[Any], part: Part) -> bool:
    key: Any = part.key
    if is_a(holder, list):
        if key < len(held) and held[key] is part.value:
            return False  # it was there: what was made is somewhere inside
        list.__setitem__(holder, slice(None), held)
        return True
    before = next((value for one, value in held if one is key or _equal(one, key)), _NOTHING)
    if before is part.value:
        return False
    if is_a(holder, dict):
        if type(key) not in KEYS:
            return False  # its class would be asked for a hash
        if before is _NOTHING:
            dict.pop(holder, key, None)
        else:
            dict.__setitem__(holder, key, before)
    elif before is _NOTHING:
        key.__delete__(holder)
    else:
        key.__set__(holder, before)
    return True


def _equal(one: Any, key: Any) -> bool:
    return type(one) is type(key) and type(one) in KEYS and bool(one == key)
