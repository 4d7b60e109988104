"""Datasets that are told something, and functions that tell it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info


class Part:
    strength = 0


class Told:
    """Each sample is its key, and what the dataset was told before it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.heard: list[Any] = []
        self.epoch = 0
        self.part = Part()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, key: int) -> tuple[int, list[Any]]:
        return key, [*self.heard, self.epoch, self.part.strength]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class ToldStream(Told, IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for key in range(info.id if info else 0, self.size, info.num_workers if info else 1):
            yield self[key]


class ToldWithState(Told):
    """What it was told is part of its own state."""

    def state_dict(self) -> dict[str, Any]:
        return {"heard": [*self.heard], "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.heard, self.epoch = [*state["heard"]], state["epoch"]


class ToldStreamWithState(ToldWithState, IterableDataset[Any]):
    """The strength is no part of its state."""

    position = start = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.start = state["position"]

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch  # when it is begun
        start, self.start = self.start, 0
        return self._samples(epoch, start)

    def _samples(self, epoch: int, start: int) -> Iterator[Any]:
        for key in range(start, self.size):
            self.position = key + 1
            yield key, [*self.heard, epoch, self.part.strength]


class Hear:
    """Adds a word to what the dataset has heard."""

    def __init__(self, word: Any) -> None:
        self.word = word

    def __call__(self, dataset: Told) -> None:
        dataset.heard.append(self.word)


def raise_in_a_worker(dataset: Told) -> None:
    if get_worker_info() is not None:
        raise ValueError("cannot be told")
    dataset.heard.append("told")


class DieOnce:
    """Kills the first worker that hears it."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __call__(self, dataset: Told) -> None:
        if get_worker_info() is not None:
            try:
                os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        dataset.heard.append("survived")


def as_is(samples: list[Any]) -> list[Any]:
    return samples
