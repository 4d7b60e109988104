"""Telling the dataset something, in the trainer and in all workers: ``loader.broadcast`` and
``loader.set_epoch``.

Each worker has a copy of the dataset of its own. A change in the trainer reaches workers that are
started later, and no others. So a change is made in the trainer, at once, and sent to every worker
that is running, as one of its items (`engine.flow`): after the batches that were drawn before, and
before all others. Workers that are started later have it from the trainer's copy; replacements in a
running pool, which are forked from an older copy, are told again what their predecessor was told.
What a state of the loader can hold of it is in `told_changes`.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import operator
import pickle
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from holdfast import runtime
from holdfast.told_changes import AT_ONCE, SetAttributes, SetEpoch, is_new
from holdfast.worker import loaded_state
from holdfast.worker.fetch import has_state
from holdfast.worker.pickling import find_unpicklable

if TYPE_CHECKING:
    from holdfast.resumption import Loaded

log = logging.getLogger("holdfast")

Change = Mapping[str, Any] | Callable[[Any], object]
"""Values of attributes by name, or a function of the dataset."""


def broadcast(loader: Any, change: Change) -> None:
    right = (
        'it takes the values of attributes by name, such as {"image_size": 224} or '
        '{"transform.strength": 0.5}, or a function of the dataset'
    )
    new: list[str] = []
    if isinstance(change, Mapping):
        for name in change:
            if not isinstance(name, str) or not all(map(str.isidentifier, name.split("."))):
                raise ValueError(f"broadcast(): {name!r} is not the name of an attribute; {right}")
        change = SetAttributes(dict(change))
        new = [path for path in change.values if is_new(loader.dataset, path)]
    elif not callable(change):
        raise TypeError(f"broadcast({change!r}): {right}")
    _tell(loader, change, "broadcast()")
    for path in new:
        log.warning(
            "broadcast(): the dataset (%s) had no attribute %r before; it has now. Is it misspelt? "
            "If not, give it a value when the dataset is made",
            type(loader.dataset).__qualname__,
            path,
        )


def set_epoch(loader: Any, epoch: int) -> None:
    right = "it takes a whole number, 0 or more, such as 3"
    if isinstance(epoch, bool):
        raise TypeError(f"set_epoch({epoch!r}): {right}")
    try:
        number = operator.index(epoch)
    except TypeError:
        raise TypeError(f"set_epoch({epoch!r}): {right}") from None
    if number < 0:
        raise ValueError(f"set_epoch({epoch!r}): {right}")
    epoch = number
    batch_sampler = getattr(loader, "batch_sampler", None)
    told: list[Any] = []
    part: Any
    for part in (loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
        if callable(getattr(part, "set_epoch", None)) and not any(one is part for one in told):
            told.append(part)
            part.set_epoch(epoch)
    if callable(getattr(loader.dataset, "set_epoch", None)):
        _tell(loader, SetEpoch(epoch), "set_epoch()")
    runtime.of(loader).epochs.next = epoch


def _tell(loader: Any, change: Callable[[Any], object], what: str) -> None:
    state = runtime.of(loader)
    state.settle()
    if state.engine == "torch" and loader.num_workers > 0 and loader.persistent_workers:
        raise RuntimeError(f"{what} does not reach torch's own workers: {state.why_torchs}")
    pools = [pool for pool in state.pools() if pool.running]
    pickled = _pickled(change, what) if pools else b""

    if state.due and state.bookmark is not None:  # it was told before this
        state.bookmark.make_what_is_due()

    def noted(draw: int) -> None:
        for due in [*state.due]:
            due.overtaken |= due.is_overtaken_by(change)
        epoch, loaded = state.epochs.current, state.loaded
        if loaded is not None:  # the draws of an old iterator are not those of the next one
            draw, after = AT_ONCE, loaded.checkpoint
            if after is not None:
                epoch = after.epoch
                draw = after.first_missing if after.finished else AT_ONCE
        with state.telling:
            state.told = state.told.and_(change, epoch, draw)

    if not pools:
        with state.changing():  # a state that another thread takes has all of it or nothing
            _make(change, loader.dataset, state.loaded)
            noted(AT_ONCE if state.bookmark is None else state.bookmark.next_draw(AT_ONCE))
        return
    _make(change, loader.dataset, state.loaded)
    state.epochs.told_midway = True
    for pool in pools:  # what a state says is of the last one
        pool.announce(pickled, noted if pool is pools[-1] else None)


def _make(change: Callable[[Any], object], dataset: Any, loaded: Loaded | None) -> None:
    """Make a change in the trainer. The dataset's own state, which may wait to be loaded, must not
    undo it: then it is made again after that. Of a function only if it changes that state, because
    it may not be made twice otherwise."""
    if loaded is None or not has_state(dataset):
        change(dataset)
        return
    before, again = loaded_state.present_state(dataset), change
    with contextlib.suppress(Exception):  # the dataset may change a value that it was given
        again = copy.deepcopy(change)
    change(dataset)
    told = isinstance(change, (SetAttributes, SetEpoch))
    if told or loaded_state.present_state(dataset) != before:
        loaded.told_later.append(again)


def _pickled(change: Callable[[Any], object], what: str) -> bytes:
    """Pickled once, as it is now; whatever becomes of it later."""
    try:
        return pickle.dumps(change, 5)
    except Exception as error:
        given = change.values if isinstance(change, SetAttributes) else change
        path = find_unpicklable(given, "the argument") or "the argument"
        raise TypeError(
            f"{what} cannot send this to workers that are running: {path} cannot be pickled "
            f"({error}). Nothing was changed. Use a function of a module, functools.partial of "
            "one, or the values of attributes, in place of a lambda or a local function"
        ) from None
