"""How iterating begins, for any `torch.utils.data.DataLoader`: with our engine, or with torch's.

A loader of ours asks for it by its methods. Loaders of other classes come here while
`holdfast.install` is in effect (`takeover.install`).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import multiprocessing.context
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.utils.data

from holdfast import option_sources, options, private_names, resumption, runtime
from holdfast.autopsy.logbook import Logbook
from holdfast.code_origin import users_level
from holdfast.engine.iterator import WorkerIterator
from holdfast.engine.serial import SerialIterator
from holdfast.loader_identity import LoaderIdentity, name_of
from holdfast.loader_identity import rank as find_rank
from holdfast.private_names import BaseDataLoaderIter, MultiProcessingDataLoaderIter
from holdfast.runtime import Runtime

log = logging.getLogger("holdfast")

_OF_TORCH = (
    "batch_size",
    "num_workers",
    "prefetch_factor",
    "pin_memory",
    "persistent_workers",
    "multiprocessing_context",
    "timeout",
    "drop_last",
    "in_order",
)
"""What a logbook says of a loader, beside holdfast's options."""

makes_torchs: contextvars.ContextVar[bool] = contextvars.ContextVar("makes_torchs", default=False)
"""Whether an iterator of torch's own is being made, and it was said why."""


def check_options(loader: Any) -> None:
    """When a loader is made: a wrong option is an error that names it."""
    option_sources.mention_misspelt()
    options.parse(num_workers=loader.num_workers, **option_sources.of(loader))


def is_ours(iterator: Any) -> bool:
    """Whether it is one of our engine's."""
    return isinstance(iterator, (WorkerIterator, SerialIterator))


def iterate(loader: Any) -> BaseDataLoaderIter:
    """``iter(loader)``, as torch's: persistent workers keep their iterator, until they cannot be
    used any more."""
    there = runtime.of(loader)
    there.settle()
    if there.stage[0] is not None:  # it is in the middle of another, which has noted what was
        return _iterate(loader)
    with contextlib.suppress(Exception):  # a state of the sampler's that cannot be had
        there.stage = [resumption.BeforeIter.of(loader)]
    try:
        return _iterate(loader)
    finally:
        there.stage = [None]


def _iterate(loader: Any) -> BaseDataLoaderIter:
    if not (loader.persistent_workers and loader.num_workers > 0):
        return loader._get_iterator()  # type: ignore[no-any-return]
    iterator = loader._iterator
    if isinstance(iterator, WorkerIterator) and runtime.of(loader).loaded is not None:
        runtime.close(loader)  # new workers go on from the state; a loop could run until here
        iterator = None
    if iterator is None or not _can_go_on(loader, iterator):
        iterator = loader._get_iterator()
        # Not by the loader's own: Fabric records all that is assigned, and does it again to
        # another loader.
        object.__setattr__(loader, "_iterator", iterator)
    else:
        runtime.of(loader).begin_epoch()
        iterator._reset(loader)
    return iterator  # type: ignore[no-any-return]


def _can_go_on(loader: Any, iterator: Any) -> bool:
    if isinstance(iterator, WorkerIterator):
        return iterator.usable and runtime.of(loader).owns(iterator)
    if type(iterator) is MultiProcessingDataLoaderIter and runtime.of(loader).engine is None:
        keep_torchs(
            loader,
            "its persistent workers were started before holdfast.install(), and it keeps them",
        )
    return True


def new_iterator(
    loader: Any, torchs: Callable[[], BaseDataLoaderIter], *, ours: bool
) -> BaseDataLoaderIter:
    """An iterator of our engine; or the one that `torchs` makes, if the engine cannot run here.
    `ours` says whether the loader is one of our own class, whose user expects the engine."""
    state = runtime.of(loader)
    state.settle()
    if not ours:
        if torch.utils.data.get_worker_info() is not None:
            return torchs()  # a loader inside a worker is the dataset's own affair
        why = _why_not(loader)
        if why is not None:
            return _torchs(loader, torchs, why, warn=False)
    private_names.tell_once()
    lacks = private_names.lacking(loader)
    if lacks is not None:
        why = f"holdfast needs {lacks.name}, which {lacks.wrong} in torch {torch.__version__}"
        return _torchs(loader, torchs, why, warn=ours)
    if loader.num_workers > 0 and loader.prefetch_factor <= 0:
        with making_torchs():
            return torchs()  # which refuses it in its own words
    values = option_sources.of(loader)
    chosen = options.parse(num_workers=loader.num_workers, **values)
    silent = chosen.policy is None and chosen.logbook is None and state.loaded is None
    if loader.num_workers == 0 and silent:
        # There is nothing that could be told of it: its name is not needed.
        state.engine, state.logbook, state.ledger.logbook = "holdfast", None, None
        with resumption.beginning(loader) as (bookmark, _):
            return SerialIterator(loader, chosen, state.stats, state.ledger, state.epochs, bookmark)
    name, rank = chosen.name or name_of(loader.dataset), find_rank()
    origin = LoaderIdentity(name, rank.told)
    logbook = _logbook(loader, state, chosen.logbook, rank.number, name, values)
    state.ledger.logbook, state.ledger.origin = logbook, origin
    if loader.num_workers == 0:
        state.engine = "holdfast"
        with resumption.beginning(loader) as (bookmark, resumed):
            return SerialIterator(
                loader,
                chosen,
                state.stats,
                state.ledger,
                state.epochs,
                bookmark,
                resumed,
                origin,
                logbook,
            )
    if chosen.worker_method == "multiprocessing":
        why_not = _no_processes()
        if why_not is not None:
            return _torchs(loader, torchs, why_not, warn=ours)
        if isinstance(chosen.worker_memory_limit, int):
            _warn_without_proc()
    if chosen.worker_method != "ray":
        loader.check_worker_number_rationality()
    state.advise(loader.dataset, loader.num_workers, origin)
    state.engine = "holdfast"
    with resumption.beginning(loader) as (bookmark, resumed):
        budget = state.budget_for(chosen.memory_budget)
        records = state.records(origin)
        return WorkerIterator(loader, chosen, records, budget, state.add, bookmark, resumed)


