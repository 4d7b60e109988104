"""A worker's copy of the dataset, what makes batches of it, and the random state they depend on.

To a dataset this is torch's worker with the same id: it has the same seeds, the same
``get_worker_info()`` and the same ``worker_init_fn``.
"""

from __future__ import annotations

import functools
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from holdfast.private_names import IterDataPipe, apply_random_seed, new_worker_info
from holdfast.worker import loaded_state
from holdfast.worker.batch_fingerprint import NO_BATCH, fingerprint_of_error
from holdfast.worker.exceptions import Failure, describe
from holdfast.worker.fetch import IterableFetcher, MapFetcher
from holdfast.worker.interface import Blueprint, Host, WorkerSetup
from holdfast.worker.randomness import OWN_AT, Randomness, seed_worker
from holdfast.worker.sample_seeding import EpochSeeds, SampleSeeds, kept_states
from holdfast.worker.tolerant_iterable import TolerantIterableFetcher
from holdfast.worker.tolerant_map import TolerantMapFetcher
from holdfast.worker.worker_rng import WorkerRng


class Replica:
    """The dataset of one worker."""

    def __init__(self, setup: WorkerSetup, blueprint: Blueprint, host: Host) -> None:
        self.setup = setup
        self.blueprint = blueprint
        self.host = host
        self.dataset = blueprint.dataset
        self.fetcher: MapFetcher | IterableFetcher | None = None
        self.rng = WorkerRng(blueprint.base_seed, setup.worker)
        seeds = setup.seeds.samples
        self.sample_seeds = None if seeds is None else SampleSeeds(*seeds, setup.worker)
        instead = [] if not host.own_process else kept_states(self.sample_seeds, blueprint.iterable)
        room = host.recorder.room - OWN_AT
        self.randomness = Randomness(self._roots, room, instead, self.rng)
        self.broken: Failure | None = None  # what went wrong in setting up
        self.broken_mark = NO_BATCH  # its fingerprint
        self.told_error: BaseException | None = None
        """What a notice raised; it takes the place of the next batch."""
        self._past = deque(enumerate(setup.told))  # notices that are to be heard again
        self._shared_rng = torch.Generator()

    def become(self) -> None:
        """Be what torch's worker with this id would be."""
        worker, blueprint = self.setup.worker, self.blueprint
        if self.host.own_process:
            seed_worker(blueprint.base_seed, worker)
        self.seed_datapipe(self.setup.seeds.shared)
        self.host.publish(
            new_worker_info(
                id=worker,
                num_workers=blueprint.num_workers,
                seed=blueprint.base_seed + worker,
                dataset=self.dataset,
                rng=self.rng,
                worker_method="multiprocessing" if self.host.own_process else "thread",
            )
        )
        if blueprint.worker_init_fn is not None:
            blueprint.worker_init_fn(worker)
        self.randomness.begin(self.setup.answered)

    def begin_epoch(self, seeds: EpochSeeds) -> None:
        """Begin another epoch on the same worker."""
        if self.sample_seeds is not None and seeds.samples is not None:
            self.sample_seeds.begin_epoch(*seeds.samples)
        self.seed_datapipe(seeds.shared)
        self.make_fetcher()

    # -- notices --------------------------------------------------------------------------

    def hear(self, change: bytes) -> None:
        """Hear a notice. An error takes the place of the next batch. A dataset that is shared with
        the trainer was changed there."""
        if not self.host.own_dataset:
            return
        try:
            pickle.loads(change)(self.dataset)
        except BaseException as error:
            self.told_error = error

    def hear_past(self, before: tuple[int, int] | None, settled: int) -> None:
        """Hear again what the predecessors were told before this place: epochs in which a batch was
        made, and batches of the next one. None: all of it. The errors of the first `settled`
        notices are dropped: they have been delivered."""
        while self._past:
            number, notice = self._past[0]
            if before is not None and (notice.epochs_done, notice.batches_done) >= before:
                return
            self._past.popleft()
            self.hear(notice.change)
            if number < settled:
                self.told_error = None

    # -- epochs ---------------------------------------------------------------------------

    def seed_datapipe(self, seed: int | None) -> None:
        """Seed the dataset with the epoch's seed if it is a datapipe."""
        if isinstance(self.dataset, IterDataPipe):
            if seed is None:
                raise AssertionError("shared_seed must be provided for IterDataPipe workers")
            self._shared_rng.manual_seed(seed)
            self.dataset = apply_random_seed(self.dataset, self._shared_rng)

    def fail(self, error: BaseException) -> None:
        """It could not be set up: that is the answer to every task."""
        self.broken = describe(error, position=None, step="start-up")
        self.broken_mark = fingerprint_of_error(error)

    def make_fetcher(self, state: dict[str, Any] | None = None) -> None:
        """Begin an epoch, or continue one from a state of the dataset and its iterator."""
        blueprint = self.blueprint
        kind: Callable[..., MapFetcher | IterableFetcher]
        kind = IterableFetcher if blueprint.iterable else MapFetcher
        if blueprint.policy is not None:
            kind = functools.partial(
                TolerantIterableFetcher if blueprint.iterable else TolerantMapFetcher,
                policy=blueprint.policy,
                worker_id=self.setup.worker,
                randomness=self.randomness,
            )
        loaded_state.take_back(self.dataset)
        if state is not None and state["dataset"] is not None:
            self.dataset.load_state_dict(state["dataset"])
        self.fetcher = kind(
            self.dataset,
            auto_collation=blueprint.auto_collation,
            collate_fn=blueprint.collate_fn,
            drop_last=blueprint.drop_last,
            recorder=self.host.recorder,
            memory=self.host.memory,
            faults=self.host.faults,
            seeds=self.sample_seeds,
        )
        self.fetcher.tidy = self.host.between_samples
        self.fetcher.remark = self.host.remark
        if isinstance(self.fetcher, IterableFetcher) and state is not None:
            self.fetcher.go_on_from(state)

    def release(self) -> None:
        """Let go of the dataset and its iterator, at once: this is part of a cycle, and a worker
        that is a thread would leave them to the garbage collector."""
        self.fetcher = None
        del self.dataset, self.blueprint, self.randomness

    def _roots(self) -> Iterator[tuple[str, Any]]:
        """What may have random generators that are this worker's own."""
        if self.host.own_dataset:
            yield "dataset", self.dataset
        if self.host.own_process:
            yield "collate_fn", self.blueprint.collate_fn
            yield "on_bad_sample", self.blueprint.on_bad_sample
        if isinstance(self.fetcher, IterableFetcher):
            yield "iterator", self.fetcher.iterator
