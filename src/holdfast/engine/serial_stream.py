"""The stream of an iterable dataset without workers: where it is, and how to get there again.

It is taken up in the same ways as that of a worker that died (`continuation`), in this process. If
one way fails, the next is tried on the same dataset: what ``load_state_dict`` has assigned is taken
back before that (`loaded_state`).
"""

from __future__ import annotations

import functools
import logging
import operator
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from holdfast.autopsy.blackbox import NoRecorder
from holdfast.engine.checkpoint import StreamCheckpoint, WorkerCheckpoint
from holdfast.engine.continuation import (
    AGAIN,
    STATE,
    CannotResume,
    Recovery,
    ResumptionPlan,
    ResumptionResult,
    StreamProgress,
    choose_plan,
)
from holdfast.engine.deaths import tell_resumed
from holdfast.engine.events import SeatPosition
from holdfast.loader_identity import LoaderIdentity
from holdfast.worker import loaded_state
from holdfast.worker.batch_fingerprint import (
    DROPPED_BATCH,
    NO_BATCH,
    fingerprint,
    fingerprint_of_error,
)
from holdfast.worker.fetch import has_state
from holdfast.worker.generator_states import global_states
from holdfast.worker.interface import WorkerSetup
from holdfast.worker.randomness import Randomness
from holdfast.worker.sample_seeding import EpochSeeds, kept_states
from holdfast.worker.stream_resumption import (
    StreamResumption,
    begins_again_there,
    begun_from,
    opened,
    state_now,
)
from holdfast.worker.tolerant import DROPPED

log = logging.getLogger("holdfast")


class SerialStream:
    """The stream of one `SerialIterator`. If the dataset or its iterator has a state, that is asked
    for after every batch, as in a worker."""

    def __init__(self, iterator: Any, resting: bytes | None = None) -> None:
        """Before the iterator begins to iterate over the dataset. `resting`: the state in which an
        epoch before has left the dataset."""
        self._iterator = weakref.proxy(iterator)
        self.progress = StreamProgress()
        self.progress.state_between_epochs = resting
        instead = kept_states(iterator._seeds, iterable=True)
        self.randomness = Randomness(self._roots, instead=instead)
        self._random_before: bytes | None = None
        self._tracks = False
        # A dataset may shuffle when it is begun, with the program's generators or its own.
        self.progress.epoch_state = self.randomness.saved()
        self._remarked = False
        self._shared = _SharedDraws()
        self._batches = 0  # those of this stream, in this process
        self._until_look = 1 if iterator._seeds is None else -1  # batches; 0: when the next begins

    def begun(self) -> None:
        """It has begun."""
        self._tracks = has_state(self._iterator._dataset) or has_state(self._fetcher().iterator)

    def _fetcher(self) -> Any:
        """None before it has begun."""
        fetcher = self._iterator._careful or self._iterator._dataset_fetcher
        return _Fetcher(fetcher) if hasattr(fetcher, "dataset_iter") else fetcher

    def _roots(self) -> Iterator[tuple[str, Any]]:
        yield "dataset", self._iterator._dataset
        yield "collate_fn", self._iterator._collate_fn
        fetcher = self._fetcher()
        if fetcher is not None:
            yield "iterator", fetcher.iterator

    # -- while it is drawn from -----------------------------------------------------------

    def begin_batch(self) -> bytes | None:
        """What `end_batch` is to be given."""
        if self._tracks:
            return self.randomness.saved()
        if not self._until_look:
            self._until_look = self._shared.look(self._batches, begins=True)
        return None

    def end_batch(self, before: bytes | None, batch: Any, error: BaseException | None) -> None:
        """A batch was made, or an error came in place of it."""
        if not self._tracks:
            self._batches += 1
            self._until_look -= 1
            if not self._until_look:
                self._until_look = self._shared.look(self._batches)
            return
        if error is not None:
            mark = fingerprint_of_error(error)
        else:
            mark = DROPPED_BATCH if batch is DROPPED else fingerprint(batch)
        self.progress.received(mark, self._state() or None, 1)
        self._random_before = before

    def end(self) -> None:
        """The stream has come to its end: with drop_last its last elements were in no batch."""
        if self._tracks and self._iterator._drop_last:
            self.progress.received(NO_BATCH, self._state() or None, 1)

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
        if self._shared.found:
            stream = replace(stream, shares_draws=True)
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
        kept: ResumptionPlan | None = None  # leads there, and perhaps to the same place later
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
            found = self._attempt(begun, plan)
            if found.to_be_tried_again:
                self.progress.raised += 1
            elif not found.leaves:
                if plan.way != STATE or recovery != "auto" or not self._is_doubtful():
                    break
                if not self._begins_there_again(plan):
                    found = self._attempt(begun, plan)
                    break
                kept = plan
                unfit |= {STATE}
                continue
            unfit |= found.unfit
        if kept is not None and (found.lost or found.exact is False):
            found = self._attempt(begun, kept)  # this epoch is right at least
            _warn_of_later_epochs(origin)
        if begun.random_state is not None:
            self.randomness.own.restore(begun.random_state)
        self.randomness.own.give_up()
        self.begun()
        tell_resumed([(None, found)], time.monotonic() - began, origin)
        if begun.stream.shares_draws and found.way in AGAIN and found.delivered:
            self._shared.found = True
            _warn_of_shared_draws(origin)
        return found.in_words() if found.lost else None

    def _attempt(self, begun: WorkerCheckpoint, plan: ResumptionPlan) -> ResumptionResult:
        return StreamResumption(_Replica(self, begun.seat, self.progress.epoch_state), plan)()

    def _is_doubtful(self) -> bool:
        """Whether loading a state has assigned what cannot be taken back before the next epoch: it
        may be the number of the epoch, or the place where all epochs begin from now on."""
        return bool(loaded_state.doubtful(self._iterator._dataset))

    def _begins_there_again(self, plan: ResumptionPlan) -> bool:
        """Whether the dataset would begin later epochs from the state that was loaded."""
        dataset = self._iterator._dataset
        assert plan.state is not None
        loaded_state.take_back(dataset, everything=True)
        loaded_state.load(dataset, opened(plan.state)["dataset"])
        return begins_again_there(dataset, functools.partial(begun_from, dataset, plan.state))

    def make_fetcher(self, state: dict[str, Any] | None) -> None:
        """Begin the epoch, from a state if one is given."""
        iterator = self._iterator
        loaded_state.take_back(iterator._dataset, everything=True)
        if state is not None and state["dataset"] is not None:
            loaded_state.load(iterator._dataset, state["dataset"])
        iterator.begin_stream()
        if state is not None:
            self._fetcher().go_on_from(state)


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


