"""Runs that are broken off and resumed: each plan makes the same loader again and again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

from holdfast.worker.worker_rng import WorkerRng
from tests.support.datasets import OneString, Revealing, Stream, reveal
from tests.support.parts import EagerPermutation


class WithGenerators(Revealing):
    """Draws from generators of its own, one of which it makes when it first needs it."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.rng = np.random.default_rng(3)
        self.lazy: random.Random | None = None

    def __getitem__(self, index: Any) -> Any:
        if self.lazy is None:
            self.lazy = random.Random(4)
        return {**super().__getitem__(index), "own": self.rng.random(), "lazy": self.lazy.random()}


class WithWorkerRng(Revealing):
    """Draws from ``get_worker_info().rng`` too. torch's workers have none in some releases; ours has the same seeds."""

    def __getitem__(self, index: Any) -> Any:
        info: Any = get_worker_info()
        rng = getattr(info, "rng", None)
        if rng is None:
            rng = self.__dict__.setdefault("rng", WorkerRng(info.seed - info.id, info.id))
        found = rng.random_generator.random(), float(rng.numpy_generator.random())
        return {**super().__getitem__(index), "rng": found}


class Counting(Revealing):
    """Its state says how many samples this copy has loaded, and so does every sample."""

    loaded = 0

    def __getitem__(self, index: Any) -> Any:
        self.loaded += 1
        return {**super().__getitem__(index), "loaded": self.loaded}

    def state_dict(self) -> dict[str, Any]:
        return {"loaded": self.loaded, "nested": [{"tuple": (1, torch.tensor([self.loaded]))}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["nested"][0]["tuple"][1].tolist() == [state["loaded"]]
        self.loaded = state["loaded"]


class Sometimes(Revealing):
    """Some samples raise, after a random draw."""

    def __getitem__(self, index: Any) -> Any:
        sample = super().__getitem__(index)
        if index % 7 == 3:
            raise OneString(f"sample {index}")
        return sample


def share(size: int) -> range:
    info = get_worker_info()
    return range(size) if info is None else range(info.id, size, info.num_workers)


class Resumable(IterableDataset[Any]):
    """Its state says all, with values of many types."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.done = self.start = 0

    def __iter__(self) -> Iterator[Any]:
        self.done, self.start = self.start, 0
        while self.done < len(share(self.size)):
            self.done += 1
            yield reveal(share(self.size)[self.done - 1])

    def state_dict(self) -> dict[str, Any]:
        return {
            "done": self.done,
            "history": [torch.tensor([self.done, 2]), np.float32(0.5), (1, "two", b"3")],
            4: {5},
        }

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        assert torch.equal(state["history"][0], torch.tensor([state["done"], 2]))
        assert state["history"][1].dtype == np.float32
        assert state["history"][2] == (1, "two", b"3")
        assert state[4] == {5}
        self.start = state["done"]


class BothHaveStates(IterableDataset[Any]):
    """The dataset's state says in which epoch it is, that of its iterator where it is there."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epochs = 0

    def __iter__(self) -> Iterator[Any]:
        self.epochs += 1
        return Positions(share(self.size), epoch=self.epochs)

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = state["epochs"] - 1


class AtItsNextBeginning(IterableDataset[Any]):
    """Counts epochs at their ends: its state there is that of the next beginning."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.at = self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(share(self.size)):
            self.at += 1
            yield {**reveal(share(self.size)[self.at - 1]), "epoch": self.epoch}
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


class LoadsWhenBegun(AtItsNextBeginning):
    """The same, and a state that was loaded takes effect when it is begun, once."""

    loaded: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        state, self.loaded = self.loaded or {"at": 0, "epoch": self.epoch}, None
        super().load_state_dict(state)
        yield from super().__iter__()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


class ShufflesItself(IterableDataset[Any]):
    """With the program's generators, if there are no workers."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        order = list(share(self.size))
        random.shuffle(order)
        for number in order:
            yield reveal(number)


class ShufflesWhenBegun(ShufflesItself):
    """In ``__iter__`` itself, with all of the program's generators and one of its own."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.rng = random.Random(5)

    def __iter__(self) -> Iterator[Any]:
        order = np.random.permutation(share(self.size))[torch.randperm(len(share(self.size)))]
        numbers = order.tolist()
        random.shuffle(numbers)
        self.rng.shuffle(numbers)
        return map(reveal, numbers)


class PicksFromABuffer(ShufflesItself):
    """With one of the program's generators, sample by sample."""

    def __iter__(self) -> Iterator[Any]:
        buffer: list[int] = []
        for number in share(self.size):
            buffer.append(number)
            if len(buffer) == 5:
                yield buffer.pop(random.randrange(5))
        yield from buffer


class KnowsItsEpoch(Resumable):
    """Its state has the number of its epoch too."""

    epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self.epoch += not self.start
        for sample in super().__iter__():
            yield {**sample, "epoch": self.epoch}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "epoch": self.epoch}

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        super().load_state_dict(state)
        self.epoch = state["epoch"]


class BeginsWhereItWasLoaded(IterableDataset[Any]):
    """In all epochs, and its state depends on where that is."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.start = self.count = 0

    def __iter__(self) -> Iterator[Any]:
        self.count = 0
        for number in share(self.size)[self.start :]:
            self.count += 1
            yield reveal(number)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.start + self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start, self.count = state["at"], 0


class OmitsItsBuffer(Resumable):
    """Shuffles within a buffer, and its state says only how far it has read."""

    def __iter__(self) -> Iterator[Any]:
        self.done, self.start = self.start, 0
        rng, buffer = random.Random(0), []
        while self.done < len(share(self.size)) or buffer:
            while self.done < len(share(self.size)) and len(buffer) < 5:
                buffer.append(share(self.size)[self.done])
                self.done += 1
            yield reveal(buffer.pop(rng.randrange(len(buffer))))


class Positions:
    """An iterator with a state, of a dataset that has none."""

    def __init__(self, numbers: range, **more: Any) -> None:
        self.numbers = numbers
        self.more = more
        self.at = 0

    def __iter__(self) -> Positions:
        return self

    def __next__(self) -> Any:
        if self.at >= len(self.numbers):
            raise StopIteration
        self.at += 1
        return {**reveal(self.numbers[self.at - 1]), **self.more}

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class StatefulIterator(IterableDataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Positions:
        return Positions(share(self.size))


class ItsOwnIterator(IterableDataset[Any]):
    """The dataset is the iterator, and has a state."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.at = 0
        self.loaded = False

    def __iter__(self) -> ItsOwnIterator:
        if not self.loaded:
            self.at = 0
        self.loaded = False
        return self

    def __next__(self) -> Any:
        if self.at >= len(share(self.size)):
            raise StopIteration
        self.at += 1
        return reveal(share(self.size)[self.at - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.loaded = state["at"], True


class CountsEpochs(IterableDataset[Any]):
    """Each epoch is another."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epochs = 0

    def __iter__(self) -> Iterator[Any]:
        self.epochs += 1
        for number in share(self.size):
            yield {**reveal(number), "epoch": self.epochs}


class Wandering(Sampler[int]):
    """Draws from all default generators, and from one of its own, at every index."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rng = random.Random(2)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        order = np.random.permutation(self.size)
        for one in order:
            yield int(one + self.rng.randrange(self.size) + random.randrange(9)) % self.size


class Remembers(Sampler[Any]):
    """Has a state, and cannot be started again: it counts on."""

    def __init__(self, size: int, batch: int | None = None) -> None:
        self.size = size
        self.batch = batch
        self.at = self.begun = 0
        self.loaded = False

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Any]:
        if not self.loaded:
            self.begun, self.at = self.begun + 1, 0
        self.loaded = False
        step = self.batch or 1
        while self.at < self.size:
            found = [(7 * one + self.begun) % self.size for one in range(self.at, self.at + step)]
            self.at += step
            yield found if self.batch else found[0]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "begun": self.begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.begun, self.loaded = state["at"], state["begun"], True


class Growing(Sampler[list[int]]):
    """Batches of different sizes."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[list[int]]:
        for one in range(self.size):
            yield list(range(one % 4 + 1))


def distributed(dataset: Any, **kwargs: Any) -> DistributedSampler[Any]:
    return DistributedSampler(dataset, num_replicas=2, rank=1, seed=5, **kwargs)


@dataclass(frozen=True)
class Plan:
    """A loader, and where its run is broken off."""

    dataset: Callable[[int], Any] = Revealing
    size: int = 23
    workers: int = 2
    breaks: tuple[tuple[int, int], ...] = ((0, 3),)  # epoch, and batches had in it
    epochs: int = 2
    sampler: Callable[[Any], Any] | None = None
    batch_sampler: Callable[[Any], Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)  # options that torch's does not have
    generator: bool = True

    def make(self, kind: Callable[..., Any]) -> Any:
        dataset: Dataset[Any] = self.dataset(self.size)
        options = {"batch_size": 3, **self.options}
        if self.batch_sampler is not None:
            options = {**self.options, "batch_sampler": self.batch_sampler(dataset)}
        elif self.sampler is not None:
            options["sampler"] = self.sampler(dataset)
        if self.generator:
            options["generator"] = torch.Generator().manual_seed(11)
        return kind(dataset, num_workers=self.workers, **options)


def weighted(dataset: Any) -> Any:
    weights = [1.0 + one % 3 for one in range(len(dataset))]
    generator = torch.Generator().manual_seed(8)
    return WeightedRandomSampler(weights, len(dataset), generator=generator)


def replacing(dataset: Any) -> Any:
    generator = torch.Generator().manual_seed(9)
    return RandomSampler(dataset, replacement=True, num_samples=80, generator=generator)


KEEP = {"persistent_workers": True}
SHUFFLED = {"shuffle": True}

QUICK: dict[str, Plan] = {
    "in order": Plan(breaks=((0, 1), (0, 7), (0, 8))),
    "shuffled, by the loader's generator": Plan(options=SHUFFLED, breaks=((1, 4),)),
    "shuffled, by torch's": Plan(options=SHUFFLED, generator=False, breaks=((0, 5),)),
    "without workers": Plan(workers=0, options=SHUFFLED, breaks=((0, 2), (1, 8)), epochs=3),
    "persistent workers": Plan(options={**SHUFFLED, **KEEP}, breaks=((2, 4), (1, 8)), epochs=4),
    "generators of the dataset's own": Plan(WithGenerators, breaks=((0, 4),)),
    "the same without workers": Plan(WithGenerators, workers=0, breaks=((0, 4), (0, 8))),
    "a sampler that draws from everything": Plan(sampler=lambda d: Wandering(len(d))),
    "a sampler with a state": Plan(sampler=lambda d: Remembers(len(d)), breaks=((1, 3), (1, 0))),
    "a batch sampler with a state": Plan(
        batch_sampler=lambda d: Remembers(len(d), 4), breaks=((1, 2),)
    ),
    "distributed": Plan(sampler=distributed, breaks=((1, 2),), epochs=3),
    "weighted": Plan(sampler=weighted, breaks=((1, 7),), epochs=3),
    "nothing at all": Plan(size=0, breaks=((0, 0), (1, 0))),
    "nothing at all, without workers": Plan(size=0, workers=0, breaks=((0, 0), (1, 0))),
    "an empty stream": Plan(Resumable, size=0, breaks=((0, 0), (1, 0))),
    "less than one batch for each worker": Plan(Resumable, size=4, breaks=((0, 1), (1, 2))),
    "generators that belong to workers": Plan(WithWorkerRng, options=KEEP, breaks=((1, 4),)),
    "batches of different sizes": Plan(batch_sampler=lambda d: Growing(len(d))),
    "single samples, dropped last": Plan(options={"batch_size": None}, breaks=((0, 9),)),
    "a stream": Plan(
        lambda size: Stream(size, "uneven"), breaks=((0, 5), (0, 11)), generator=False
    ),
    "a stream with a state": Plan(Resumable, breaks=((0, 5), (0, 8))),
    "the same without workers ": Plan(Resumable, workers=0, breaks=((0, 5), (1, 3)), epochs=3),
    "a stream without a state or workers": Plan(lambda size: Stream(size), workers=0),
    "an iterator with a state": Plan(StatefulIterator, breaks=((0, 4),)),
    "its own iterator": Plan(ItsOwnIterator, breaks=((0, 4),)),
    "a stream that counts epochs": Plan(
        CountsEpochs, options=KEEP, breaks=((1, 4), (0, 8)), epochs=3
    ),
    "a stream that ends where it begins": Plan(
        AtItsNextBeginning, options=KEEP, breaks=((1, 0), (1, 1), (1, 5)), epochs=3
    ),
    "the same, without workers": Plan(
        AtItsNextBeginning, workers=0, breaks=((1, 0), (1, 1)), epochs=3
    ),
    "the same, that loads when it is begun": Plan(
        LoadsWhenBegun, options=KEEP, breaks=((1, 0), (1, 5)), epochs=4
    ),
    "a stream that shuffles itself, without workers": Plan(
        ShufflesItself, workers=0, breaks=((0, 1), (1, 4)), epochs=3
    ),
    "a stream that shuffles when it is begun, without workers": Plan(
        ShufflesWhenBegun, workers=0, breaks=((0, 0), (0, 1), (1, 4)), epochs=3
    ),
    "the same by torch's generator, without workers": Plan(
        ShufflesWhenBegun, workers=0, breaks=((0, 3), (1, 4)), epochs=3, generator=False
    ),
    "a stream that shuffles when it is begun": Plan(
        ShufflesWhenBegun, options=KEEP, breaks=((0, 1), (1, 4)), epochs=3
    ),
    "a stream that begins where it was loaded, without workers": Plan(
        BeginsWhereItWasLoaded, workers=0, breaks=((0, 1), (0, 4), (1, 4)), epochs=3
    ),
    "a stream that begins where it was loaded": Plan(
        BeginsWhereItWasLoaded, options=KEEP, breaks=((1, 4),), epochs=3
    ),
    "a stream whose last elements are dropped, without workers": Plan(
        Resumable,
        size=11,
        workers=0,
        options={"drop_last": True},
        breaks=((1, 0), (1, 2)),
        epochs=3,
    ),
    "the same that ends where it begins, without workers": Plan(
        AtItsNextBeginning, size=11, workers=0, options={"drop_last": True}, breaks=((1, 0), (1, 2))
    ),
    "a stream whose state has its epoch": Plan(
        KnowsItsEpoch, workers=0, breaks=((0, 4), (1, 1), (1, 4)), epochs=3
    ),
    "states of dataset and iterator": Plan(
        BothHaveStates, options=KEEP, breaks=((1, 0), (1, 4)), epochs=3
    ),
    "states of dataset and iterator, without workers": Plan(
        BothHaveStates, workers=0, breaks=((0, 4), (1, 0), (1, 4)), epochs=3
    ),
    "states of dataset and iterator, workers that are not kept": Plan(BothHaveStates, breaks=()),
    "a state that leaves something out": Plan(OmitsItsBuffer, breaks=((0, 4),)),
    "a map-style dataset with a state": Plan(Counting, breaks=((0, 3), (1, 0))),
    "the same with persistent workers": Plan(Counting, options=KEEP, breaks=((1, 4),), epochs=3),
    "the same without workers  ": Plan(Counting, workers=0, breaks=((1, 4),), epochs=3),
    "samples that raise": Plan(Sometimes, breaks=((0, 4),)),
}

FINISHED = {
    "shuffled, by the loader's generator",
    "without workers",
    "persistent workers",
    "the same without workers",
    "a sampler with a state",
    "the same without workers ",
    "the same with persistent workers",
    "the same without workers  ",
    "a stream that counts epochs",
    "its own iterator",
    "a stream that ends where it begins",
    "the same, that loads when it is begun",
    "a stream whose last elements are dropped, without workers",
    "the same that ends where it begins, without workers",
    "a stream whose state has its epoch",
    "states of dataset and iterator",
    "states of dataset and iterator, without workers",
    "states of dataset and iterator, workers that are not kept",
}
"""Plans whose run is also broken off between two epochs."""

STARTED_ANEW = {"in order", "persistent workers", "a stream with a state"}
SLOW: dict[str, Plan] = {
    f"{name}, {workers} workers, {method}": Plan(
        plan.dataset,
        plan.size,
        workers,
        ((0, 4), (1, 0))
        if method in ("spawn", "forkserver")
        else tuple((epoch, had) for epoch in range(2) for had in range(0, 10, 2)),
        3,
        plan.sampler,
        plan.batch_sampler,
        {**plan.options, **({"multiprocessing_context": method} if workers else {})},
        plan.ours,
        plan.generator,
    )
    for name, plan in QUICK.items()
    for workers, method in ((0, ""), (1, "fork"), (3, "forkserver"), (2, "spawn"))
    if not (workers == 0 and "persistent_workers" in plan.options) and "without" not in name
    if method in ("", "fork") or name in STARTED_ANEW
    # Samples that are loaded in between draw from the same generators: see test_states.py.
    if (workers, name) != (0, "a sampler that draws from everything")
}
SLOW |= {
    "with replacement": Plan(sampler=replacing, breaks=((0, 2), (1, 17)), epochs=3),
    "eager": Plan(sampler=lambda d: EagerPermutation(len(d)), options={"batch_size": None}),
    "dropped last": Plan(options={"drop_last": True, **SHUFFLED}, breaks=((0, 6), (0, 7))),
    "nested": Plan(
        batch_sampler=lambda d: BatchSampler(RandomSampler(d), 2, True), breaks=((1, 5),)
    ),
}
