"""Datasets with bad samples, and the same with the bad ones caught, for stock torch."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

SIZE = 40
RAISES = ("raises", "raises late", "None", "exits politely")
ENDS = ("segfault", "abort", "exit", "kill", "stall")


def drawn(index: int) -> torch.Tensor:
    """A sample that shows the state of all three generators."""
    return torch.tensor(
        [index, torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64
    )


def misbehave(how: str, index: int) -> Any:
    if how == "raises":
        raise ValueError(f"sample {index} is corrupt")
    if how == "raises late":  # after drawing
        drawn(index)
        raise KeyError(f"no label for {index}")
    if how == "None":
        return None
    if how == "exits politely":
        raise SystemExit(3)
    if how == "segfault":
        ctypes.string_at(0)
    if how == "abort":
        os.abort()
    if how == "exit":
        os._exit(7)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stall":
        time.sleep(1000)
    if how == "odd shape":
        return drawn(index)[:3]
    if how == "odd type":
        return f"sample {index}"
    raise AssertionError(how)


class Corrupt(Dataset[Any]):
    """`bad` says what each bad sample does. Every attempt is noted in `log`, if there is one."""

    def __init__(self, bad: dict[int, str], size: int = SIZE, log: Path | None = None) -> None:
        self.bad = bad
        self.size = size
        self.log = log

    def __len__(self) -> int:
        return self.size

    def sample_name(self, index: int) -> str:
        return f"sample-{index}.bin"

    def __getitem__(self, index: int) -> Any:
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{index}\n")
        how = self.bad.get(index)
        return drawn(index) if how is None else misbehave(how, index)

    def attempts(self, index: int) -> int:
        assert self.log is not None
        return self.log.read_text().split().count(str(index)) if self.log.exists() else 0


class Caught(Corrupt):
    """The same for stock torch: bad ones are None, and those that kill are not touched."""

    def __getitem__(self, index: int) -> Any:
        if self.bad.get(index) in ENDS:
            return None
        try:
            return super().__getitem__(index)
        except (ValueError, KeyError, SystemExit):
            return None


def leave_out_none(data: list[Any]) -> Any:
    """What a hand-made "skip" does in stock torch."""
    good = [one for one in data if one is not None and getattr(one, "shape", None) == (4,)]
    return default_collate(good) if good else []


class AtOnce(Corrupt):
    """Loads a batch at once, as array stores and Hugging Face datasets do."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Flaky(Corrupt):
    """Fails `times` times for each bad sample, over all processes, and then no more."""

    def __init__(self, bad: set[int], times: int, folder: Path, error: Exception) -> None:
        super().__init__({})
        self.unlucky = bad
        self.times = times
        self.folder = folder
        self.error = error

    def __getitem__(self, index: int) -> Any:
        sample = drawn(index)
        if index in self.unlucky:
            with (self.folder / str(index)).open("a") as file:
                file.write("x")
                count = file.tell()
            if count <= self.times:
                raise self.error
        return sample


class Generator(IterableDataset[Any]):
    """A stream whose bad elements raise inside the generator, which ends it."""

    def __init__(self, bad: dict[int, str], size: int = SIZE) -> None:
        self.bad = bad
        self.size = size

    def numbers(self) -> list[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return list(range(first, self.size, step))

    def load(self, number: int) -> Any:
        how = self.bad.get(number)
        return drawn(number) if how is None else misbehave(how, number)

    def __iter__(self) -> Iterator[Any]:
        for number in self.numbers():
            yield self.load(number)


class CaughtStream(Generator):
    """For stock torch."""

    def load(self, number: int) -> Any:
        try:
            return super().load(number)
        except (ValueError, KeyError, SystemExit):
            return None


class Moving:
    """An iterator that moves on before it loads, so that it can be asked again."""

    def __init__(self, stream: Generator) -> None:
        self.stream = stream
        self.left = iter(stream.numbers())

    def __iter__(self) -> Moving:
        return self

    def __next__(self) -> Any:
        return self.stream.load(next(self.left))


class Patient(Generator):
    def __iter__(self) -> Iterator[Any]:
        return Moving(self)


class Stuck(Generator):
    """Its iterator raises again and again at a bad element."""

    def __iter__(self) -> Iterator[Any]:
        return _Stuck(self)


class _Stuck(Moving):
    def __init__(self, stream: Generator) -> None:
        super().__init__(stream)
        self.now: int | None = None

    def __next__(self) -> Any:
        if self.now is None:
            self.now = next(self.left)
        loaded = self.stream.load(self.now)
        self.now = None
        return loaded


class Hidden(Generator):
    """A generator behind an object: after an error the object says StopIteration."""

    def __iter__(self) -> Iterator[Any]:
        return _Hidden(super().__iter__())


class _Hidden:
    def __init__(self, generator: Iterator[Any]) -> None:
        self.generator = generator

    def __iter__(self) -> _Hidden:
        return self

    def __next__(self) -> Any:
        return next(self.generator)


class WithState(Generator):
    """A generator whose dataset says where it is, `past` the bad element or still before it."""

    def __init__(self, bad: dict[int, str], size: int = SIZE, past: bool = True) -> None:
        super().__init__(bad, size)
        self.past = past
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        numbers = self.numbers()
        while self.place < len(numbers):
            number = numbers[self.place]
            if self.past:
                self.place += 1
                yield self.load(number)
            else:
                loaded = self.load(number)
                self.place += 1
                yield loaded
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]
