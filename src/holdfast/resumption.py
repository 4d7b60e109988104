"""``loader.state_dict()`` and ``loader.load_state_dict()``.

A state is a dict that ``json.dumps`` takes (`state_format`). Everything in it is checked when it is
loaded (`state_fit`), before anything is changed. The loader goes on from there at its next
``iter()``.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
import time
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from torch.utils.data import IterableDataset

from holdfast import runtime, state_format
from holdfast.engine.checkpoint import Bookmark, Checkpoint
from holdfast.engine.iterator import WorkerIterator
from holdfast.engine.sampler_draws import (
    SamplerDiffers,
    SamplerStart,
    epoch_of,
    own_states,
    samplers_of,
)
from holdfast.errors import StateError
from holdfast.plain_data import to_plain
from holdfast.state_fit import START_ANEW, check_facts, facts_of, fitted
from holdfast.told_changes import DueChange, ToldChanges
from holdfast.told_changes import check as check_change
from holdfast.torchdata_states import from_torchdata, is_torchdatas
from holdfast.worker.fetch import has_state
from holdfast.worker.generator_states import default_generators_kept, global_states

log = logging.getLogger("holdfast")

VERSION: Final = 1
ITER_SECONDS: Final = 10.0  # for which a state waits for an ``iter()`` in another thread
TRIES: Final = 100  # to take a state while other threads go on


@dataclass
class Loaded:
    """A state that was loaded, until the next ``iter()``."""

    state: dict[str, Any]
    checkpoint: Checkpoint | None  # None: from before the first epoch
    generators: SamplerStart | None
    program: list[int] | None  # checksums of the default generators
    next_epoch: int  # the number of the one after it
    told: ToldChanges = field(default_factory=ToldChanges)  # in the run of the state
    not_held: Sequence[str] = ()  # what was told too
    told_later: list[Callable[[Any], object]] = field(default_factory=list)
    """What was told after the end of the state's epoch, or after it was loaded: a state of the
    dataset, which is loaded when an epoch begins, must not undo it."""


# -- the state now --------------------------------------------------------------------------


@dataclass(frozen=True)
class BeforeIter:
    """What ``iter()`` changes, as it was before: a state that is taken meanwhile is of then."""

    loaded: Loaded | None
    bookmark: Bookmark | None
    checkpoint: Checkpoint | None  # of persistent workers, which keep their bookmark
    next_epoch: int
    now: SamplerStart
    unknown: bool  # persistent workers are in an epoch before the one that was left early
    thread: int

    @classmethod
    def of(cls, loader: Any) -> BeforeIter:
        there, iterator, unknown = runtime.of(loader), loader._iterator, False
        checkpoint = None
        if isinstance(iterator, WorkerIterator) and there.bookmark is not None:
            unknown = iterator._pool.checkpointing.is_unsettled()
            checkpoint = None if unknown else there.bookmark.checkpoint()
        return cls(
            there.loaded,
            there.bookmark,
            checkpoint,
            there.epochs.next,
            SamplerStart.of(loader),
            unknown,
            threading.get_ident(),
        )


def state_dict(loader: Any) -> dict[str, Any]:
    """See `DataLoader.state_dict`."""
    there = runtime.of(loader)
    if loader.num_workers == 0:
        with there.changing() as settled:
            if not settled:
                _warn_of_a_change()
            return _settled_state(loader, there)
    return _settled_state(loader, there)


def _settled_state(loader: Any, there: runtime.Runtime) -> dict[str, Any]:
    """A state during which no ``iter()`` of another thread has begun or ended, and its sampler has
    drawn from no generator."""
    wait_until = time.monotonic() + ITER_SECONDS
    tries = 0
    while True:
        tries += 1
        stage = there.stage
        before = stage[0]
        if before is not None and before.unknown:
            mine = before.thread == threading.get_ident()
            while not mine and there.stage is stage and time.monotonic() < wait_until:
                time.sleep(0.001)  # iter() may run code that waits for this thread
            if there.stage is not stage:
                continue
            _warn_of_iter()
            before = None
        start = SamplerStart.of(loader) if before is None else before.now
        state = _state_now(loader, there, before, start)
        unmoved = before is not None or own_states(loader) == start.own
        if (there.stage is stage and unmoved) or tries >= TRIES:
            return state


def _state_now(
    loader: Any, there: runtime.Runtime, before: BeforeIter | None, now: SamplerStart
) -> dict[str, Any]:
    loaded, bookmark, checkpoint = there.loaded, there.bookmark, None
    if before is not None:
        loaded, bookmark, checkpoint = before.loaded, before.bookmark, before.checkpoint
    if loaded is not None:
        state = copy.deepcopy(loaded.state)
        if not is_torchdatas(state):
            state |= _told(_with_names(there.told, loaded.not_held), loaded.checkpoint)
        return state
    if there.engine == "torch":
        _warn_of_torchs(there.why_torchs)
    elif bookmark is not None and checkpoint is None:
        checkpoint = bookmark.checkpoint()
    text = state_format.Texts(there.texts)
    state = {
        "version": VERSION,
        state_format.FINISHED: checkpoint is None or checkpoint.finished,
        "batches": 0 if checkpoint is None else checkpoint.yielded,
        "loader": facts_of(loader),
        "epoch": None,
        "next_epoch": there.epochs.next if before is None else before.next_epoch,
        "sampler": {
            "now": state_format.generators(now, text, "now"),
            "epoch": now.epoch,
            "program": [zlib.crc32(one.read()) for one in global_states()],
            "before_epoch": to_plain(now.state),
        },
        "bad_samples": None if checkpoint is None else checkpoint.account,
        **_told(there.told, checkpoint),
    }
    if there.engine == "torch":
        state["unknown"] = there.why_torchs
    if checkpoint is not None:
        state_format.add_checkpoint(state, loader, checkpoint, text)
    return state


def _told(told: ToldChanges, checkpoint: Checkpoint | None) -> dict[str, Any]:
    if checkpoint is None:
        told = told.at(None, 0)
    else:  # before the next draw: what was told after the last batch is due
        told = told.at(checkpoint.epoch, checkpoint.first_missing - 1)
    return {"told": told.to_state()} if told else {}


def _with_names(told: ToldChanges, not_held: Sequence[str]) -> ToldChanges:
    return replace(told, names=dict.fromkeys([*not_held, *told.names]))


def _warn_of_iter() -> None:
    log.warning(
        "a state was taken inside iter(loader), while persistent workers were still busy with "
        "epochs that had been left early: it may be of neither epoch. Take the state after iter()"
    )


def _warn_of_a_change() -> None:
    log.warning(
        "a state was taken while another thread has been in loader.broadcast(), set_epoch() or "
        "state_dict() of the same loader for %g seconds: a change that it is making may be in the "
        "state in part or not at all. Take the state after it",
        runtime.CHANGE_SECONDS,
    )


def _warn_of_torchs(why: str) -> None:
    warnings.warn(
        f"this loader runs with torch's own engine ({why}), which does not tell where it is: its "
        "state cannot be resumed from",
        stacklevel=6,
    )


# -- loading one ----------------------------------------------------------------------------


def load_state_dict(loader: Any, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """See `DataLoader.load_state_dict`."""
    there = runtime.of(loader)
    if not isinstance(state, Mapping):
        raise StateError(
            f"a state is the dict that state_dict() returned; this is a {type(state).__name__}"
        )
    if not state:
        there.loaded = there.bookmark = None
        return
    if is_torchdatas(state):
        made = from_torchdata(loader, state)
        loaded = Loaded(copy.deepcopy(dict(state)), made, None, None, made.epoch + 1)
    else:
        loaded = _read(loader, state, strict)
    loaded.told.make(loader.dataset)
    if loaded.told_later:
        for _, change in loaded.told.due_changes():  # with values of its own
            change(loader.dataset)
    if not has_state(loader.dataset):  # nothing will undo them
        loaded.told_later.clear()
    there.loaded, there.told = loaded, loaded.told
    there.epochs.told_midway |= bool(loaded.told)
    there.epochs.next = loaded.next_epoch
    known, told = loaded.generators, epoch_of(loader)
    between = loaded.checkpoint is None or loaded.checkpoint.finished
    if between and known is not None and known.epoch is not None and told is not None:
        there.epochs.sampler = known.epoch
        if told[1] == 0:  # it was told nothing else yet
            told[0].set_epoch(known.epoch)
    if loader.persistent_workers and not isinstance(loader._iterator, WorkerIterator | None):
        runtime.close(loader)  # torch's; ours are closed at the next iter()


def _read(loader: Any, state: Mapping[str, Any], strict: bool) -> Loaded:
    version = state.get("version")
    if type(version) is not int or version < 1:
        raise StateError(
            "this is no state of a loader: it has no version. What state_dict() of a "
            "holdfast.DataLoader returned, or of torchdata's StatefulDataLoader, is one"
        )
    if version > VERSION:
        raise StateError(
            f"the state has version {version}, and this holdfast reads versions up to {VERSION}; "
            "update holdfast to the release that wrote it"
        )
    if "unknown" in state:
        raise StateError(
            f"when the state was taken, the loader ran with torch's own engine "
            f"({state['unknown']}), which does not tell where it is"
        )
    try:
        theirs = check_facts(state["loader"])
        finished = bool(state[state_format.FINISHED])
        now = state_format.read_start(state["sampler"], "now")
        checkpoint = state_format.read_checkpoint(state, finished, now)
        program = state["sampler"].get("program")
        if program is not None:
            program = [*map(state_format.natural, program)]
        told, names = _read_told(state.get("told"), checkpoint)
        next_epoch = state_format.natural(state["next_epoch"])
    except Exception as error:  # plain data of any kind, or a pickle that cannot be read
        raise StateError(
            f"the state is damaged or incomplete ({type(error).__name__}: {error}); it was "
            "probably cut short when it was written"
        ) from error
    checkpoint, now = fitted(loader, theirs, checkpoint, now, strict)
    for name in dict.fromkeys([*told.held, *(one.name for one in told.due)]):
        try:
            check_change(loader.dataset, name)
        except AttributeError as error:
            raise StateError(
                f"in the run of this state loader.broadcast() has set {name!r} of the dataset, and "
                f"this dataset ({type(loader.dataset).__qualname__}) does not have it: {error}"
            ) from error
    loaded = Loaded(copy.deepcopy(dict(state)), checkpoint, now, program, next_epoch, told, names)
    if checkpoint is not None and checkpoint.finished:
        loaded.told_later += [change for _, change in told.due_changes()]
    return loaded


def _read_told(told: Any, checkpoint: Checkpoint | None) -> tuple[ToldChanges, list[str]]:
    """What the dataset was told in the run of a state, and the names of what the state does not
    hold of it."""
    if told is None:
        return ToldChanges(), []
    epoch = None if checkpoint is None else checkpoint.epoch
    due = [(state_format.natural(draw), str(name), plain) for draw, name, plain in told["due"]]
    return ToldChanges.from_state(told["held"], due, epoch), [*map(str, told["not_held"])]


# -- going on from it -----------------------------------------------------------------------


@contextlib.contextmanager
def beginning(loader: Any) -> Iterator[tuple[Bookmark, Checkpoint | None]]:
    """While an iterator is made: its bookmark, and where it begins. If it cannot be made, the
    loaded state stays."""
    there = runtime.of(loader)
    loaded, bookmark = there.loaded, Bookmark()
    if loaded is None or loaded.checkpoint is None or loaded.checkpoint.finished:
        there.begin_epoch()
    if loaded is None:
        while there.due:  # the epoch was left before
            there.due.popleft().make(loader.dataset)
        if there.bookmark is not None:
            last, bookmark.waiting = there.bookmark.last, there.bookmark.waiting
            bookmark.before = last if last is not None and last.finished else None
            if bookmark.before is None and loader.num_workers == 0:
                bookmark.left = _left_early(loader, there.bookmark)
        yield bookmark, None
        there.bookmark = bookmark
        return
    _tell_what_is_missing(there.told, loaded.not_held)
    checkpoint = loaded.checkpoint
    with there.telling:
        there.told = _with_names(there.told, loaded.not_held)
    if checkpoint is not None:
        due = () if checkpoint.finished else there.told.due_changes()
        there.due = deque(DueChange(*one) for one in due)
        checkpoint = replace(checkpoint, due=there.due, told_later=tuple(loaded.told_later))
    keeps: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    if checkpoint is not None and not checkpoint.finished:
        keeps = default_generators_kept
        there.epochs.go_on(loader, checkpoint.epoch)
        _tell_of_generators(loader, loaded)
    elif loaded.generators is not None:
        loaded.generators.restore(loader, default=False, between_epochs=True)
    try:
        with keeps() as program:
            yield bookmark, checkpoint and replace(checkpoint, program=program)
            _restore_generators(loader, loaded, bookmark)
    except SamplerDiffers as differs:
        raise StateError(
            f"the sampler does not give the indices again that it gave before the state was "
            f"taken: started from the same random generators, draw {differs.draw} of {differs.of} "
            "was another or was missing. The data or the sampler has changed, or the sampler "
            "depends on more than its generators and its epoch; give it state_dict() and "
            f"load_state_dict(), which are used then. {_of_set_epoch(loader)}Or: {START_ANEW}"
        ) from None
    if checkpoint is not None and not checkpoint.finished:
        there.epochs.go_on(loader, loaded.next_epoch)
    there.bookmark, there.loaded = bookmark, None


def _of_set_epoch(loader: Any) -> str:
    """What to do about a sampler that was told its epoch, which could not be seen."""
    parts = samplers_of(loader).values()
    if epoch_of(loader) is not None or not any(hasattr(part, "set_epoch") for part in parts):
        return ""
    return (
        "It has set_epoch(), and no attribute `epoch` that says what was set: if you have called "
        "it, or loader.set_epoch(), call it again with the same number before you iterate. "
    )


def _left_early(loader: Any, bookmark: Bookmark) -> Checkpoint | None:
    """Where the epoch before was left, of a dataset whose state has to do with it."""
    if isinstance(loader.dataset, IterableDataset) and has_state(loader.dataset):
        with contextlib.suppress(Exception):  # a state of the iterator's that cannot be had
            return bookmark.checkpoint()
    return None


def _tell_what_is_missing(told: ToldChanges, not_held: Sequence[str]) -> None:
    missing = [name for name in not_held if name not in told.names]
    if missing:
        log.warning(
            "resumed: in the run of this state loader.broadcast() was given %s, which a state "
            "cannot hold: it has values of attributes that are plain data, and no code. Call "
            "loader.broadcast() with it again, after load_state_dict() and before you iterate",
            ", ".join(missing),
        )


def _restore_generators(loader: Any, loaded: Loaded, bookmark: Bookmark) -> None:
    """What was drawn from the loader's generators beside the sampler's draws, by another loader
    perhaps, has been drawn too; if as much of the sampler is drawn now as then."""
    before, now = loaded.checkpoint, bookmark.checkpoint()
    if before is None or before.finished or now is None or loaded.generators is None:
        return
    if before.begun is None or before.drawn == now.drawn:
        loaded.generators.restore(loader, default=False, between_epochs=False)


def _tell_of_generators(loader: Any, loaded: Loaded) -> None:
    """The program's own generators are not restored: say if they are not as they were."""
    if loaded.program is None:
        return
    if loaded.program == [zlib.crc32(one.read()) for one in global_states()]:
        return
    log.info(
        "resumed: the default random generators of torch, random and NumPy are not as they were "
        "when the state was taken. They are the program's, and not restored here. %s; restore "
        "them with torch.set_rng_state() and the like, if that matters",
        "Later epochs are shuffled with numbers from torch's, unless the loader has a generator="
        if loader.num_workers
        else "Samples that are loaded in this process draw from them, and so does the shuffling "
        "of later epochs unless the loader has a generator=",
    )
