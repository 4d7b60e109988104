"""``loader.state_dict()`` and ``loader.load_state_dict()``: plain data from a checkpoint, and back.

A state is a dict that ``json.dumps`` takes. docs/resume.md describes it. Everything in it is
checked when it is loaded, before anything is changed. The loader goes on from there at its next
``iter()``.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import multiprocessing
import operator
import pickle
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from torch.utils.data import BatchSampler, IterableDataset

from holdfast import option_sources, runtime
from holdfast.engine.checkpoint import Bookmark, Checkpoint, StreamCheckpoint, WorkerCheckpoint
from holdfast.engine.continuation import StreamPoint
from holdfast.engine.events import Position, SeatPosition
from holdfast.engine.sampler_draws import (
    SamplerDiffers,
    SamplerStart,
    default_generators_kept,
    epoch_of,
    samplers_of,
)
from holdfast.errors import StateError
from holdfast.loader_identity import rank
from holdfast.plain_data import from_plain, from_text, to_plain, to_text
from holdfast.told_changes import ToldChanges
from holdfast.told_changes import check as check_change
from holdfast.torchdata_states import from_torchdata, is_torchdatas
from holdfast.worker.batch_fingerprint import NO_BATCH
from holdfast.worker.generator_states import global_states
from holdfast.worker.sample_seeding import EpochSeeds

__all__ = ["Loaded", "beginning", "load_state_dict", "state_dict"]

log = logging.getLogger("holdfast")

VERSION: Final = 1
FINISHED: Final = "_iterator_finished"
_OF_WORKERS: Final = {"num_workers", "worker_method", "start_method", "persistent_workers"}
_OF_SAMPLERS: Final = ("seed", "rank", "num_replicas", "shuffle", "replacement")
"""Attributes of samplers that decide on what they give."""
_START_ANEW: Final = (
    "to begin a new epoch instead, do not load the state; to go on as near as possible, "
    "load_state_dict(state, strict=False)"
)


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


# -- the state now --------------------------------------------------------------------------


def state_dict(loader: Any) -> dict[str, Any]:
    """See `DataLoader.state_dict`."""
    there = runtime.of(loader)
    loaded, checkpoint = there.loaded, None
    if loaded is not None:
        state = copy.deepcopy(loaded.state)
        if not is_torchdatas(state):
            state |= _told(_with_names(there.told, loaded.not_held), loaded.checkpoint)
        return state
    if there.engine == "torch":
        _warn_of_torchs(there.why_torchs)
    elif there.bookmark is not None:
        checkpoint = there.bookmark.checkpoint()
    text = _Texts(there.texts)
    now = SamplerStart.of(loader)
    state = {
        "version": VERSION,
        FINISHED: checkpoint is None or checkpoint.finished,
        "batches": 0 if checkpoint is None else checkpoint.yielded,
        "loader": _facts(loader),
        "epoch": None,
        "next_epoch": there.epochs.next,
        "sampler": {
            "now": _generators(now, text, "now"),
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
        state["epoch"] = _epoch(checkpoint)
        if checkpoint.begun is not None and not checkpoint.finished:
            begun = checkpoint.begun
            state["sampler"] |= {
                "begun": _generators(begun, text, "begun"),
                "default": [
                    None if one is None else text(f"default {number}", one)
                    for number, one in enumerate(begun.default)
                ],
                "epoch": begun.epoch,
                "before_seed": begun.before_seed,
                "state": to_plain(checkpoint.sampler_state),
                "before_epoch": to_plain(begun.state),
            }
        _add_workers(state, loader, checkpoint, text)
    return state


def _told(told: ToldChanges, checkpoint: Checkpoint | None) -> dict[str, Any]:
    if checkpoint is None or checkpoint.finished:
        told = told.at(None, 0)
    else:
        told = told.at(checkpoint.epoch, checkpoint.first_missing)
    return {"told": told.to_state()} if told else {}


def _with_names(told: ToldChanges, not_held: Sequence[str]) -> ToldChanges:
    return replace(told, names=dict.fromkeys([*not_held, *told.names]))


class _Texts:
    """Random states as text. Most have not changed since the last call."""

    def __init__(self, known: dict[str, tuple[bytes, str]]) -> None:
        self._known = known

    def __call__(self, name: str, raw: bytes) -> str:
        before = self._known.get(name)
        if before is None or before[0] != raw:
            before = self._known[name] = (raw, to_text(raw))
        return before[1]


def _generators(start: SamplerStart, text: _Texts, when: str) -> dict[str, Any]:
    return {
        path: {"kind": kind, "state": text(f"{when} {path}", raw)}
        for path, (kind, raw) in start.own.items()
    }


def _epoch(one: Checkpoint) -> dict[str, Any]:
    return {
        "base_seed": one.base_seed,
        "shared_seed": one.shared_seed,
        "number": one.epoch,
        "sample_seed": None if one.sample_seed is None else list(one.sample_seed),
        "done": one.done,
        "turn": one.turn,
        "drawn": one.drawn,
        "first_missing": one.first_missing,
        "had_later": list(one.had_later),
        "index": one.index,
        "unsettled": one.unsettled,
    }


def _add_workers(state: dict[str, Any], loader: Any, checkpoint: Checkpoint, text: _Texts) -> None:
    if loader.num_workers == 0:  # the dataset is the same object in all epochs
        worker = _worker(checkpoint.workers[0], text, 0)
        if not isinstance(loader.dataset, IterableDataset):
            worker["dataset_state"] = to_plain(checkpoint.dataset)
        state |= worker
        return
    keeps = loader.persistent_workers or not checkpoint.finished
    state["_snapshot"] = {
        "_worker_snapshots": {
            f"worker_{number}": _worker(one, text, number)
            for number, one in enumerate(checkpoint.workers if keeps else ())
        }
    }


def _worker(one: WorkerCheckpoint, text: _Texts, number: int) -> dict[str, Any]:
    seat, stream = one.seat, one.stream

    def told(name: str, raw: bytes | None) -> str | None:
        return None if raw is None else text(f"{name} {number}", raw)

    made: dict[str, Any] = {
        "answered": seat.answered,
        "epochs_done": seat.epochs_done,
        "batches_done": seat.batches_done,
        "exhausted": seat.exhausted,
        "random_state": told("random", one.random_state),
        "dataset_state": None,
        "fetcher_state": None,
    }
    if stream is None:
        return made | _dataset_state(one.dataset)
    made |= _dataset_state(stream.point.state)
    made |= {
        "random_before": told("before", one.random_before),
        "stream": {
            "delivered": stream.delivered,
            "last": stream.point.mark,
            "digest": stream.point.digest,
            "has_state": stream.point.state is not None,
            "before": _opened(stream.point.state_before),
            "between_epochs": _opened(stream.state_between_epochs),
            "epoch_state": told("epoch", stream.epoch_state),
            "seeds": to_plain(tuple(stream.seeds)),
        },
    }
    return made


def _opened(state: bytes | None) -> Any:
    return None if state is None else to_plain(pickle.loads(state))  # a worker of ours made it


def _dataset_state(state: bytes | None) -> dict[str, Any]:
    """Where those who know torchdata's states look for it."""
    if state is None:
        return {}
    made = _opened(state)
    found: dict[str, Any] = {"dataset_state": made.pop("dataset")}
    if made:
        found["fetcher_state"] = {
            "dataset_iter_state": made.pop("iterator"),
            "fetcher_ended": made.pop("ended"),
            **made,
        }
    return found


