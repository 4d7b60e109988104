"""The iterator without workers (``num_workers=0``)."""

from __future__ import annotations

import contextlib
import functools
import pickle
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import IterableDataset

from holdfast.autopsy.blackbox import NoRecorder
from holdfast.autopsy.logbook import Logbook
from holdfast.engine.checkpoint import Bookmark, Checkpoint, WorkerCheckpoint
from holdfast.engine.epoch import EpochCounter
from holdfast.engine.events import SeatPosition
from holdfast.engine.loader_records import Stats
from holdfast.engine.progress_log import SerialProgressLog
from holdfast.engine.sampler_draws import (
    SamplerDraws,
    SamplerStart,
    begin_sampler_again,
)
from holdfast.engine.serial_stream import SerialStream
from holdfast.errors import StreamLost, TooManyBadSamples, WorkerError
from holdfast.loader_identity import LoaderIdentity
from holdfast.options import Settings
from holdfast.private_names import (
    BaseDataLoaderIter,
    IterDataPipe,
    MapDataPipe,
    SingleProcessDataLoaderIter,
    apply_sharding,
    new_stream_fetcher,
    pin,
)
from holdfast.samples.account import Account
from holdfast.samples.ledger import Ledger
from holdfast.samples.policy import Policy
from holdfast.samples.substitute import copy_index, keys_of
from holdfast.told_changes import AT_ONCE, DueChange
from holdfast.worker import loaded_state
from holdfast.worker.batch_fingerprint import fingerprint
from holdfast.worker.fetch import IterableFetcher, MapFetcher, has_state, state_of
from holdfast.worker.generator_states import default_generators_kept
from holdfast.worker.randomness import Randomness
from holdfast.worker.sample_seeding import SampleSeeds
from holdfast.worker.stream_resumption import at_the_end, end_epoch, opened
from holdfast.worker.tolerant import DROPPED
from holdfast.worker.tolerant_iterable import TolerantIterableFetcher
from holdfast.worker.tolerant_map import TolerantMapFetcher

_UNNAMED = LoaderIdentity()
LOOK_FURTHER = 64  # batches drawn early when all samples so far are bad


