"""What the dataset of a loader was told (`broadcast`), for the state of a resumed run.

A state holds values, not code: attributes that were set to plain data, and the epoch of
``set_epoch``. Functions, and objects of other classes, are named in it, and the program has to tell
them again.

While workers run, a change holds from a certain draw of the epoch on. In a state that is taken
before that, it is due: the resumed run makes it before the same draw.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.plain_data import from_plain, holds_pickle, to_plain

__all__ = ["AT_ONCE", "SetAttributes", "SetEpoch", "ToldChanges", "check"]

AT_ONCE: Final = -1
"""The draw before which a change is made if no workers run."""
_SET_EPOCH: Final = "set_epoch()"


@dataclass(frozen=True)
class SetAttributes:
    values: dict[str, Any]

    def __call__(self, dataset: Any) -> None:
        for path, value in self.values.items():
            owner, name = _owner(dataset, path)
            setattr(owner, name, value)


@dataclass(frozen=True)
class SetEpoch:
    epoch: int

    def __call__(self, dataset: Any) -> None:
        dataset.set_epoch(self.epoch)


def _owner(dataset: Any, path: str) -> tuple[Any, str]:
    *owner, name = path.split(".")
    return functools.reduce(getattr, owner, dataset), name


def _change_of(name: str, plain: Any) -> SetAttributes | SetEpoch:
    """A change that a state holds."""
    value = from_plain(plain)
    return SetEpoch(int(value)) if name == _SET_EPOCH else SetAttributes({name: value})


def _is_held(name: str, plain: Any) -> bool:
    """Whether a state holds it: no code, and no attribute of Python's own."""
    special = any(part.startswith("__") for part in name.split("."))
    return not holds_pickle(plain) and (name == _SET_EPOCH or not special)


@dataclass(frozen=True)
class _Due:
    epoch: int
    draw: int
    name: str
    plain: Any


class ToldChanges:
    """All that one loader's dataset was told."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {}  # by attribute, as plain data; the last told is the last
        self.names: dict[str, None] = {}  # what no state can hold
        self._due: list[_Due] = []

    def __bool__(self) -> bool:
        return bool(self.held or self.names or self._due)

    def note(self, change: Callable[[Any], object], epoch: int, draw: int) -> None:
        """It was told in this epoch, and holds from this draw on."""
        if isinstance(change, SetEpoch):
            self._due.append(_Due(epoch, draw, _SET_EPOCH, change.epoch))
        elif isinstance(change, SetAttributes):
            for name, value in change.values.items():
                plain: Any = None
                with contextlib.suppress(Exception):  # it does not pickle
                    plain = [to_plain(value)]
                if plain is not None and _is_held(name, plain):
                    self._due.append(_Due(epoch, draw, name, plain[0]))
                    self.names.pop(name, None)
                else:  # what it was told before holds no longer
                    self.names[name] = None
                    self.held.pop(name, None)
                    self._due = [due for due in self._due if due.name != name]
        else:
            self.names[_name_of(change)] = None
        self._hold(epoch, AT_ONCE)

    def _hold(self, epoch: int | None, draw: int) -> None:
        """Changes of earlier epochs and draws are made."""
        while self._due and (self._due[0].epoch != epoch or self._due[0].draw <= draw):
            made = self._due.pop(0)
            self.held.pop(made.name, None)
            self.held[made.name] = made.plain

    # -- in a state -----------------------------------------------------------------------

    def to_state(self, epoch: int | None, draw: int) -> dict[str, Any] | None:
        """For a state in this epoch in which this is the next draw; None if nothing was told."""
        self._hold(epoch, draw)
        if not self:
            return None
        due = [[one.draw, one.name, one.plain] for one in self._due]
        return {"held": dict(self.held), "due": due, "not_held": list(self.names)}

    @classmethod
    def from_state(
        cls, held: Mapping[str, Any], due: Sequence[tuple[int, str, Any]], epoch: int | None
    ) -> ToldChanges:
        """What `to_state` has put there; ValueError if it is damaged. Without an epoch nothing is
        due any more."""
        made = cls()
        made.held = dict(held)
        made._due = [_Due(-1 if epoch is None else epoch, *one) for one in due]
        made._hold(epoch, AT_ONCE)
        for name, plain in [*made.held.items(), *((one.name, one.plain) for one in made._due)]:
            if not _is_held(name, plain):
                raise ValueError(f"{name!r} cannot be told by a state")
            _change_of(name, plain)
        return made

    def make(self, dataset: Any) -> None:
        """Make all changes that hold."""
        for name, plain in self.held.items():
            _change_of(name, plain)(dataset)

    def due_names(self) -> list[str]:
        return [one.name for one in self._due]

    def due_changes(self) -> tuple[tuple[int, Callable[[Any], object]], ...]:
        """Those that do not hold yet, each with the draw that it precedes."""
        return tuple((one.draw, _change_of(one.name, one.plain)) for one in self._due)


def check(dataset: Any, name: str) -> None:
    """AttributeError if a change that a state holds cannot be made here."""
    if name == _SET_EPOCH:
        _ = dataset.set_epoch
    else:
        _owner(dataset, name)


def _name_of(change: Any) -> str:
    inner = getattr(change, "func", change)  # of a functools.partial
    kind = inner if hasattr(inner, "__qualname__") else type(inner)
    return f"{kind.__module__}.{kind.__qualname__}"