# -- what has to be the same ----------------------------------------------------------------


def _facts(loader: Any) -> dict[str, Any]:
    """What a state says of its loader."""
    iterable = isinstance(loader.dataset, IterableDataset)
    generator = loader.generator
    here, given = rank(), option_sources.of(loader)
    facts: dict[str, Any] = {
        "kind": "iterable" if iterable else "map-style",
        "length": None if iterable else _length(loader.dataset),
        "num_workers": loader.num_workers,
        "batch_size": loader.batch_size,
        "drop_last": loader.drop_last,
        "persistent_workers": loader.persistent_workers,
        "worker_method": str(given["worker_method"]),
        "start_method": _start_method(loader, given["worker_method"]),
        "seeding": _seeding(given["seeding"]),
        "generator": None if generator is None else generator.initial_seed(),
        "rank": here.number,
        "samplers": [],
        "settings": {},
    }
    if not iterable:
        for path, part in samplers_of(loader).items():
            facts["samplers"].append(f"{type(part).__module__}.{type(part).__qualname__}")
            for name in _OF_SAMPLERS:
                value = getattr(part, name, None)
                if type(value) in (int, bool):
                    facts["settings"][f"{path}.{name}"] = value
    return facts


def _seeding(given: Any) -> str | list[Any]:
    return str(given) if isinstance(given, str) else ["sample", int(given[1])]