def _no_processes() -> str | None:
    """Why our worker processes cannot run here; None if they can."""
    if sys.platform != "linux":
        return (
            f"holdfast's worker processes do not run on {sys.platform}; its worker threads do "
            '(worker_method="thread")'
        )
    from holdfast import kernel  # not imported elsewhere, where threads do

    lacking = kernel.missing()
    if lacking is None:
        return None
    return (
        f"holdfast's worker processes cannot run here (Linux {os.uname().release}); they need "
        f'{lacking.name}: {lacking.lost}. Its worker threads can (worker_method="thread")'
    )


def _logbook(
    loader: Any, state: Runtime, folder: str | None, rank: int, name: str, values: Mapping[str, Any]
) -> Logbook | None:
    """The logbook; None if there is none. One that cannot be made is an error only if it is the
    loader's own: a program that is not told of it must not end for lack of one."""
    try:
        return state.open_logbook(folder, rank, name, functools.partial(_noted, loader, values))
    except OSError as error:
        if option_sources.given(option_sources.own(loader)).get("logbook") is not None:
            raise
        _warn_of_logbook(str(error))
        return None


@functools.cache
def _warn_of_logbook(words: str) -> None:
    log.warning("%s; the run goes on without it", words)


def _noted(loader: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    known = {name: getattr(loader, name, None) for name in _OF_TORCH}
    return {"dataset": type(loader.dataset).__qualname__, **known, **values}


# -- torch's own engine --------------------------------------------------------------------


def _why_not(loader: Any) -> str | None:
    """Why a loader of another class cannot have our engine; None if it can."""
    context = loader.multiprocessing_context
    if context is not None and type(context).__module__ != multiprocessing.context.__name__:
        kind = type(context)
        return (
            f"its multiprocessing_context ({kind.__module__}.{kind.__qualname__}) starts processes "
            "in a way of its own"
        )
    method = getattr(loader, "worker_method", "multiprocessing")
    return None if method == "multiprocessing" else f"its workers are of another kind ({method!r})"


def _torchs(
    loader: Any, torchs: Callable[[], BaseDataLoaderIter], why: str, *, warn: bool
) -> BaseDataLoaderIter:
    if warn:
        state = runtime.of(loader)
        state.engine, state.why_torchs = "torch", why
        _warn_of_torchs_workers(why)
    else:
        keep_torchs(loader, why)
    with making_torchs():
        return torchs()


@contextlib.contextmanager
def making_torchs() -> Iterator[None]:
    """While torch makes an iterator of its own, and it was said why."""
    token = makes_torchs.set(True)
    try:
        yield
    finally:
        makes_torchs.reset(token)


def keep_torchs(loader: Any, why: str) -> None:
    """Of a loader that is not ours: say once that it stays with torch, and why."""
    if isinstance(loader, torch.utils.data.DataLoader):
        state = runtime.of(loader)
        state.engine, state.why_torchs = "torch", why
    say_that_it_stays(type(loader).__qualname__, why)


@functools.cache  # once in a process
def say_that_it_stays(kind: str, why: str) -> None:
    log.warning(
        "%s keeps torch's engine: %s. Its workers are not replaced when they die or hang, and "
        "holdfast's options have no effect on it",
        kind,
        why,
    )


@functools.cache
def _warn_of_torchs_workers(why: str) -> None:
    warnings.warn(
        f"{why}. Workers are torch's own: they are not replaced when they die or hang, and "
        "on_bad_sample, stall_timeout, memory_budget and worker_memory_limit have no effect. "
        "`holdfast doctor` lists what this system has",
        stacklevel=users_level(),
    )


@functools.cache
def _warn_without_proc() -> None:
    if not os.path.exists("/proc/self/statm"):
        log.warning(
            "worker_memory_limit has no effect: the size of a worker is read from /proc, which is "
            "not there"
        )
