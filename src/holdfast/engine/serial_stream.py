"""The stream of an iterable dataset without workers: where it is, and how to get there again.

It is taken up in the same ways as that of a worker that died (`continuation`), in this process. If
one way fails, the next is tried on the same dataset: what ``load_state_dict`` has assigned is taken
back before that (`loaded_state`).
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from holdfast.engine.checkpoint import StreamCheckpoint, WorkerCheckpoint
from holdfast.engine.continuation import (
    CannotResume,
    Recovery,
    StreamProgress,
    choose_plan,
)
from holdfast.engine.deaths import tell_resumed
from holdfast.engine.events import SeatPosition
from holdfast.loader_identity import LoaderIdentity
from holdfast.worker import loaded_state
from holdfast.worker.batch_fingerprint import DROPPED_BATCH, fingerprint, fingerprint_of_error
from holdfast.worker.fetch import IterableFetcher, has_state
from holdfast.worker.randomness import Randomness
from holdfast.worker.sample_seeding import EpochSeeds
from holdfast.worker.stream_resumption import StreamResumption, state_now
from holdfast.worker.tolerant import DROPPED

log = logging.getLogger("holdfast")


class SerialStream:
    """The stream of one `SerialIterator`. If the dataset or its iterator has a state, that is asked
    for after every batch, as in a worker."""

    def __init__(self, iterator: Any, begun: bool = True, resting: bytes | None = None) -> None:
        """`begun`: the iterator has begun to iterate over the dataset. `resting`: the state in
        which an epoch before has left the dataset at its end."""
        self._iterator = weakref.proxy(iterator)
        self.progress = StreamProgress()
        self.randomness = Randomness(self._roots)
        self._random_before: bytes | None = None
        self._tracks = begun and self._has_state()
        if begun:
            self.progress.state_between_epochs = resting
            if iterator._seeds is None:  # otherwise nothing is drawn from the program's
                self.progress.epoch_state = self.randomness.saved()
        self._remarked = False

    def _has_state(self) -> bool:
        return has_state(self._iterator._dataset) or has_state(self._fetcher().iterator)

    def _fetcher(self) -> Any:
        fetcher = self._iterator._careful or self._iterator._dataset_fetcher
        return fetcher if isinstance(fetcher, IterableFetcher) else _Fetcher(fetcher)

    def _roots(self) -> Iterator[tuple[str, Any]]:
        yield "dataset", self._iterator._dataset
        yield "collate_fn", self._iterator._collate_fn
        yield "iterator", self._fetcher().iterator

    # -- while it is drawn from -----------------------------------------------------------

    def begin_batch(self) -> bytes | None:
        """What `end_batch` is to be given."""
        return self.randomness.saved() if self._tracks else None

    def end_batch(self, before: bytes | None, batch: Any, error: BaseException | None) -> None:
        """A batch was made, or an error came in place of it."""
        if not self._tracks:
            return
        if error is not None:
            mark = fingerprint_of_error(error)
        else:
            mark = DROPPED_BATCH if batch is DROPPED else fingerprint(batch)
        self.progress.received(mark, self._state() or None, 1)
        self._random_before = before

    def _state(self) -> bytes:
        return state_now(self._iterator._dataset, self._fetcher(), self._remark)

    def _remark(self, about: str, words: str) -> None:
        if not self._remarked:
            self._remarked = True
            log.warning("%s", words)

    def checkpoint(self, batches: int, ended: bool) -> WorkerCheckpoint:
        """After so many batches."""
        seat = SeatPosition(batches, batches_done=batches, exhausted=ended)
        own = self.randomness.own.saved()
        stream = StreamCheckpoint.of(self.progress, 0, batches)
        return WorkerCheckpoint(seat, own or None, self._random_before, stream)

    # -- taking it up ---------------------------------------------------------------------

    def take_up(
        self, begun: WorkerCheckpoint, recovery: Recovery, origin: LoaderIdentity
    ) -> str | None:
        """Go to where another run was; why it cannot be, if so. The default generators are not in
        their place afterwards."""
        assert begun.stream is not None
        began = time.monotonic()
        self.progress = begun.stream.progress()
        self._random_before = begun.random_before
        unfit: frozenset[str] = frozenset()
        while True:
            plan = choose_plan(
                "replay" if recovery == "raise" else recovery,
                self.progress,
                exhausted=begun.seat.exhausted,
                epochs_done=int(self.progress.state_between_epochs is not None),
                persistent=False,
                unfit=unfit,
                random_before=begun.random_before,
            )
            if isinstance(plan, CannotResume):
                return plan.why
            replica: Any = _Replica(self, begun.seat, self.progress.epoch_state)
            found = StreamResumption(replica, plan)()
            if found.to_be_tried_again:
                self.progress.raised += 1
            elif not found.leaves:
                break
            unfit |= found.unfit
        if begun.random_state is not None:
            self.randomness.own.restore(begun.random_state)
        self.randomness.own.give_up()
        self._tracks = self._has_state()
        tell_resumed([(None, found)], time.monotonic() - began, origin)
        return found.in_words() if found.lost else None

    def make_fetcher(self, state: dict[str, Any] | None) -> None:
        """Begin the epoch, from a state if one is given."""
        iterator = self._iterator
        loaded_state.take_back(iterator._dataset, everything=True)
        if state is not None and state["dataset"] is not None:
            loaded_state.load(iterator._dataset, state["dataset"])
        iterator.begin_stream()
        if state is None:
            return
        fetcher = self._fetcher()
        if state["iterator"] is not None:
            fetcher.iterator.load_state_dict(state["iterator"])
        fetcher.ended, fetcher.ahead, fetcher.made = state["ended"], state["ahead"], state["made"]


class _Fetcher:
    """torch's fetcher, as ours look."""

    def __init__(self, fetcher: Any) -> None:
        self._of_torch = fetcher
        self.ahead: list[Any] = []
        self.made = 0

    @property
    def iterator(self) -> Any:
        return self._of_torch.dataset_iter

    @property
    def ended(self) -> bool:
        return bool(self._of_torch.ended)

    @ended.setter
    def ended(self, ended: bool) -> None:
        self._of_torch.ended = ended

    def fetch(self, number: int, index: Any) -> Any:
        return self._of_torch.fetch(index)


@dataclass
class _Replica:
    """What `StreamResumption` needs of a worker's replica."""

    stream: SerialStream
    seat: SeatPosition
    epoch_state: bytes | None
    told_error: BaseException | None = None

    def __post_init__(self) -> None:
        iterator, seat = self.stream._iterator, self.seat
        self.dataset = iterator._dataset
        self.randomness = self.stream.randomness
        self.setup = SimpleNamespace(
            epoch_state=self.epoch_state,
            rehearsal=None,
            epochs_done=0,
            batches_done=seat.batches_done,
            exhausted=seat.exhausted,
            seeds=EpochSeeds(iterator._shared_seed, iterator._sample_seed),
            settled=0,
            settled_earlier=0,
        )
        self.host = SimpleNamespace(recorder=iterator._recorder)
        size = iterator._batch_size
        batched = iterator._auto_collation
        self.blueprint = SimpleNamespace(batch_index=[None] * size if batched else None)

    @property
    def fetcher(self) -> Any:
        return self.stream._fetcher()

    def make_fetcher(self, state: dict[str, Any] | None = None) -> None:
        self.stream.make_fetcher(state)

    def seed_datapipe(self, seed: int | None) -> None:
        pass  # torch's iterator has done that

    def hear_past(self, *until: Any) -> None:
        pass  # the trainer's dataset was told everything

    def fail(self, error: BaseException) -> None:
        raise error
