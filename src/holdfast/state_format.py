"""The form of a loader's state (docs/resume.md): plain data from a checkpoint, and back."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Mapping
from typing import Any, Final

from torch.utils.data import IterableDataset

from holdfast.engine.checkpoint import Checkpoint, StreamCheckpoint, WorkerCheckpoint
from holdfast.engine.continuation import StreamPoint
from holdfast.engine.events import SeatPosition
from holdfast.engine.sampler_draws import SamplerStart
from holdfast.plain_data import from_plain, from_text, to_plain, to_text
from holdfast.worker.sample_seeding import EpochSeeds

FINISHED: Final = "_iterator_finished"


# -- written ---------------------------------------------------------------------------------


class Texts:
    """Random states as text. Most have not changed since the last call."""

    def __init__(self, known: dict[str, tuple[bytes, str]]) -> None:
        self._known = known

    def __call__(self, name: str, raw: bytes) -> str:
        before = self._known.get(name)
        if before is None or before[0] != raw:
            before = self._known[name] = (raw, to_text(raw))
        return before[1]


def generators(start: SamplerStart, text: Texts, when: str) -> dict[str, Any]:
    return {
        path: {"kind": kind, "state": text(f"{when} {path}", raw)}
        for path, (kind, raw) in start.own.items()
    }


def add_checkpoint(state: dict[str, Any], loader: Any, checkpoint: Checkpoint, text: Texts) -> None:
    """Put it into a state that has the keys of one without."""
    state["epoch"] = _epoch(checkpoint)
    begun = checkpoint.begun
    if begun is not None and not checkpoint.finished:
        state["sampler"] |= {
            "begun": generators(begun, text, "begun"),
            "default": [
                None if one is None else text(f"default {number}", one)
                for number, one in enumerate(begun.default)
            ],
            "epoch": begun.epoch,
            "before_seed": begun.before_seed,
            "state": to_plain(checkpoint.sampler_state),
            "ended": checkpoint.sampler_ended,
            "before_epoch": to_plain(begun.state),
            "left": begun.left,
        }
    _add_workers(state, loader, checkpoint, text)


def _epoch(one: Checkpoint) -> dict[str, Any]:
    return {
        "base_seed": one.base_seed,
        "shared_seed": one.shared_seed,
        "number": one.epoch,
        "sample_seed": None if one.sample_seed is None else list(one.sample_seed),
        "done": one.done,
        "turn": one.turn,
        "drawn": one.drawn + one.waiting,
        "first_missing": one.first_missing,
        "had_later": list(one.had_later),
        "index": one.index,
        "unsettled": one.unsettled,
    }


def _add_workers(state: dict[str, Any], loader: Any, checkpoint: Checkpoint, text: Texts) -> None:
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


def _worker(one: WorkerCheckpoint, text: Texts, number: int) -> dict[str, Any]:
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
            "shares_draws": stream.shares_draws,
        },
    }
    return made


def _opened(state: bytes | None) -> Any:
    return None if state is None else to_plain(pickle.loads(state))  # a worker of ours made it


def _dataset_state(state: bytes | None) -> dict[str, Any]:
    """Where users of torchdata's loader look for it in a state."""
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


# -- read ------------------------------------------------------------------------------------


def read_start(sampler: Mapping[str, Any], which: str) -> SamplerStart:
    own = {
        path: (str(one["kind"]), from_text(one["state"])) for path, one in sampler[which].items()
    }
    epoch, before = _number(sampler["epoch"]), from_plain(sampler.get("before_epoch"))
    if which == "now":
        return SamplerStart(own, epoch=epoch, state=before)
    default = (*map(_raw, sampler["default"]), None, None, None)[:3]
    before_seed, left = bool(sampler["before_seed"]), bool(sampler["left"])
    return SamplerStart(own, default, epoch, before_seed, before, left)


def read_checkpoint(
    state: Mapping[str, Any], finished: bool, now: SamplerStart
) -> Checkpoint | None:
    epoch, facts = state["epoch"], state["loader"]
    if epoch is None:
        if natural(state["batches"]):
            raise ValueError("batches of no epoch")
        return None
    sampler = state["sampler"]
    begun = now if finished else read_start(sampler, "begun") if "begun" in sampler else None
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
    _check_number_of_workers(len(workers), facts, finished)
    account = state["bad_samples"]
    if account is not None and not {"epoch", "seen", "records"} <= account.keys():
        raise ValueError("the counts of bad samples are not complete")
    batches, done, seed = natural(state["batches"]), natural(epoch["done"]), epoch["sample_seed"]
    if batches > done:
        raise ValueError(f"{batches} batches, of {done} that were made")
    return Checkpoint(
        finished=finished,
        yielded=batches,
        done=done,
        turn=natural(epoch["turn"]),
        base_seed=natural(epoch["base_seed"]),
        shared_seed=_number(epoch["shared_seed"]),
        epoch=natural(epoch["number"]),
        sample_seed=None if seed is None else _two_numbers(*seed),
        begun=begun,
        drawn=natural(epoch["drawn"]),
        first_missing=natural(epoch["first_missing"]),
        had_later=tuple(map(natural, epoch["had_later"])),
        index=_number(epoch["index"]),
        sampler_state=None if finished else from_plain(sampler.get("state")),
        sampler_ended=bool(sampler.get("ended")),
        workers=workers,
        account=account,
        unsettled=bool(epoch["unsettled"]),
        dataset=dataset,
        now=now,
    )


def _check_number_of_workers(found: int, facts: Mapping[str, Any], finished: bool) -> None:
    """Those that are not persistent are in no state of the end of an epoch."""
    expected = max(1, natural(facts["num_workers"]))
    none = finished and not facts["persistent_workers"] and facts["num_workers"]
    if found != expected and not (none and not found):
        raise ValueError(f"the positions of {found} workers, of {expected}")


def natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.60} where a number of batches was expected")
    return value


def _number(value: Any) -> int | None:
    if value is not None and type(value) is not int:
        raise ValueError(f"{value!r:.60} where a number was expected")
    return value


def _two_numbers(one: Any, other: Any) -> tuple[int, int]:
    return operator.index(one), operator.index(other)


def _read_worker(one: Mapping[str, Any]) -> WorkerCheckpoint:
    seat = SeatPosition(
        natural(one["answered"]),
        natural(one["epochs_done"]),
        natural(one["batches_done"]),
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
    point = StreamPoint(
        int(stream["last"]), _number(stream["digest"]), state, _closed(stream["before"])
    )
    kept = StreamCheckpoint(
        point,
        natural(stream["delivered"]),
        _raw(stream["epoch_state"]),
        _closed(stream["between_epochs"]),
        EpochSeeds(*from_plain(stream["seeds"])),
        shares_draws=bool(stream.get("shares_draws")),
    )
    return WorkerCheckpoint(seat, random_state, _raw(one["random_before"]), kept)


def _raw(text: str | None) -> bytes | None:
    return None if text is None else from_text(text)


def _closed(plain: Any) -> bytes | None:
    """A state of the dataset as workers take it."""
    return None if plain is None else pickle.dumps(from_plain(plain))
