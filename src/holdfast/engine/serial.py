"""The iterator without workers (``num_workers=0``)."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import IterableDataset

from holdfast.autopsy.blackbox import NoRecorder
from holdfast.engine.epoch import EpochCounter
from holdfast.engine.stats import Stats
from holdfast.errors import TooManyBadSamples, WorkerError
from holdfast.options import Settings
from holdfast.private_names import (
    BaseDataLoaderIter,
    IterDataPipe,
    MapDataPipe,
    SingleProcessDataLoaderIter,
    apply_sharding,
    pin,
)
from holdfast.samples.ledger import Account, Ledger
from holdfast.samples.policy import Policy
from holdfast.samples.substitute import copy_index, keys_of
from holdfast.worker import loaded_state
from holdfast.worker.fetch import IterableFetcher, MapFetcher
from holdfast.worker.sample_seeding import SampleSeeds
from holdfast.worker.tolerant import DROPPED
from holdfast.worker.tolerant_iterable import TolerantIterableFetcher
from holdfast.worker.tolerant_map import TolerantMapFetcher

__all__ = ["SerialIterator", "open_account"]

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
    ) -> None:
        loaded_state.take_back(loader.dataset)
        seeds = epochs.begin(loader, options).samples
        self._seeds = None if seeds is None else SampleSeeds(*seeds)
        if self._seeds is None:
            super().__init__(loader)
        else:  # torch's own would call iter(dataset), which may draw from the trainer's generators
            BaseDataLoaderIter.__init__(self, loader)
            if isinstance(self._dataset, (IterDataPipe, MapDataPipe)):
                apply_sharding(self._dataset, self._world_size, self._rank)
        self._stats = stats
        self._ahead: deque[Any] = deque()  # drawn from the sampler before their time
        self._number = 0
        self._account = open_account(self, options, ledger)
        self._careful: TolerantMapFetcher | TolerantIterableFetcher | None = None
        with self._borrowed_generators():
            if options.policy is not None:
                self._careful = self._careful_fetcher(options.policy)
            elif self._seeds is not None:
                self._dataset_fetcher = self._seeding_fetcher()
        stats.epochs += 1

    def _borrowed_generators(self) -> contextlib.AbstractContextManager[None]:
        """With seeding="sample", samples leave the trainer's random state as it was."""
        seeds = self._seeds
        return contextlib.nullcontext() if seeds is None else seeds.borrowed_generators()

    def _seeding_fetcher(self) -> MapFetcher | IterableFetcher:
        kind = IterableFetcher if isinstance(self._dataset, IterableDataset) else MapFetcher
        return kind(self._dataset, **self._for_fetcher())

    def _for_fetcher(self) -> dict[str, Any]:
        return {
            "auto_collation": self._auto_collation,
            "collate_fn": self._collate_fn,
            "drop_last": self._drop_last,
            "recorder": NoRecorder(),
            "arena": None,
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
            iterator = None
            if self._seeds is None:  # torch's has begun already
                iterator = self._dataset_fetcher.dataset_iter
            return TolerantIterableFetcher(self._dataset, iterator=iterator, **common)
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
        if self._careful is not None:
            return self._next_careful_or_stop(self._careful)
        index: Any = self._next_index()  # type: ignore[no-untyped-call]
        try:
            if self._seeds is None:
                data = self._dataset_fetcher.fetch(index)
            else:
                with self._seeds.borrowed_generators():
                    data = self._dataset_fetcher.fetch(self._number, index)
                self._number += 1
        except StopIteration as stop:
            if isinstance(self._dataset, IterableDataset):
                raise
            raise _no_end(index) from stop
        if self._pin_memory:
            data = pin(data, self._pin_memory_device)
        self._stats.batches += 1
        return data

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
            try:
                index: Any = (
                    self._ahead.popleft() if self._ahead else self._next_index()  # type: ignore[no-untyped-call]
                )
            except StopIteration:
                account.end()
                raise
            keys = keys_of(index, self._auto_collation)
            number = self._number
            self._number += 1
            try:
                hints = account.hints_for(number, keys)
                with self._borrowed_generators():
                    data = fetcher.fetch(number, index, hints)
            except StopIteration as stop:
                account.record_and_judge(len(fetcher.reports), fetcher.reports)
                if not isinstance(self._dataset, IterableDataset):
                    raise _no_end(index) from stop
                account.end()
                raise
            except Exception:
                account.record_and_judge(_samples(fetcher, keys), fetcher.reports)
                raise
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


def open_account(iterator: Any, options: Settings, ledger: Ledger) -> Account | None:
    """The books of an epoch; None if bad samples raise as with torch."""
    if options.policy is None:
        return None
    return ledger.open(
        options.policy,
        options.limit,
        options.quarantine,
        iterator._dataset,
        int(iterator._base_seed),
    )
