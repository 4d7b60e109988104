"""Streams that say where they are, or not; rightly, or not."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

SIZE = 48


def mine(size: int) -> range:
    """The share of this worker."""
    info = get_worker_info()
    assert info is not None
    return range(info.id, size, info.num_workers)


def sample(number: int) -> torch.Tensor:
    return torch.tensor([number, float(torch.rand(())), random.random()])


class Plain(IterableDataset[Any]):
    """Without a state."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        for number in mine(self.size):
            yield sample(number)


class Honest(Plain):
    """Its state says all."""

    done = start = 0

    def __iter__(self) -> Iterator[Any]:
        self.done, self.start = self.start, 0
        while self.done < len(mine(self.size)):
            self.done += 1
            yield sample(mine(self.size)[self.done - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["done"]


class OmitsItsBuffer(Honest):
    """Shuffles within a buffer, and its state knows only how far it has read, as Hugging Face's."""

    def __iter__(self) -> Iterator[Any]:
        numbers = super().__iter__()
        dice = random.Random(7)
        buffer: list[Any] = []
        for one in numbers:
            buffer.append(one)
            if len(buffer) == 5:
                yield buffer.pop(dice.randrange(5))
        dice.shuffle(buffer)
        yield from buffer


class DoesNotLoad(Honest):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise OSError("the state is on another machine")


class StateDoesNotPickle(Honest):
    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "lock": threading.Lock()}


class StateRaises(Honest):
    def state_dict(self) -> dict[str, Any]:
        raise OSError("no room for the state")


class CountsStates(Honest):
    """Writes down that it was asked for its state."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def state_dict(self) -> dict[str, Any]:
        with (self.folder / f"asked-{os.getpid()}").open("a") as file:
            file.write("!")
        return super().state_dict()


class FlakyAgain(Plain):
    """The connection is lost in the first `times` processes that draw it again."""

    def __init__(self, folder: Path, times: int) -> None:
        super().__init__()
        self.folder, self.times = folder, times

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        (self.folder / f"{info.id}-{os.getpid()}").touch()
        before = len(list(self.folder.glob(f"{info.id}-*"))) - 1
        for number, one in enumerate(super().__iter__()):
            if number == 4 and 0 < before <= self.times:
                raise ConnectionError("reset by the object store")
            yield one


class Kept(Honest):
    """Begins every epoch from a state that was loaded, not only the next."""

    def __iter__(self) -> Iterator[Any]:
        self.done = self.start
        while self.done < len(mine(self.size)):
            self.done += 1
            yield sample(mine(self.size)[self.done - 1])


class CountsEpochs(Honest):
    """Each epoch is another, by a count that goes up behind its end."""

    epoch = 0

    def __iter__(self) -> Iterator[Any]:
        for one in super().__iter__():
            yield one + 1000 * self.epoch
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start, self.epoch = state["done"], state["epoch"]


class ByTime(Plain):
    """In another order whenever it is asked."""

    def __iter__(self) -> Iterator[Any]:
        numbers = list(mine(self.size))
        random.Random(f"{time.time_ns()} {os.getpid()}").shuffle(numbers)
        for number in numbers:
            yield sample(number)


class Record:
    """An object, and no dataclass."""

    def __init__(self, number: int) -> None:
        self.number = number


class RecordsByTime(ByTime):
    """They differ in an attribute only."""

    def __iter__(self) -> Iterator[Any]:
        for one in super().__iter__():
            yield Record(int(one[0]))


class Opaque(Plain):
    """Iterators over a list: objects of an extension type, which nothing but `next` reads."""

    def __iter__(self) -> Iterator[Any]:
        for number in mine(self.size):
            yield iter([number])


class ByTimeWithState(ByTime):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Once(Plain):
    """A live source: what was read is gone. Only the first process finds all of it."""

    def __init__(self, seen: Path, left: int) -> None:
        super().__init__()
        self.seen = seen
        self.left = left

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        try:
            self.seen.with_suffix(f".{info.id}").touch(exist_ok=False)
            size = self.size
        except FileExistsError:
            size = self.left
        for number in mine(size):
            yield sample(number)
