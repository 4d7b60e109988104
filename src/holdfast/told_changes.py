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
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.plain_data import from_plain, holds_pickle, to_plain

AT_ONCE: Final = -1
"""The draw before which a change is made if no workers run."""
_SET_EPOCH: Final = "set_epoch()"


@dataclass(frozen=True)
class SetAttributes:
    values: dict[str, Any]

    def __call__(self, dataset: Any) -> None:
        for path, value in self.values.items():
            try:
                owner, name = _owner(dataset, path)
                setattr(owner, name, value)
            except AttributeError as error:
                raise AttributeError(
                    f"broadcast() cannot set {path!r} of the dataset "
                    f"({type(dataset).__qualname__}): {error}"
                ) from error


@dataclass(frozen=True)
class SetEpoch:
    epoch: int

    def __call__(self, dataset: Any) -> None:
        dataset.set_epoch(self.epoch)


@dataclass(eq=False)
class DueChange:
    """A change that the run before was told, and that a resumed run makes before a draw."""

    draw: int
    change: Callable[[Any], object]
    overtaken: bool = False  # by what was told since then: not made any more

    def make(self, dataset: Any) -> None:
        if not self.overtaken:
            self.change(dataset)

    def is_overtaken_by(self, later: Callable[[Any], object]) -> bool:
        """Whether a change that is told now leaves nothing of it."""
        mine = self.change
        if isinstance(mine, SetAttributes) and isinstance(later, SetAttributes):
            return mine.values.keys() <= later.values.keys()
        return isinstance(mine, SetEpoch) and isinstance(later, SetEpoch)


def _owner(dataset: Any, path: str) -> tuple[Any, str]:
    *owner, name = path.split(".")
    return functools.reduce(getattr, owner, dataset), name


def is_new(dataset: Any, path: str) -> bool:
    """Whether there is a place for this attribute, and nothing in it."""
    try:
        owner, name = _owner(dataset, path)
        return not hasattr(owner, name)
    except Exception:  # by a property or a __getattr__
        return False


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


@dataclass(frozen=True)
class ToldChanges:
    """All that one loader's dataset was told. It is replaced as a whole: another thread, or a
    signal handler, may ask for the loader's state at any time."""

    held: Mapping[str, Any] = field(default_factory=dict)  # by attribute; the last told is the last
    names: Mapping[str, None] = field(default_factory=dict)  # what no state can hold
    due: tuple[_Due, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.held or self.names or self.due)

    def and_(self, change: Callable[[Any], object], epoch: int, draw: int) -> ToldChanges:
        """With one more, that was told in this epoch and holds from this draw on."""
        before = self.at(epoch, AT_ONCE)
        held, names, due = dict(before.held), dict(self.names), list(before.due)
        if isinstance(change, SetEpoch):
            due.append(_Due(epoch, draw, _SET_EPOCH, change.epoch))
        elif isinstance(change, SetAttributes):
            for name, value in change.values.items():
                plain: Any = None
                with contextlib.suppress(Exception):  # it does not pickle
                    plain = [to_plain(value)]
                if plain is not None and _is_held(name, plain):
                    due.append(_Due(epoch, draw, name, plain[0]))
                    names.pop(name, None)
                else:  # what it was told before holds no longer
                    names[name] = None
                    held.pop(name, None)
                    due = [one for one in due if one.name != name]
        else:
            names[_name_of(change)] = None
        # With fewer batches ahead than in the run before there are changes that are due after it.
        told = [one for one in due if (one.epoch, one.draw) == (epoch, draw)]
        due = [one for one in due if one.draw <= draw or all(one.name != new.name for new in told)]
        due.sort(key=lambda one: one.draw)
        if draw == AT_ONCE:  # also before what is due later, which it replaces
            made = {one.name: one.plain for one in due if one.draw == AT_ONCE}
            due = [one for one in due if one.name not in made]
            held = {name: held[name] for name in held if name not in made} | made
        return ToldChanges(held, names, tuple(due)).at(epoch, AT_ONCE)

    def at(self, epoch: int | None, draw: int) -> ToldChanges:
        """If this is the next draw in this epoch: changes of earlier epochs and draws are made."""
        held, due = dict(self.held), deque(self.due)
        while due and (due[0].epoch != epoch or due[0].draw <= draw):
            made = due.popleft()
            held.pop(made.name, None)
            held[made.name] = made.plain
        return ToldChanges(held, self.names, tuple(due))

    # -- in a state -----------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        due = [[one.draw, one.name, one.plain] for one in self.due]
        return {"held": dict(self.held), "due": due, "not_held": list(self.names)}

    @classmethod
    def from_state(
        cls, held: Mapping[str, Any], due: Sequence[tuple[int, str, Any]], epoch: int | None
    ) -> ToldChanges:
        """What `to_state` has put there; ValueError if it is damaged. Without an epoch nothing is
        due any more."""
        late = tuple(_Due(-1 if epoch is None else epoch, *one) for one in due)
        made = cls(dict(held), due=late).at(epoch, AT_ONCE)
        for name, plain in [*made.held.items(), *((one.name, one.plain) for one in made.due)]:
            if not _is_held(name, plain):
                raise ValueError(f"{name!r} cannot be told by a state")
            _change_of(name, plain)
        return made

    def make(self, dataset: Any) -> None:
        """Make all changes that hold."""
        for name, plain in self.held.items():
            _change_of(name, plain)(dataset)

    def due_changes(self) -> tuple[tuple[int, Callable[[Any], object]], ...]:
        """Those that do not hold yet, each with the draw that it precedes."""
        return tuple((one.draw, _change_of(one.name, one.plain)) for one in self.due)


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