class SerialIterator(SingleProcessDataLoaderIter):
    """``num_workers=0``: torch's own, except that StopIteration does not pass for the end.

    With a policy for bad samples the fetcher is ours. There is no net here for samples that kill.
    """

    def __init__(
        self,
        loader: Any,
        options: Settings,
        stats: Stats,
        ledger: Ledger,
        epochs: EpochCounter,
        bookmark: Bookmark,
        resumed: Checkpoint | None = None,
        origin: LoaderIdentity = _UNNAMED,
        logbook: Logbook | None = None,
    ) -> None:
        """`resumed`: where another run has left this epoch, or ended the one before it."""
        loaded_state.take_back(loader.dataset)
        iterable = isinstance(loader.dataset, IterableDataset)
        continues = resumed is not None and not resumed.finished
        seeds = epochs.begin(loader, options).samples
        self._epoch = epochs.current
        if resumed is not None and continues:
            seeds = resumed.sample_seed
        self._sample_seed = seeds
        self._seeds = None if seeds is None else SampleSeeds(*seeds)
        later = resumed is not None and continues and not iterable and not resumed.begun.before_seed
        if resumed is not None and not iterable and not later:
            begin_sampler_again(loader, resumed, options.policy)
        self._draws = None
        if not iterable:
            start = SamplerStart.of(loader, before_seed=True)
            self._draws = SamplerDraws(start, oldest=_number_of(weakref.ref(self)))
        before = bookmark.before
        if resumed is not None and resumed.finished and iterable:
            before = resumed
            _leave_as_before(loader, resumed)
            _tell_again(loader.dataset, resumed)
        # Whether the fetcher is torch's. One that continues an epoch can be given a state.
        torchs = new_stream_fetcher is not None and not continues if iterable else True
        self._of_torch = torchs and self._seeds is None
        if self._of_torch and not iterable:
            super().__init__(loader)
        else:  # torch's own would call iter(dataset) before its random generators are noted
            BaseDataLoaderIter.__init__(self, loader)
            self._dataset_fetcher: Any = None
            if isinstance(self._dataset, (IterDataPipe, MapDataPipe)):
                apply_sharding(self._dataset, self._world_size, self._rank)
        if resumed is not None and later and self._draws is not None:
            begin_sampler_again(loader, resumed, options.policy)
            self._draws.start = SamplerStart.of(loader)
            self._sampler_iter = iter(self._index_sampler)
        self._stats = stats
        self._batch_size = loader.batch_size
        self._recorder = NoRecorder()
        self._ahead: deque[Any] = deque()  # drawn from the sampler before their time
        self._number = 0  # tasks that are done
        self._asked = 0  # and the one for which an index was drawn, or is being drawn
        self._due: deque[DueChange] = deque()
        self._ended = False
        self._last_index: Any = None
        self._account = open_account(self, options, ledger, resumed)
        self._careful: TolerantMapFetcher | TolerantIterableFetcher | None = None
        self._policy = options.policy
        self._stream: SerialStream | None = None
        if iterable and not continues:  # its generators are noted before iter(dataset) is called
            resting = _state_at_end(before)
            if bookmark.left is not None:
                size = loader.batch_size if self._auto_collation else 1
                resting = _state_where_left(bookmark.left, size)
            self._stream = SerialStream(self, resting=resting)
            self._begin_fetcher()
            self._stream.begun()
        elif not iterable:
            self._begin_fetcher()
        if self._draws is not None:
            self._draws.watch(self)
        if resumed is not None and continues:
            self._go_to(resumed, options, origin)
        roots = functools.partial(_roots_of, self._dataset, self._collate_fn)
        self._randomness = Randomness(roots)  # of a map-style dataset
        if resumed is not None and not iterable:
            self._restore_dataset(resumed)
        if resumed is not None and not (iterable and resumed.finished):
            _tell_again(self._dataset, resumed)
        self._progress = None if logbook is None else SerialProgressLog(logbook, iterable)
        if self._progress is not None:
            weakref.finalize(self, self._progress.end)  # also at the exit of the program
        self._bookmark = bookmark
        if bookmark.waiting is not None and resumed is None:
            self._randomness.own.restore(bookmark.waiting)
        bookmark.waiting = None
        bookmark.now = weakref.WeakMethod(self.checkpoint)
        bookmark.due = weakref.WeakMethod(self.make_what_is_due)
        bookmark.draw = weakref.WeakMethod(self._next_draw)
        stats.epochs += 1

    def _begin_fetcher(self) -> None:
        """Make the fetcher, unless torch's will do, which is there already."""
        with self._borrowed_generators():
            if self._policy is not None:
                self._careful = self._careful_fetcher(self._policy)
            elif not self._of_torch:
                self._dataset_fetcher = self._own_fetcher()
            elif isinstance(self._dataset, IterableDataset):
                self._dataset_fetcher = new_stream_fetcher(
                    self._dataset, self._auto_collation, self._collate_fn, self._drop_last
                )

    # -- where it is ----------------------------------------------------------------------

    def checkpoint(self) -> Checkpoint:
        """Where the run is, for another process to go on from there."""
        draws, number = self._draws, self._number
        first_missing, had_later = self._place()
        has_had = draws is not None and draws.follows(number) and self._last_index is not None
        if self._stream is not None:
            worker = self._stream.checkpoint(number, ended=self._ended)
        else:
            own = self._randomness.own.saved()
            worker = WorkerCheckpoint(SeatPosition(number), own or None)
        return Checkpoint(
            finished=self._ended,
            yielded=self._num_yielded,
            done=number,
            turn=0,
            base_seed=int(self._base_seed),
            shared_seed=self._shared_seed,
            epoch=self._epoch,
            sample_seed=self._sample_seed,
            begun=None if draws is None else draws.start,
            drawn=max(number, self._asked),
            waiting=len(self._ahead),
            first_missing=first_missing,
            had_later=had_later,
            index=fingerprint(self._last_index) if has_had else None,
            sampler_state=None if draws is None else draws.state_before(first_missing),
            sampler_ended=draws is not None and draws.ended == first_missing,
            workers=(worker,),
            account=None if self._account is None else self._account.to_json(),
            dataset=None if self._stream is not None else state_of(self._dataset),
        )

    def _place(self) -> tuple[int, tuple[int, ...]]:
        """The first draw whose batch the program has not had, and those after it whose batch it
        has had, in a run before this one."""
        draws, number = self._draws, self._number
        if draws is None or not draws.has_gaps(number):
            return number, ()
        begun = max(number, self._asked)
        return draws.place(begun, range(number, begun))

    def _next_draw(self) -> int:
        """The draw before which a change holds that is told now. The state of a map-style dataset
        is taken with the loader's, and has it, until the epoch is over."""
        return self._number if self._stream is not None or self._ended else AT_ONCE

    def __del__(self, too_late: Callable[[], bool] = sys.is_finalizing) -> None:
        """A loop that is left early drops its iterator; the loader may be asked where it was."""
        bookmark = getattr(self, "_bookmark", None)
        if bookmark is not None and bookmark.last is None and not too_late():
            with contextlib.suppress(Exception):  # a state of the dataset's that cannot be had
                bookmark.last = self.checkpoint()

    def _go_to(self, resumed: Checkpoint, options: Settings, origin: LoaderIdentity) -> None:
        """Go to where another run was."""
        self._number, self._num_yielded = resumed.done, resumed.yielded
        self._base_seed = resumed.base_seed
        self._due = resumed.due
        if self._draws is not None:
            self._draws.go_to(self, resumed, self._account, lambda account: None)
            return
        self._stream = stream = SerialStream(self)
        found = stream.take_up(resumed.workers[0], options.iterable_recovery, origin)
        if isinstance(found, str):
            raise StreamLost(f"{origin.prefix}the stream cannot be resumed: {found}")

    def _restore_dataset(self, resumed: Checkpoint) -> None:
        if resumed.dataset is not None and has_state(self._dataset):
            self._dataset.load_state_dict(resumed.dataset)  # type: ignore[attr-defined]
        if not resumed.workers:
            return
        begun = resumed.workers[0]
        if begun.random_state is not None:
            self._randomness.own.restore(begun.random_state)

    def _draw(self) -> Any:
        return self._ahead.popleft() if self._ahead else self._next_index()  # type: ignore[no-untyped-call]

    def begin_stream(self) -> None:
        """Begin to iterate over the dataset, with a fetcher of ours."""
        self._of_torch = False
        self._begin_fetcher()

    def _borrowed_generators(self) -> contextlib.AbstractContextManager[object]:
        """With seeding="sample", samples leave the trainer's random state as it was."""
        return contextlib.nullcontext() if self._seeds is None else default_generators_kept()

    def _own_fetcher(self) -> MapFetcher | IterableFetcher:
        kind = IterableFetcher if isinstance(self._dataset, IterableDataset) else MapFetcher
        return kind(self._dataset, **self._for_fetcher())

    def _for_fetcher(self) -> dict[str, Any]:
        return {
            "auto_collation": self._auto_collation,
            "collate_fn": self._collate_fn,
            "drop_last": self._drop_last,
            "recorder": self._recorder,
            "memory": None,
            "faults": None,
            "seeds": self._seeds,
        }

    def _careful_fetcher(self, policy: Policy) -> TolerantMapFetcher | TolerantIterableFetcher:
        common: dict[str, Any] = {
            **self._for_fetcher(),
            "policy": policy,
            "worker_id": None,
            "catch": Exception,
        }
        if isinstance(self._dataset, IterableDataset):
            return TolerantIterableFetcher(self._dataset, **common)
        return TolerantMapFetcher(self._dataset, more=self._look_further, **common)

    def _look_further(self) -> Iterator[tuple[int, Any]]:
        """What the sampler gives next, if none that it has given so far can be a substitute."""
        for number in range(LOOK_FURTHER):
            if number == len(self._ahead):
                try:
                    self._ahead.append(copy_index(self._next_index()))  # type: ignore[no-untyped-call]
                except StopIteration:
                    return
            index = self._ahead[number]
            keys = keys_of(index, self._auto_collation)
            yield from enumerate(keys, (number + 1) << 20)

    def _next_data(self) -> Any:
        progress = self._progress
        if progress is None:
            return self._load_or_stop()
        began = time.monotonic()
        try:
            data = self._load_or_stop()
        except StopIteration:
            progress.end()
            raise
        progress.delivered(time.monotonic() - began, self._samples_of_the_last())
        return data

    def _samples_of_the_last(self) -> int:
        """How many samples the last batch has."""
        keys = keys_of(self._last_index, self._auto_collation)
        if self._careful is None:
            return len(keys)
        skipped = sum(bad.action == "skipped" for bad in self._careful.reports)
        return _samples(self._careful, keys) - skipped

    def make_what_is_due(self) -> None:
        """Make what the run before was told, if it holds for the next batch."""
        number = self._number if self._draws is None else self._draws.ordinal(self._number)
        while self._due and self._due[0].draw <= number:
            self._due.popleft().make(self._dataset)

    def _load_or_stop(self) -> Any:
        if self._due:
            self.make_what_is_due()
        try:
            if self._careful is not None:
                return self._next_careful_or_stop(self._careful)
            return self._next_plain()
        except StopIteration:
            if self._stream is not None and not self._ended:
                self._stream.end()
            self._ended = True
            self._bookmark.last = last = self.checkpoint()
            if self._randomness.own.waiting:  # no batch was left to make these generators
                self._bookmark.waiting = last.workers[0].random_state
            raise

    def _next_plain(self) -> Any:
        self._asked = self._number + 1
        index: Any = self._ahead.popleft() if self._ahead else self._next_index()  # type: ignore[no-untyped-call]
        stream = self._stream
        before = None if stream is None else stream.begin_batch()
        try:
            if self._randomness.own.waiting:
                data = self._randomness.from_waiting_states(lambda: self._fetch(index))
            elif self._of_torch:
                data = self._dataset_fetcher.fetch(index)
            else:
                data = self._fetch(index)
        except StopIteration as stop:
            if isinstance(self._dataset, IterableDataset):
                raise
            self._done(index)
            raise _no_end(index) from stop
        except Exception as error:
            self._done(index, before, error=error)
            raise
        if stream is None:
            self._number += 1
            self._last_index = index
        else:
            self._done(index, before, data)
        if self._pin_memory:
            data = pin(data, self._pin_memory_device)
        self._stats.batches += 1
        return data

    def _fetch(self, index: Any) -> Any:
        if self._of_torch:
            return self._dataset_fetcher.fetch(index)
        with self._borrowed_generators():
            return self._dataset_fetcher.fetch(self._number, index)

    def _done(
        self,
        index: Any,
        before: bytes | None = None,
        batch: Any = None,
        error: BaseException | None = None,
    ) -> None:
        """The consumer gets this, or has got an error for it."""
        self._number += 1
        self._last_index = index
        if self._stream is not None:
            self._stream.end_batch(before, batch, error)

    def _next_careful_or_stop(self, fetcher: TolerantMapFetcher | TolerantIterableFetcher) -> Any:
        try:
            return self._next_careful(fetcher)
        except TooManyBadSamples:
            if self._account is not None:
                self._account.close()
            raise

    def _next_careful(self, fetcher: TolerantMapFetcher | TolerantIterableFetcher) -> Any:
        account = self._account
        assert account is not None
        data: Any = DROPPED
        while data is DROPPED:
            self._asked = self._number + 1
            try:
                index: Any = (
                    self._ahead.popleft() if self._ahead else self._next_index()  # type: ignore[no-untyped-call]
                )
            except StopIteration:
                account.end()
                raise
            keys = keys_of(index, self._auto_collation)
            number = self._number
            before = None if self._stream is None else self._stream.begin_batch()
            try:
                hints = account.hints_for(number, keys)
                if self._randomness.own.waiting:
                    data = self._randomness.from_waiting_states(
                        lambda: fetcher.fetch(number, index, hints)  # noqa: B023
                    )
                else:
                    with self._borrowed_generators():
                        data = fetcher.fetch(number, index, hints)
            except StopIteration as stop:
                account.record_and_judge(len(fetcher.reports), fetcher.reports)
                if not isinstance(self._dataset, IterableDataset):
                    raise _no_end(index) from stop
                account.end()
                raise
            except Exception as error:
                self._done(index, before, error=error)
                account.record_and_judge(_samples(fetcher, keys), fetcher.reports)
                raise
            self._done(index, before, data)
            account.record_and_judge(_samples(fetcher, keys), fetcher.reports)
        if self._pin_memory:
            data = pin(data, self._pin_memory_device)
        self._stats.batches += 1
        return data


