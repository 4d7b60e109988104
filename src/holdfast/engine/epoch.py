"""The state of one epoch of a pool, and what may take the place of a batch in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.engine import events as ev
from holdfast.engine.sampler_draws import SamplerDraws, epoch_of
from holdfast.options import Settings
from holdfast.samples.account import Account
from holdfast.samples.bad_sample import BadSample
from holdfast.worker.exceptions import Failure
from holdfast.worker.sample_seeding import NO_SEEDS, EpochSeeds
from holdfast.worker.tolerant import DROPPED


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker's answer that is an error."""

    failure: Failure


NO_BATCH = frozenset({Failed, ev.Poisoned, type(DROPPED)})
"""The types of answers that take the place of a `Batch`."""


@dataclass(frozen=True, slots=True)
class Reported:
    """A worker's answer, and the bad samples it met on the way."""

    result: Any  # a `Batch`, `Failed` or `DROPPED`
    bad: tuple[BadSample, ...]
    samples: int | None = None  # of a stream that the batch took, if not as many as were asked for


@dataclass(frozen=True, slots=True)
class StartRefused:
    """A worker could not begin: the main module or the blueprint did not load."""

    worker: int
    pid: int | None
    failure: Failure


Taken = ev.Delivery | ev.GaveUp | StartRefused | ev.End


@dataclass(slots=True)
class EpochCounter:
    """Which epoch of a loader it is: each `iter` is the next one, unless the loader's `set_epoch`,
    or that of its sampler, was called since."""

    next: int = 0
    current: int = -1  # the one that was begun last, whatever `set_epoch` has said since
    sampler: int = 0  # the epoch of the sampler when the last one began
    told_midway: bool = False  # workers were told something while they were running

    def go_on(self, loader: Any, number: int) -> None:
        """The next one has this number, whatever its sampler was told before."""
        told = epoch_of(loader)
        self.next, self.sampler = number, self.sampler if told is None else told[1]

    def begin(self, loader: Any, options: Settings, shared: int | None = None) -> EpochSeeds:
        """The seeds of the epoch that begins."""
        told = None if options.seeding == "worker" else epoch_of(loader)
        if told is not None and told[1] != self.sampler:
            self.next = self.sampler = told[1]
        epoch = self.current = self.next
        self.next += 1
        if options.seeding == "worker":
            return EpochSeeds(shared)
        seed = options.sample_seed
        if seed is None:
            seed = (loader.generator or torch.default_generator).initial_seed()
        return EpochSeeds(shared, (seed, epoch))


@dataclass(slots=True)
class Epoch:
    """Used under the pool's lock only."""

    account: Account | None = None  # of bad samples; None to let them raise
    unclaimed: list[BadSample] = field(default_factory=list)  # reported with a replica's end
    due: int = 0  # indices that are to be drawn from the sampler
    drawn: int = 0  # indices that were
    delivered: ev.Delivery | ev.End | ev.GaveUp | None = None  # by the machine; the consumer's next
    taken: Taken | None = None  # until the consumer has made its batch of it
    ended: bool = False
    sampler_error: str | None = None  # what the sampler raised, if it has given nothing since
    unfinished: ev.Task | None = None  # delivered, and the consumer has not had it yet
    done: int = 0  # tasks that the consumer has had,
    yielded: int = 0  # those of them that were batches,
    number: int = 0  # of this epoch, in all that the loader has begun
    seeds: EpochSeeds = NO_SEEDS
    turn: int = 0  # and which worker comes after the one that made the last
    last_index: Any = None  # of that one
    draws: SamplerDraws | None = None  # what was drawn from the sampler

    @property
    def not_had(self) -> list[ev.Task]:
        """What the machine has delivered, and the consumer has not had yet. Two of them if two
        threads share an iterator: one makes its batch, and the other's next one has come."""
        found = [] if self.unfinished is None else [self.unfinished]
        if isinstance(self.delivered, ev.Delivery):
            found.append(self.delivered.task)
        return found

    def finish(self) -> None:
        """The consumer has had what was delivered last: a batch, an error, or nothing at all."""
        task = self.unfinished
        if task is not None:
            self.done += 1
            self.turn = task.worker + 1
            self.last_index = task.index
            self.unfinished = None