def _by_sample(seeding: Any) -> bool:
    return seeding == "sample" or (isinstance(seeding, list) and seeding[:1] == ["sample"])


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _start_method(loader: Any, worker_method: str) -> str | None:
    if loader.num_workers == 0 or worker_method != "multiprocessing":
        return None
    context = loader.multiprocessing_context
    if context is not None:
        return str(context.get_start_method())
    chosen = multiprocessing.get_start_method(allow_none=True)
    return chosen or multiprocessing.get_all_start_methods()[0]


_CHECKS: Final[tuple[tuple[str, str, str], ...]] = (
    (
        "kind",
        "the dataset is {there} in the state and {here} here",
        "give the loader the dataset that the state was taken with",
    ),
    (
        "length",
        "the dataset had {there} samples when the state was taken, and has {here} now",
        "the same indices would be other samples: use the same data",
    ),
    (
        "num_workers",
        "the state is of num_workers={there}, and this loader has num_workers={here}",
        "each worker has random states, and a stream, of its own: use num_workers={there} (samples "
        'of a map-style dataset that are seeded one by one, seeding="sample", take any number)',
    ),
    (
        "batch_size",
        "the state is of batch_size={there}, and this loader has batch_size={here}",
        "use batch_size={there} until the end of this epoch",
    ),
    (
        "drop_last",
        "the state is of drop_last={there}, and this loader has drop_last={here}",
        "use drop_last={there}",
    ),
    (
        "persistent_workers",
        "the state is of persistent_workers={there}, and this loader has persistent_workers={here}",
        "later epochs would get other random numbers: use persistent_workers={there}",
    ),
    (
        "worker_method",
        "the state is of worker_method={there!r}, and this loader has worker_method={here!r}",
        "their workers do not have the same random states: use worker_method={there!r}",
    ),
    (
        "start_method",
        "the workers were started with {there!r} when the state was taken, and are with {here!r} "
        "now",
        'use multiprocessing_context="{there}"',
    ),
    (
        "seeding",
        "the state is of seeding={there!r}, and this loader has seeding={here!r}",
        "use seeding={there!r}",
    ),
    (
        "samplers",
        "the indices came from {there} when the state was taken, and come from {here} now",
        "use the same kind of sampler (shuffle= decides on torch's)",
    ),
    (
        "generator",
        "generator= was {there} when the state was taken, and is {here} now",
        "give the loader a generator with the same seed, or none if it had none",
    ),
    (
        "rank",
        "the state was taken in rank {there}, and is loaded in rank {here}",
        "save the state of each rank, and load its own in each",
    ),
)


def _differences(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, str]:
    """What does not fit, in words, by name."""
    found = {}
    for name, words, to_do in _CHECKS:
        there, here = theirs.get(name), mine[name]
        if name not in theirs or there == here:
            continue
        if name == "generator":
            there, here = _seed_in_words(there), _seed_in_words(here)
        elif name == "samplers":
            there, here = _in_words(there), _in_words(here)
        values = {"there": there, "here": here}
        found[name] = f"{words.format(**values)}; {to_do.format(**values)}"
    if "samplers" not in found:
        settings = theirs.get("settings", {})
        for path, here in mine["settings"].items():
            there = settings.get(path, here)
            if there != here:
                found[path] = (
                    f"{path} was {there} when the state was taken, and is {here} now; "
                    f"make the sampler with {path.rpartition('.')[2]}={there}"
                )
    return found


def _seed_in_words(seed: int | None) -> str:
    return "None" if seed is None else f"one with seed {seed}"