def _samples(fetcher: TolerantMapFetcher | TolerantIterableFetcher, keys: Sequence[Any]) -> int:
    """How many samples a batch took: of a stream, the last one may have fewer than it asks for."""
    return fetcher.drawn if isinstance(fetcher, TolerantIterableFetcher) else len(keys)


def _no_end(index: Any) -> WorkerError:
    return WorkerError(
        f"Caught StopIteration while loading samples {index!r}: raised by __getitem__ or "
        "the collate function of a map-style dataset, it would have ended the epoch early"
    )


def _roots_of(dataset: Any, collate_fn: Any) -> Iterator[tuple[str, Any]]:
    """What may have random generators of its own."""
    yield "dataset", dataset
    yield "collate_fn", collate_fn


def _state_at_end(before: Checkpoint | None) -> bytes | None:
    """In which an epoch has left an iterable dataset."""
    if before is None or not before.workers or before.workers[0].stream is None:
        return None
    state = before.workers[0].stream.point.state
    return None if state is None else at_the_end(state)


def _state_where_left(left: Checkpoint, size: int) -> bytes | None:
    """In which an epoch that was left early has left an iterable dataset: the state before its last
    batch, and how many elements were drawn since then; or that before the epoch, and how many were
    drawn in each that was begun since then."""
    stream = left.workers[0].stream
    assert stream is not None
    if stream.point.state_before is not None:
        known = opened(stream.point.state_before)
        return pickle.dumps({**known, "ended": False, "drawn": size - len(known["ahead"])})
    if stream.delivered > 1:  # its state could not be had
        return None
    known = {"dataset": None, "iterator": None, "ended": False}
    if stream.state_between_epochs is not None:
        known = opened(stream.state_between_epochs)
    begun = [*known.get("begun", ()), size * stream.delivered]
    return pickle.dumps({**known, "begun": begun})


