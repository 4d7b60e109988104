"""Whether a state fits a loader, and the place that is nearest where it does not."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from torch.utils.data import BatchSampler, IterableDataset

from holdfast import option_sources
from holdfast.engine.checkpoint import Checkpoint, StreamCheckpoint, WorkerCheckpoint
from holdfast.engine.continuation import StreamPoint
from holdfast.engine.events import Position
from holdfast.engine.sampler_draws import SamplerStart, samplers_of
from holdfast.errors import StateError
from holdfast.loader_identity import rank
from holdfast.worker.batch_fingerprint import NO_BATCH

_OF_WORKERS: Final = {"num_workers", "worker_method", "start_method", "persistent_workers"}
_OF_SAMPLERS: Final = ("seed", "rank", "num_replicas", "shuffle", "replacement")
"""Attributes of samplers that decide on what they give."""
START_ANEW: Final = (
    "to begin a new epoch instead, do not load the state; to go on as near as possible, "
    "load_state_dict(state, strict=False)"
)


def fitted(
    loader: Any,
    theirs: Mapping[str, Any],
    checkpoint: Checkpoint | None,
    now: SamplerStart,
    strict: bool,
) -> tuple[Checkpoint | None, SamplerStart]:
    """Where this loader begins with a state of that one; `StateError` if it cannot, and without
    `strict` a warning and the nearest place."""
    mine = facts_of(loader)
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
    if checkpoint is not None and loader.num_workers == 0 and "num_workers" in differences:
        # Random states of a worker have its whole process. Here they would be the dataset's only.
        without = (
            replace(one, random_state=None, random_before=None) for one in checkpoint.workers
        )
        checkpoint = replace(checkpoint, workers=tuple(without))
    if checkpoint is None or (checkpoint.finished and not loader.persistent_workers):
        # Nothing of the workers is continued. Only what decides on the next epochs has to fit.
        for name in _OF_WORKERS - {"persistent_workers"} | {"batch_size", "drop_last"}:
            differences.pop(name, None)
    if differences and strict:
        many = "\n".join(f"- {words}" for words in differences.values())
        raise StateError(f"the state does not fit this loader:\n{many}\nOr: {START_ANEW}")
    if differences:
        for words in differences.values():
            warnings.warn(f"holdfast: resumed, but not exactly: {words}", stacklevel=5)
        if checkpoint is not None:
            checkpoint = _nearest(checkpoint, loader, theirs, differences)
        if "samplers" in differences:
            now = replace(now, state=None)
    return checkpoint, now


def facts_of(loader: Any) -> dict[str, Any]:
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


def check_facts(facts: Any) -> Mapping[str, Any]:
    """What `facts_of` gave, perhaps of another release; ValueError if it is damaged."""
    if not isinstance(facts, Mapping):
        raise ValueError(f"{facts!r:.60} where the facts of a loader were expected")
    for name, kinds in _KINDS.items():
        if name not in facts:
            raise ValueError(f"the facts of the loader lack {name!r}")
        if not isinstance(facts[name], kinds):
            raise ValueError(f"{name!r} of the loader is {facts[name]!r:.60}")
    if not all(isinstance(one, str) for one in facts["samplers"]):
        raise ValueError(f"the samplers of the loader are {facts['samplers']!r:.60}")
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


_CHECKS: Final = {
    "kind": "the dataset is {there} in the state and {here} here; give the loader the dataset "
    "that the state was taken with",
    "length": "the dataset had {there} samples when the state was taken, and has {here} now; "
    "the same indices would be other samples: use the same data",
    "num_workers": "the state is of num_workers={there}, and this loader has "
    "num_workers={here}; each worker has random states, and a stream, of its own: use "
    "num_workers={there} (samples of a map-style dataset that are seeded one by one, "
    'seeding="sample", take any number)',
    "batch_size": "the state is of batch_size={there}, and this loader has batch_size={here}; "
    "use batch_size={there} until the end of this epoch",
    "drop_last": "the state is of drop_last={there}, and this loader has drop_last={here}; use "
    "drop_last={there}",
    "persistent_workers": "the state is of persistent_workers={there}, and this loader has "
    "persistent_workers={here}; later epochs would get other random numbers: use "
    "persistent_workers={there}",
    "worker_method": "the state is of worker_method={there!r}, and this loader has "
    "worker_method={here!r}; their workers do not have the same random states: use "
    "worker_method={there!r}",
    "start_method": "the workers were started with {there!r} when the state was taken, and are "
    'with {here!r} now; use multiprocessing_context="{there}"',
    "seeding": "the state is of seeding={there!r}, and this loader has seeding={here!r}; use "
    "seeding={there!r}",
    "samplers": "the indices came from {there} when the state was taken, and come from {here} "
    "now; use the same kind of sampler (shuffle= decides on torch's)",
    "generator": "generator= was {there} when the state was taken, and is {here} now; give the "
    "loader a generator with the same seed, or none if it had none",
    "rank": "the state was taken in rank {there}, and is loaded in rank {here}; save the state "
    "of each rank, and load its own in each",
}


_KINDS: Final[dict[str, Any]] = {
    "kind": str,
    "length": int | None,
    "num_workers": int,
    "batch_size": int | None,
    "drop_last": int,  # or bool, which is one
    "persistent_workers": int,
    "worker_method": str,
    "start_method": str | None,
    "seeding": str | list,
    "generator": int | None,
    "rank": int,
    "samplers": list,
    "settings": Mapping,
}


def _differences(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, str]:
    """What does not fit, in words, by name."""
    found = {}
    for name, words in _CHECKS.items():
        there, here = theirs.get(name), mine[name]
        if name not in theirs or there == here:
            continue
        if name == "start_method" and None in (there, here):
            continue  # only processes have one: the worker method or their number is told
        if name == "generator":
            there, here = (one if one is None else f"one with seed {one}" for one in (there, here))
        elif name == "samplers":
            there, here = _in_words(there), _in_words(here)
        found[name] = words.format(there=there, here=here)
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


def _in_words(kinds: Any) -> str:
    return " of ".join(kinds) if isinstance(kinds, list) else str(kinds)


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
        had = min(made.yielded, done)
        made = replace(made, yielded=had, done=done, first_missing=done, had_later=(), workers=())
        made = replace(made, drawn=-1)
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