def _in_words(kinds: Any) -> str:
    return " of ".join(kinds) if isinstance(kinds, list) else str(kinds)


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
        loaded = _read_torchdatas(loader, state, strict)
    else:
        loaded = _read(loader, state, strict)
    loaded.told.make(loader.dataset)
    there.loaded, there.told = loaded, loaded.told
    there.epochs.told_midway |= bool(loaded.told)
    there.epochs.next = loaded.next_epoch
    known, told = loaded.generators, epoch_of(loader)
    between = loaded.checkpoint is None or loaded.checkpoint.finished
    if between and known is not None and known.epoch is not None and told is not None:
        there.epochs.sampler = known.epoch
        if told[1] == 0:  # it was told nothing else yet
            told[0].set_epoch(known.epoch)
    if loader.persistent_workers and loader._iterator is not None:
        runtime.close(loader)


def _read(loader: Any, state: Mapping[str, Any], strict: bool) -> Loaded:
    version = state.get("version")
    if type(version) is not int:
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
        theirs = state["loader"]
        finished = bool(state[FINISHED])
        now = _start(state["sampler"], "now")
        checkpoint = _checkpoint(state, finished, now)
        program = state["sampler"].get("program")
        told, names = _read_told(state.get("told"), checkpoint)
        next_epoch = operator.index(state["next_epoch"])
    except (KeyError, TypeError, ValueError, AttributeError, EOFError) as error:
        raise StateError(
            f"the state is damaged or incomplete ({type(error).__name__}: {error}); it was "
            "probably cut short when it was written"
        ) from error
    mine = _facts(loader)
    differences = _differences(theirs, mine)
    if {theirs.get("worker_method"), mine["worker_method"]} == {"multiprocessing", "ray"}:
        for name in ("worker_method", "start_method"):  # an actor has a process's random states
            differences.pop(name, None)
    if checkpoint is not None and checkpoint.unsettled:
        differences["unsettled"] = (
            "the state was taken when the loader was closed while its persistent workers were "
            "still busy with an epoch that had been left early; take the state before the loader "
            "is closed"
        )
    if _by_sample(theirs.get("seeding")) and checkpoint is not None and mine["kind"] != "iterable":
        # A sample's random numbers depend on nothing of the workers.
        spread = _OF_WORKERS & differences.keys()
        if any(one.dataset is not None for one in checkpoint.workers):
            spread = set()  # but each worker's dataset has a state
        for name in spread:
            del differences[name]
        if spread:
            workers = max(1, loader.num_workers)
            turn = checkpoint.done % workers
            anew = _anew(checkpoint.done, workers, iterable=False)
            checkpoint = replace(checkpoint, workers=anew, turn=turn)
    if checkpoint is None or (checkpoint.finished and not loader.persistent_workers):
        # Nothing of the workers is continued: only who draws what in the next epochs matters.
        for name in _OF_WORKERS - {"persistent_workers"} | {"batch_size", "drop_last"}:
            differences.pop(name, None)
    if differences and strict:
        many = "\n".join(f"- {words}" for words in differences.values())
        raise StateError(f"the state does not fit this loader:\n{many}\nOr: {_START_ANEW}")
    if differences:
        for words in differences.values():
            warnings.warn(f"holdfast: resumed, but not exactly: {words}", stacklevel=4)
        if checkpoint is not None:
            checkpoint = _nearest(checkpoint, loader, theirs, differences)
        if "samplers" in differences:
            now = replace(now, state=None)
    for name in dict.fromkeys([*told.held, *(one.name for one in told.due)]):
        try:
            check_change(loader.dataset, name)
        except AttributeError as error:
            raise StateError(
                f"in the run of this state loader.broadcast() has set {name!r} of the dataset, and "
                f"this dataset ({type(loader.dataset).__qualname__}) does not have it: {error}"
            ) from error
    if checkpoint is not None:
        checkpoint = replace(checkpoint, due=told.due_changes())
    return Loaded(copy.deepcopy(dict(state)), checkpoint, now, program, next_epoch, told, names)


def _read_told(told: Any, checkpoint: Checkpoint | None) -> tuple[ToldChanges, list[str]]:
    """What the dataset was told in the run of a state, and the names of what the state does not
    hold of it."""
    if told is None:
        return ToldChanges(), []
    epoch = None if checkpoint is None or checkpoint.finished else checkpoint.epoch
    due = [(_number(draw), str(name), plain) for draw, name, plain in told["due"]]
    return ToldChanges.from_state(told["held"], due, epoch), [*map(str, told["not_held"])]


