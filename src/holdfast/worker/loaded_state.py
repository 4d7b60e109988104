"""A state that is loaded into a dataset in the middle of an epoch, and taken back before the next.

Some datasets begin every epoch from the state that was loaded last (Hugging Face's do, as long as
``set_epoch`` is not called). All that comes before that place would then be missing from later
epochs. So before the next one those attributes that ``load_state_dict`` has assigned, and nothing
has assigned since, get back the values they had; except for those that are part of the dataset's
present state, such as the number of its epoch: if ``state_dict`` gave something else without them.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable
from typing import Any, Final

_MISSING: Final = object()
_Changes = dict[str, tuple[Any, Any]]  # by attribute: the value before, and the one assigned
_loaded: dict[int, tuple[Callable[[], Any], _Changes]] = {}
"""By the identity of the dataset: it may define equality as it likes."""


def load(dataset: Any, state: Any) -> None:
    """``dataset.load_state_dict(state)``, to be taken back."""
    attributes = getattr(dataset, "__dict__", {})
    before = dict(attributes)
    dataset.load_state_dict(state)
    changes = _changes_of(dataset)
    for name in {*before, *attributes}:
        old, new = before.get(name, _MISSING), attributes.get(name, _MISSING)
        if old is not new:
            first, _ = changes.get(name, (old, new))
            changes[name] = (first, new)


def keep(dataset: Any) -> None:
    """What was loaded is not to be taken back."""
    _loaded.pop(id(dataset), None)


def doubtful(dataset: Any) -> list[str]:
    """The attributes that `take_back` would leave as they were loaded, because they are part of the
    dataset's present state: the number of its epoch, or the place where every epoch begins now."""
    found, changes = _loaded.get(id(dataset), (None, {}))
    if found is None or found() is not dataset:
        return []
    attributes, names = dataset.__dict__, []
    for name, (old, new) in changes.items():
        if old is _MISSING or attributes.get(name, _MISSING) is not new:
            continue
        present = present_state(dataset)
        attributes[name] = old
        if present_state(dataset) != present:
            names.append(name)
        attributes[name] = new
    return names


def take_back(dataset: Any, *, everything: bool = False) -> None:
    """Before an epoch: what states that were loaded in the one before have left. `everything`: as
    if they had not been loaded."""
    found, changes = _loaded.pop(id(dataset), (None, {}))
    if found is None or found() is not dataset:
        return
    attributes = dataset.__dict__
    for name, (old, new) in changes.items():
        if attributes.get(name, _MISSING) is not new:
            continue  # the dataset has gone on from it
        present = None if everything else present_state(dataset)
        if old is _MISSING:
            attributes.pop(name, None)
        else:
            attributes[name] = old
        if not everything and present_state(dataset) != present:
            attributes[name] = new


def present_state(dataset: Any) -> bytes:
    """The dataset's present state, to be compared with another one; empty if it cannot be had."""
    try:
        return pickle.dumps(dataset.state_dict())
    except Exception:  # it does not pickle, or cannot be told between epochs
        return b""


def _changes_of(dataset: Any) -> _Changes:
    key = id(dataset)
    found, changes = _loaded.get(key, (None, {}))
    if found is None or found() is not dataset:
        changes = {}
        try:
            gone = weakref.ref(dataset, lambda _: _loaded.pop(key, None))
        except TypeError:
            _loaded[key] = (lambda: dataset), changes
        else:
            _loaded[key] = gone, changes
    return changes
