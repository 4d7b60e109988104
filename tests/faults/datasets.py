"""Datasets that draw random numbers in every sample and break where they are told to.

All draw from torch, random and numpy before *and* after the place where they break, so a batch that
is redone from any other random state than the lost one's is a different batch.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

from tests.faults.causes import CAUSES
from tests.faults.witness import be_ready, begins

LARGE = 5 << 20
WEIGHT = 2700  # bytes each sample has at least: three are a batch that travels in its message


@dataclass(frozen=True)
class Trigger:
    """What breaks, where, at which sample, and whether again and again."""

    cause: str
    where: str  # "before" (any draw), "sample", "collate", "pickle", "unpickle", "init", "load"
    at: int | None = None  # the sample's number, or the worker's id for "init"
    marker: str | None = None  # a file that is made the first time; None: breaks every time

    def pull(self, where: str, at: int | None) -> None:
        if where != self.where or at != self.at:
            return
        if self.marker is not None:
            try:
                os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
        CAUSES[self.cause].act()


NO_TRIGGER = Trigger("ValueError", "nowhere")


@dataclass(frozen=True)
class Recipe:
    """How samples are made; all kinds of datasets share it."""

    size: int
    trigger: Trigger = NO_TRIGGER
    large: bool = False
    objects: bool = False  # samples carry an object of a user's class
    payload: int = 0  # bytes that some samples carry
    heavy: frozenset[int] = frozenset()
    ballast: int = 0  # bytes in the state of a dataset that has one
    ballast_at: int = -1
    witness: str | None = None  # a file where each sample is noted as it begins

    @property
    def nbytes(self) -> int:
        """Bytes of a sample, without the payload, which cannot be foreseen."""
        return WEIGHT + LARGE * self.large

    def sample(self, number: int) -> dict[str, Any]:
        begins(self.witness, number)
        self.trigger.pull("before", number)
        before = torch.rand(2), random.random(), np.random.rand()
        self.trigger.pull("sample", number)
        info = get_worker_info()
        made: dict[str, Any] = {
            "number": number,
            "worker": -1 if info is None else info.id,
            "torch": torch.cat([before[0], torch.randn(2)]),
            "random": before[1] + random.gauss(0, 1),
            "numpy": before[2] + np.random.randn(),
            "weight": torch.full((WEIGHT,), number % 251, dtype=torch.uint8),
        }
        if self.large:
            made["image"] = torch.full((LARGE,), number % 251, dtype=torch.uint8)
        if self.payload:
            made["payload"] = bytes([number % 251]) * (self.payload if number in self.heavy else 1)
        if self.objects:
            made["object"] = Thing(number, self.trigger)
        return made


class Thing:
    """Breaks when it is pickled in the worker, or unpickled in the trainer, if it is told to."""

    def __init__(self, number: int, trigger: Trigger) -> None:
        self.number = number
        self.trigger = trigger

    def __reduce__(self) -> Any:
        self.trigger.pull("pickle", self.number)
        return _thing, (self.number, self.trigger)


def _thing(number: int, trigger: Trigger) -> Thing:
    trigger.pull("unpickle", number)
    return Thing(number, NO_TRIGGER)


class _Loaded:
    """Breaks when a worker unpickles it, if it is told to."""

    recipe: Recipe

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.recipe.trigger.pull("load", None)


class MapStyle(_Loaded, Dataset[Any]):
    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def __len__(self) -> int:
        return self.recipe.size

    def __getitem__(self, number: int) -> Any:
        return self.recipe.sample(number)


class Replayed(_Loaded, IterableDataset[Any]):
    """Without state: after a death it can only be replayed from its start."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def numbers(self) -> range:
        info = get_worker_info()
        assert info is not None
        return range(info.id, self.recipe.size, info.num_workers)

    def __iter__(self) -> Iterator[Any]:
        for number in self.numbers():
            yield self.recipe.sample(number)


class WithState(Replayed):
    """The dataset itself says where it is, and can go there."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.done = 0
        self.start = 0

    def __iter__(self) -> Iterator[Any]:
        self.done, self.start = self.start, 0
        while self.done < len(self.numbers()):
            self.done += 1
            yield self.recipe.sample(self.numbers()[self.done - 1])

    def state_dict(self) -> dict[str, Any]:
        ballast = self.recipe.ballast if self.done == self.recipe.ballast_at else 0
        return {"done": self.done, "ballast": bytes(ballast)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["done"]


class IteratorWithState(Replayed):
    """Its iterator says where it is."""

    def __iter__(self) -> Iterator[Any]:
        return _Iterator(self)


class _Iterator:
    def __init__(self, dataset: IteratorWithState) -> None:
        self.dataset = dataset
        self.done = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.done >= len(self.dataset.numbers()):
            raise StopIteration
        self.done += 1
        return self.dataset.recipe.sample(self.dataset.numbers()[self.done - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


@dataclass(frozen=True)
class Collate:
    """A user's own: draws, and breaks where it is told to."""

    trigger: Trigger = NO_TRIGGER
    as_list: bool = False

    def __call__(self, samples: list[Any]) -> Any:
        before = torch.rand(1)
        for sample in samples:
            self.trigger.pull("collate", sample["number"])
        return {
            "samples": samples if self.as_list else default_collate(samples),
            "drawn": torch.cat([before, torch.rand(1)]),
            "python": random.random(),
        }


@dataclass(frozen=True)
class Init:
    """A `worker_init_fn` that draws, and breaks in one worker if it is told to."""

    trigger: Trigger = NO_TRIGGER

    def __call__(self, worker: int) -> None:
        torch.rand(1)
        random.random()
        np.random.rand()
        info = get_worker_info()
        assert info is not None
        be_ready(info.dataset.recipe.witness)
        self.trigger.pull("init", worker)


@dataclass(frozen=True)
class Kind:
    """A kind of dataset, as the table names it."""

    dataset: Callable[[Recipe], Any]
    iterable: bool = False
    large: bool = False
    own_collate: bool = False
    objects: bool = False


KINDS = {
    "map": Kind(MapStyle),
    "map, own collate": Kind(MapStyle, own_collate=True),
    "map, large": Kind(MapStyle, large=True),
    "map, objects": Kind(MapStyle, own_collate=True, objects=True),
    "iterable": Kind(Replayed, iterable=True),
    "iterable, own collate": Kind(Replayed, iterable=True, own_collate=True),
    "iterable, state": Kind(WithState, iterable=True),
    "iterable, state in iterator": Kind(IteratorWithState, iterable=True),
}