class _SharedDraws:
    """Whether the program draws between two batches from a global generator from which the stream
    draws in the second of them. When the stream is drawn again, the program's draws are missing.
    Looked at in the second batch, the fourth, the eighth and so on, and in every 64th."""

    def __init__(self) -> None:
        self.found = False
        self._states = global_states()
        self._before: list[bytes] = []  # the states after the batch before
        self._began: list[bytes] = []  # and when this one began

    def look(self, batches: int, begins: bool = False) -> int:
        """When a batch begins that is looked at, and after so many batches. Returns after how many
        more it is to be called."""
        now = [state.read() for state in self._states]
        if begins:
            self._began = now
            return 1
        if self._began:
            between = map(operator.ne, self._before, self._began)
            self.found |= any(map(operator.and_, between, map(operator.ne, self._began, now)))
            self._began = []
            if self.found:
                return -1
            return min(batches, 64) - 1 or self.look(batches)
        self._before = now
        return 0


def _warn_of_later_epochs(origin: LoaderIdentity) -> None:
    log.warning(
        "%sresumed: the dataset begins every epoch at the place where a state was loaded: what "
        "comes before it may be missing in later epochs. Let __iter__ use a loaded position once, "
        "and begin at the start the next time",
        origin.prefix,
    )


def _warn_of_shared_draws(origin: LoaderIdentity) -> None:
    log.warning(
        "%sresumed: the dataset has no state, and the program draws random numbers between batches "
        "from a global generator (of torch, random or numpy.random) from which the dataset draws "
        "too. It was drawn again without the program's draws: samples that it has chosen or "
        "ordered with that generator, after the first batch, may come in another order now. Give "
        "the dataset a generator of its own, or state_dict() and load_state_dict(), or use "
        'seeding="sample" or a worker',
        origin.prefix,
    )


@dataclass(frozen=True)
class _Host:
    recorder: NoRecorder

    def private(self) -> int:
        return 0  # nothing is rehearsed here


@dataclass(frozen=True)
class _Blueprint:
    batch_index: list[None] | None


class _Replica:
    """In place of a worker's replica."""

    def __init__(self, stream: SerialStream, seat: SeatPosition, epoch_state: bytes | None) -> None:
        iterator = stream._iterator
        self._stream = stream
        self.told_error: BaseException | None = None
        self.dataset = iterator._dataset
        self.randomness = stream.randomness
        self.setup = WorkerSetup(
            worker=0,
            generation=0,
            seeds=EpochSeeds(iterator._shared_seed, iterator._sample_seed),
            batches_done=seat.batches_done,
            exhausted=seat.exhausted,
            epoch_state=epoch_state,
        )
        self.host = _Host(iterator._recorder)
        batched = iterator._auto_collation
        self.blueprint = _Blueprint([None] * iterator._batch_size if batched else None)

    @property
    def fetcher(self) -> Any:
        return self._stream._fetcher()

    def make_fetcher(self, state: dict[str, Any] | None = None) -> None:
        self._stream.make_fetcher(state)

    def seed_datapipe(self, seed: int | None) -> None:
        pass  # torch's iterator has done that

    def hear_past(self, before: tuple[int, int] | None, settled: int) -> None:
        pass  # the trainer's dataset was told everything

    def fail(self, error: BaseException) -> None:
        raise error