def _start(sampler: Mapping[str, Any], which: str) -> SamplerStart:
    own = {
        path: (str(one["kind"]), from_text(one["state"])) for path, one in sampler[which].items()
    }
    default = [None if one is None else from_text(one) for one in sampler.get("default", ())]
    if which == "now":
        default = []
    default += [None] * (3 - len(default))
    before = from_plain(sampler.get("before_epoch"))
    if which == "now":
        return SamplerStart(own, tuple(default), sampler["epoch"], state=before)
    return SamplerStart(own, tuple(default), sampler["epoch"], bool(sampler["before_seed"]), before)


def _checkpoint(state: Mapping[str, Any], finished: bool, now: SamplerStart) -> Checkpoint | None:
    epoch = state["epoch"]
    if epoch is None:
        return None
    sampler = state["sampler"]
    begun = now if finished else _start(sampler, "begun") if "begun" in sampler else None
    if "_snapshot" in state:
        snapshots = state["_snapshot"]["_worker_snapshots"]
        workers = tuple(
            _read_worker(snapshots[f"worker_{number}"]) for number in range(len(snapshots))
        )
        dataset = None
    else:
        workers = tuple(_read_worker(state) for _ in range("answered" in state))
        streams = any(one.stream is not None for one in workers)
        dataset = None if streams else from_plain(state.get("dataset_state"))
    account = state["bad_samples"]
    if account is not None and not {"epoch", "seen", "records"} <= account.keys():
        raise ValueError("the counts of bad samples are not complete")
    return Checkpoint(
        finished=finished,
        yielded=_number(state["batches"]),
        done=_number(epoch["done"]),
        turn=_number(epoch["turn"]),
        base_seed=int(epoch["base_seed"]),
        shared_seed=epoch["shared_seed"],
        epoch=_number(epoch["number"]),
        sample_seed=None if epoch["sample_seed"] is None else tuple(epoch["sample_seed"]),
        begun=begun,
        drawn=_number(epoch["drawn"]),
        first_missing=_number(epoch["first_missing"]),
        had_later=tuple(map(_number, epoch["had_later"])),
        index=epoch["index"],
        sampler_state=None if finished else from_plain(sampler.get("state")),
        workers=workers,
        account=account,
        unsettled=bool(epoch["unsettled"]),
        dataset=dataset,
        now=now,
    )


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} where a number of batches was expected")
    return value


def _read_worker(one: Mapping[str, Any]) -> WorkerCheckpoint:
    seat = SeatPosition(
        _number(one["answered"]),
        _number(one["epochs_done"]),
        _number(one["batches_done"]),
        bool(one["exhausted"]),
    )
    random_state = _raw(one["random_state"])
    stream = one.get("stream")
    if stream is None:
        known = one.get("dataset_state")
        dataset = None if known is None else _closed({"dataset": known})
        return WorkerCheckpoint(seat, random_state, dataset=dataset)
    state = None
    if stream["has_state"]:
        fetcher = one["fetcher_state"] or {}
        made = {"dataset": one["dataset_state"]}
        if fetcher:
            made |= {
                "iterator": fetcher["dataset_iter_state"],
                "ended": fetcher["fetcher_ended"],
                "ahead": fetcher["ahead"],
                "made": fetcher["made"],
            }
        state = _closed(made)
    point = StreamPoint(int(stream["last"]), stream["digest"], state, _closed(stream["before"]))
    kept = StreamCheckpoint(
        point,
        _number(stream["delivered"]),
        _raw(stream["epoch_state"]),
        _closed(stream["between_epochs"]),
        EpochSeeds(*from_plain(stream["seeds"])),
    )
    return WorkerCheckpoint(seat, random_state, _raw(one["random_before"]), kept)


def _raw(text: str | None) -> bytes | None:
    return None if text is None else from_text(text)


def _closed(plain: Any) -> bytes | None:
    """A state of the dataset as workers take it."""
    return None if plain is None else pickle.dumps(from_plain(plain))