def _leave_as_before(loader: Any, resumed: Checkpoint) -> None:
    """Before an epoch: bring an iterable dataset, which is this process's own, to where the epoch
    before has left it, as in a worker (`StreamResumption`)."""
    if not resumed.workers:
        return
    dataset, before, state = loader.dataset, resumed.workers[0], _state_at_end(resumed)
    if state is not None and has_state(dataset):
        with default_generators_kept():
            end_epoch(dataset, state)
    if before.random_state is not None:
        own = Randomness(functools.partial(_roots_of, dataset, loader.collate_fn)).own
        own.restore(before.random_state)


def _tell_again(dataset: Any, resumed: Checkpoint) -> None:
    """After states of the dataset were loaded: what was told since they were taken."""
    for change in resumed.told_later:
        change(dataset)


def _number_of(iterator: weakref.ref[SerialIterator]) -> Callable[[], int]:
    def oldest() -> int:
        there = iterator()
        return 0 if there is None else there._place()[0]

    return oldest


def open_account(
    iterator: Any, options: Settings, ledger: Ledger, resumed: Checkpoint | None
) -> Account | None:
    """The books of an epoch; None if bad samples raise as with torch."""
    if options.policy is None:
        return None
    saved = None if resumed is None else resumed.account
    base_seed = int(iterator._base_seed)
    if resumed is not None and not resumed.finished:
        base_seed = resumed.base_seed
    if resumed is not None and saved is not None:
        ledger.restore(saved, finished=resumed.finished)
    account = ledger.open(
        options.policy, options.limit, options.quarantine, iterator._dataset, base_seed
    )
    if resumed is not None and saved is not None and not resumed.finished:
        account.restore(saved)
    return account
