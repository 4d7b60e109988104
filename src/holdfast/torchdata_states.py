"""States that torchdata's StatefulDataLoader has written, for programs that used it before.

Such a state says how many batches were had and with which seed the workers began. A shuffled order
follows from the state of a generator in it. Iterable datasets have their own states in it.

It has no random states of workers: torchdata starts these anew from their seeds when it resumes,
and so does holdfast with such a state. And it has nothing to compare a stream with.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset, RandomSampler

from holdfast.engine.checkpoint import Checkpoint, StreamCheckpoint, WorkerCheckpoint
from holdfast.engine.continuation import StreamPoint
from holdfast.engine.events import Position, SeatPosition
from holdfast.engine.sampler_draws import SamplerStart
from holdfast.errors import StateError
from holdfast.worker.batch_fingerprint import NO_BATCH

log = logging.getLogger("holdfast")

_WHOSE = "this state of torchdata's StatefulDataLoader"


def is_torchdatas(state: Mapping[str, Any]) -> bool:
    """Whether a state has torchdata's layout, with or without workers."""
    return "version" not in state and ("_snapshot" in state or "_num_yielded" in state)


def from_torchdata(loader: Any, state: Mapping[str, Any]) -> Checkpoint:
    """Where a loader begins with such a state; `StateError` if it does not hold enough."""
    try:
        return _read(loader, state)
    except (KeyError, TypeError, AttributeError) as error:
        raise StateError(f"{_WHOSE} is damaged or incomplete ({error!r})") from error


def _read(loader: Any, state: Mapping[str, Any]) -> Checkpoint:
    if "_snapshot" in state:
        snapshot, since = state["_snapshot"], state["_steps_since_snapshot"]
        main, done = snapshot["_main_snapshot"], snapshot["_snapshot_step"] + since
        workers = [snapshot["_worker_snapshots"][name] for name in _names(snapshot)]
        turn = (snapshot["_last_yielded_worker_id"] + 1 + since) % len(workers) if done else 0
        there = main["_num_workers"]
    else:
        main, done, since, workers, turn = state, state["_num_yielded"], 0, [state], 0
        there = 0
    if there != loader.num_workers:
        raise StateError(
            f"{_WHOSE} is of num_workers={there}, and this loader has "
            f"num_workers={loader.num_workers}; use num_workers={there}"
        )
    iterable = isinstance(loader.dataset, IterableDataset)
    if iterable != (workers[0]["fetcher_state"] is not None):
        mine, theirs = ("iterable", "map-style") if iterable else ("map-style", "iterable")
        raise StateError(f"{_WHOSE} is of a dataset that is {theirs}; this one is {mine}")
    _check_batch_size(loader, main)
    return Checkpoint(
        finished=bool(state["_iterator_finished"]),
        yielded=done,
        done=done,
        turn=turn,
        base_seed=int(main.get("_base_seed", 0)),
        shared_seed=main["_shared_seed"],
        epoch=0,
        sample_seed=None,
        begun=None if iterable else SamplerStart({}),
        drawn=-1,  # unknown
        first_missing=done,
        sampler_state=None if iterable else _sampler_state(main, since),
        shuffled=None if iterable else _shuffled(loader, main),
        workers=_streams(workers, done, since) if iterable else _places(workers, done, since),
        dataset=None if iterable or there else state["dataset_state"],
    )


def _names(snapshot: Mapping[str, Any]) -> list[str]:
    return [f"worker_{number}" for number in range(len(snapshot["_worker_snapshots"]))]


def _check_batch_size(loader: Any, main: Mapping[str, Any]) -> None:
    inner, batches = main["_sampler_iter_state"], main["_sampler_iter_yielded"]
    if not isinstance(inner, Mapping) or loader.batch_size is None or not batches:
        return
    there, rest = divmod(inner.get("samples_yielded", 0), batches)
    if there and not rest and there != loader.batch_size and batches > 1:
        raise StateError(
            f"{_WHOSE} is of batch_size={there}, and this loader has "
            f"batch_size={loader.batch_size}; use batch_size={there} until the end of this epoch"
        )


def _sampler_state(main: Mapping[str, Any], since: int) -> Any:
    """Of a sampler of the user's, if it has one."""
    found = main["_index_sampler_state"]
    inner = main["_sampler_iter_state"]
    if found is None and isinstance(inner, Mapping):
        found = inner.get("sampler_state")
        if found is None and "samples_yielded" not in inner:
            found = inner
    if found is not None and since:
        raise StateError(
            f"{_WHOSE} has the sampler's state of {since} batches before; take it with "
            "snapshot_every_n_steps=1"
        )
    return found


def _shuffled(loader: Any, main: Mapping[str, Any]) -> bytes | None:
    """The state of the generator from which torchdata's own sampler makes its order."""
    inner: Any = main["_sampler_iter_state"]
    inner = inner.get("sampler_iter_state", inner) if isinstance(inner, Mapping) else None
    if not isinstance(inner, Mapping) or "generator" not in inner:
        return None
    sampler = loader.sampler
    if type(sampler) is not RandomSampler or sampler.replacement:
        raise StateError(
            f"{_WHOSE} is of shuffle=True, and the sampler of this loader is a "
            f"{type(sampler).__qualname__}; use shuffle=True"
        )
    state = torch.as_tensor(inner["generator"], dtype=torch.uint8)
    return bytes(state.numpy().tobytes())


def _places(workers: list[Any], done: int, since: int) -> tuple[WorkerCheckpoint, ...]:
    if len(workers) > 1 or "worker_id" in workers[0]:
        log.warning(
            "resumed from a state of torchdata's: it has no random states of workers, so these "
            "begin again from their seeds, as they do there"
        )
    states = [one["dataset_state"] for one in workers]
    if since and any(state is not None for state in states):
        raise StateError(
            f"{_WHOSE} has the dataset's states of {since} batches before; take it with "
            "snapshot_every_n_steps=1"
        )
    return tuple(
        WorkerCheckpoint(seat, dataset=None if one is None else pickle.dumps({"dataset": one}))
        for seat, one in zip(Position.after(done, len(workers)).seats, states, strict=True)
    )


def _streams(workers: list[Any], done: int, since: int) -> tuple[WorkerCheckpoint, ...]:
    seats = Position.after(done, len(workers)).seats
    return tuple(_stream(*one, since) for one in zip(workers, seats, strict=True))


def _stream(one: Mapping[str, Any], seat: SeatPosition, since: int) -> WorkerCheckpoint:
    fetcher = one["fetcher_state"]
    made = {
        "dataset": one["dataset_state"],
        "iterator": fetcher["dataset_iter_state"],
        "ended": fetcher["fetcher_ended"],
        "ahead": [],
        "made": seat.batches_done,
    }
    known = made["dataset"] is not None or made["iterator"] is not None
    if not known and made["ended"]:
        raise StateError(
            f"{_WHOSE} does not say how many batches each worker had made when the first of them "
            "came to its end, and the dataset has no state; take one earlier or later"
        )
    state = pickle.dumps(made) if known and not since else None
    stream = StreamCheckpoint(
        StreamPoint(NO_BATCH, None, state, None), seat.batches_done, trusted=state is not None
    )
    return WorkerCheckpoint(seat, stream=stream)