# -- where it does not fit ------------------------------------------------------------------


def _nearest(
    checkpoint: Checkpoint, loader: Any, theirs: Mapping[str, Any], why: Mapping[str, str]
) -> Checkpoint:
    """Another place to begin, as near as possible."""
    made = replace(checkpoint, index=None, unsettled=False)
    iterable = isinstance(loader.dataset, IterableDataset)
    done, size = made.done, (loader.batch_size or 1)
    if "batch_size" in why and not made.finished:
        samples = done * (theirs.get("batch_size") or 1)
        done = samples // size
        if not iterable and type(loader._index_sampler) is BatchSampler:
            made = replace(made, samples=samples)
        made = replace(made, done=done, first_missing=done, had_later=(), workers=())
    if {"num_workers", "worker_method", "kind"} & why.keys() or not made.workers:
        made = replace(made, workers=_anew(done, max(1, loader.num_workers), iterable))
        made = replace(made, turn=done % max(1, loader.num_workers))
    if "samplers" in why:  # their states are of another class
        made = replace(made, sampler_state=None, begun=_stateless(made.begun))
        made = replace(made, now=_stateless(made.now))
    return made


def _stateless(start: SamplerStart | None) -> SamplerStart | None:
    return None if start is None else replace(start, state=None)


def _anew(done: int, workers: int, iterable: bool) -> tuple[WorkerCheckpoint, ...]:
    """Workers that have made so many batches together, of which nothing else is known."""

    def stream(batches: int) -> StreamCheckpoint | None:
        point = StreamPoint(NO_BATCH, None, None, None)
        return StreamCheckpoint(point, batches) if iterable else None

    return tuple(
        WorkerCheckpoint(seat, stream=stream(seat.batches_done))
        for seat in Position.after(done, workers).seats
    )


def _read_torchdatas(loader: Any, state: Mapping[str, Any], strict: bool) -> Loaded:
    checkpoint = from_torchdata(loader, state)
    return Loaded(copy.deepcopy(dict(state)), checkpoint, None, None, checkpoint.epoch + 1)


# -- going on from it -----------------------------------------------------------------------


@contextlib.contextmanager
def beginning(loader: Any) -> Iterator[tuple[Bookmark, Checkpoint | None]]:
    """While an iterator is made: its bookmark, and where it begins. If it cannot be made, the
    loaded state stays."""
    there = runtime.of(loader)
    loaded, bookmark = there.loaded, Bookmark()
    if loaded is None:
        if there.bookmark is not None:
            last, bookmark.waiting = there.bookmark.last, there.bookmark.waiting
            bookmark.follows_end = last is not None and last.finished
        yield bookmark, None
        there.bookmark = bookmark
        return
    _tell_what_is_missing(there.told, loaded.not_held)
    with there.telling:
        there.told = _with_names(there.told, loaded.not_held)
    checkpoint = loaded.checkpoint
    keeps: Callable[[], Any] = contextlib.nullcontext
    if checkpoint is not None and not checkpoint.finished:
        keeps = default_generators_kept
        there.epochs.go_on(loader, checkpoint.epoch)
        _tell_of_generators(loader, loaded)
    elif loaded.generators is not None:
        loaded.generators.restore(loader, default=False, between_epochs=True)
    try:
        with keeps():
            yield bookmark, checkpoint
            _restore_generators(loader, loaded, bookmark)
    except SamplerDiffers as differs:
        raise StateError(
            f"the sampler does not give the indices again that it gave before the state was "
            f"taken: started from the same random generators, draw {differs.draw} of {differs.of} "
            "was another or was missing. The data or the sampler has changed, or the sampler "
            "depends on more than its generators and its epoch; give it state_dict() and "
            f"load_state_dict(), which are used then. Or: {_START_ANEW}"
        ) from None
    if checkpoint is not None and not checkpoint.finished:
        there.epochs.go_on(loader, loaded.next_epoch)
    there.bookmark, there.loaded = bookmark, None


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


def _warn_of_torchs(why: str) -> None:
    warnings.warn(
        f"this loader runs with torch's own engine ({why}), which does not tell where it is: its "
        "state cannot be resumed from",
        stacklevel=4,
    )
