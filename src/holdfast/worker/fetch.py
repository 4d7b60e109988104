"""Loads the samples of one batch and collates them, and notes each step.

The same as torch's fetchers, sample for sample, with two additions. The worker's notes say at any
moment which sample is being loaded. And large samples are copied to their place in the batch one by
one, while they are in the cache, instead of being kept until the whole batch can be stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from time import monotonic
from typing import Any

from torch.utils.data import Subset, default_collate, default_convert

from holdfast.autopsy.blackbox import COLLATE, FETCH
from holdfast.autopsy.tally import SampleWatch
from holdfast.transport import stacking
from holdfast.transport.placement import Memory, Placement
from holdfast.worker.faults import Faults
from holdfast.worker.sample_seeding import SampleSeeds, SeededItems, first_key

SELDOM = 15  # after a batch of small samples, batches in which no large ones are expected


class Fetcher:
    """Makes batches of a dataset, of either kind."""

    def __init__(
        self,
        dataset: Any,
        *,
        auto_collation: bool,
        collate_fn: Callable[[Any], Any],
        drop_last: bool,
        recorder: Any,  # a `Recorder`, or a `NoRecorder`
        memory: Memory | None,
        faults: Faults | None,
        seeds: SampleSeeds | None = None,  # with seeding="sample"
    ) -> None:
        self.dataset = dataset
        self.seeds = seeds
        # What samples are loaded from.
        self.source: Any = dataset if seeds is None else SeededItems(dataset, seeds)
        self._draws_in_collate = collate_fn not in (default_collate, default_convert)
        self._batch_key: Any = None  # of this batch, for the seeds of its collation
        self.auto_collation = auto_collation
        self.collate_fn = collate_fn
        self.drop_last = drop_last
        self.recorder = recorder
        self.watch: SampleWatch | None = None  # measures the samples of this batch
        # Where large samples are copied to, one by one.
        self.memory: Memory | None = None
        if memory is not None and auto_collation and collate_fn is default_collate:
            self.memory = memory if stacking.stacks() else None
        self.faults = faults
        self.step = "fetch"  # what it was doing when it raised
        # Called after a few samples; returns after how many to call it again.
        self.tidy: Callable[[], int] = lambda: 1 << 30
        self._until_tidy = 1
        self._leave_out = 0  # batches in which large samples are not looked for
        self._watch = True  # whether to find out if samples are one buffer that is refilled
        # Called with what the user should know: what about, and the words.
        self.remark: Callable[[str, str], object] = lambda about, words: None

    def _collate(self, task: int, data: Any) -> Any:
        if self.faults:
            self.faults.strike("after-fetch", task)
        self.step = "collate"
        self.recorder.note(task, -1, COLLATE)
        if self.faults:
            self.faults.strike("before-collate", task)
        if self.seeds is not None and self._draws_in_collate:
            self._seed_collation(self.seeds)
        batch = self.collate_fn(data)
        if self.faults:
            self.faults.strike("after-collate", task)
        return batch

    def _seed_collation(self, seeds: SampleSeeds) -> None:
        seeds.for_batch(self._batch_key)

    def _placement(self, index: Any) -> Placement | None:
        if self.memory is None:
            return None
        if self._leave_out:
            self._leave_out -= 1
            self._watch = True  # this batch shows nothing
            return None
        try:
            size = len(index)
        except TypeError:
            return None
        if size < 2 or not self._watch:
            return Placement(self.memory, size) if size > 0 else None
        self._watch = False  # one batch is enough
        return Placement(self.memory, size, self._refilled)

    def _refilled(self) -> None:
        self.remark(
            "refilled-buffer",
            "the dataset returns the same memory for several samples of a batch, and fills it anew "
            "for each. Samples of 64 KiB or more are copied into the batch as they are loaded, so "
            "it has each of them as it was returned; of smaller ones, with num_workers=0 and with "
            "torch's loader, the last one would be in the batch again and again. Return a copy "
            "(tensor.clone(), array.copy()), and it is the same everywhere.",
        )

    def _begin(self, task: int, key: Any = None) -> None:
        self._batch_key = key
        self.step = "fetch"
        watch = self.recorder.watch
        self.watch = watch if watch is not None and watch.due() else None
        self.recorder.note(task, -1, FETCH)
        if self.faults:
            self.faults.strike("before-fetch", task)


def makes_batches(dataset: Any) -> bool:
    """Whether the dataset loads a whole batch at once, so that it is not known which sample it is
    loading.

    torch's Subset does so only if the dataset inside it does: sample by sample it gives the same.
    """
    if type(dataset) is Subset:
        return makes_batches(dataset.dataset)
    return bool(getattr(dataset, "__getitems__", None))


class MapFetcher(Fetcher):
    """For datasets with ``__getitem__``."""

    def fetch(self, task: int, index: Any) -> Any:
        self._begin(task, self._key_of_batch(index))
        if not self.auto_collation:
            self.recorder.note(task, 0, FETCH)
            data = self.source[index]
        elif makes_batches(self.dataset):
            data = self.source.__getitems__(index)
        else:
            placement = self._placement(index)  # must live until its rows are collated
            data = self._one_by_one(index, placement)
        return self._collate(task, data)

    def fetch_one(self, task: int, index: Any, position: int | None) -> None:
        """Load one sample and drop it, to see whether the worker survives. Without a position, all
        samples of the batch."""
        self.recorder.note(task, -1 if position is None else position, FETCH)
        if not self.auto_collation:
            self.source[index]
        elif position is not None:
            self.source[list(index)[position]]
        elif makes_batches(self.dataset):
            self.source.__getitems__(index)
        else:
            for key in index:
                self.source[key]

    def _key_of_batch(self, index: Any) -> Any:
        if self.seeds is None:
            return None
        return first_key(index) if self.auto_collation else index

    def _one_by_one(self, index: Any, placement: Placement | None) -> list[Any]:
        if self.watch is not None:
            return self._one_by_one_measured(index, placement, self.watch)
        data: list[Any] = []
        cell, source, until_tidy = self.recorder.cell, self.source, self._until_tidy
        keys = enumerate(index)
        if placement is not None:
            # No variable may hold a sample here: the next sample is to reuse its memory.
            for position, key in keys:
                cell[0] = position
                data.append(placement.place(source[key]))
                until_tidy -= 1
                if not until_tidy:
                    until_tidy = self.tidy()
                if placement.useless:
                    self._leave_out = SELDOM
                    break
        for position, key in keys:
            cell[0] = position
            data.append(source[key])
            until_tidy -= 1
            if not until_tidy:
                until_tidy = self.tidy()
        self._until_tidy = until_tidy
        return data

    def _one_by_one_measured(
        self, index: Any, placement: Placement | None, watch: SampleWatch
    ) -> list[Any]:
        data: list[Any] = []
        for position, key in enumerate(index):
            self.recorder.cell[0] = position
            began = monotonic()
            sample = self.source[key]
            watch.add(key, monotonic() - began, sample)
            if placement is not None:
                sample = placement.place(sample)
                if placement.useless:
                    self._leave_out = SELDOM
                    placement = None
            data.append(sample)
            del sample
            self._until_tidy -= 1
            if not self._until_tidy:
                self._until_tidy = self.tidy()
        return data


class IterableFetcher(Fetcher):
    """For datasets with ``__iter__``; raises StopIteration when there is nothing more."""

    def __init__(
        self, dataset: Any, *, iterator: Iterator[Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(dataset, **kwargs)
        if self.seeds is not None:
            self.seeds.begin_stream()
        self.iterator: Iterator[Any] = iter(dataset) if iterator is None else iterator
        # The next element of a stream; from its own random state with seeding="sample".
        self.draw: Callable[[Iterator[Any]], Any]
        self.draw = next if self.seeds is None else self._seed_and_draw
        self.ended = False
        self.ahead: list[Any] = []  # elements read ahead, to replace bad ones
        self.made = 0  # batches it was asked for

    def fetch(self, task: int, index: Any) -> Any:
        self.made += 1
        if self.ended:
            raise StopIteration
        self._begin(task, self.position)
        if not self.auto_collation:
            self.recorder.note(task, 0, FETCH)
            return self._collate(task, self.draw(self.iterator))
        data = []
        cell, iterator = self.recorder.cell, self.iterator
        placement = self._placement(index)
        draw = plain = partial(self.draw, iterator)
        for position, _ in enumerate(index):
            cell[0] = position
            if self.watch is not None:
                draw = partial(self.watch.draw, plain, self.made - 1, position)
            try:
                if placement is None:
                    data.append(draw())
                else:
                    data.append(placement.place(draw()))
            except StopIteration:
                self.ended = True
                break
            self._until_tidy -= 1
            if not self._until_tidy:
                self._until_tidy = self.tidy()
        if placement is not None and placement.useless:
            self._leave_out = SELDOM
        if not data or (self.drop_last and len(data) < len(index)):
            raise StopIteration
        return self._collate(task, data)

    def go_on_from(self, state: dict[str, Any]) -> None:
        """Go on from a state of the stream, whose dataset has loaded its part."""
        if state["iterator"] is not None:
            self.iterator.load_state_dict(state["iterator"])  # type: ignore[attr-defined]
        self.ended, self.ahead, self.made = state["ended"], state["ahead"], state["made"]

    # -- seeding="sample" ------------------------------------------------------------------

    @property
    def position(self) -> int | None:
        """Of the next element, if it is counted."""
        return None if self.seeds is None else self.seeds.position

    def _seed_and_draw(self, iterator: Iterator[Any]) -> Any:
        assert self.seeds is not None
        self.seeds.for_element()
        return next(iterator)

    def _seed_collation(self, seeds: SampleSeeds) -> None:
        seeds.for_batch_of_stream(self._batch_key)


def state_of(part: Any) -> Any:
    """The state of a dataset or iterator that has ``state_dict``; None for others."""
    return part.state_dict() if has_state(part) else None


def has_state(part: Any) -> bool:
    """Whether a dataset, a sampler or an iterator can give its state and load one."""
    return callable(getattr(part, "state_dict", None)) and callable(
        getattr(part, "load_state_dict", None)
    )
