"""``get_worker_info().rng``: generators that belong to one worker, be it a process or a thread.

Threads share the global generators, so what each of them draws there depends on timing. These are
seeded as torch seeds the global ones of the worker with the same id, in any kind of worker. Each is
made when it is first used: a worker whose dataset uses none keeps no states of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from holdfast.private_names import numpy_seeds
from holdfast.worker.generator_states import state_of

_PATH = "get_worker_info().rng."

_MAKE: dict[str, Callable[[int, int], Any]] = {
    "random_generator": lambda base_seed, worker: random.Random(base_seed + worker),
    "torch_generator": lambda base_seed, worker: torch.Generator().manual_seed(base_seed + worker),
    "numpy_generator": lambda base_seed, worker: np.random.default_rng(
        numpy_seeds(base_seed, worker)
    ),
}


@dataclass(frozen=True, slots=True)
class Rng:
    """The attributes that torch documents. Its own class is private, and torch 2.6 has none."""

    random_generator: random.Random
    torch_generator: torch.Generator
    numpy_generator: Any


class WorkerRng(Rng):
    """Those of a worker. An attribute that has no value yet is made by `__getattr__`."""

    __slots__ = ("_made", "_seeds")

    _made: dict[str, Any]
    _seeds: tuple[int, int]

    def __init__(self, base_seed: int, worker: int) -> None:
        object.__setattr__(self, "_seeds", (base_seed, worker))  # the class is frozen
        object.__setattr__(self, "_made", {})

    def __getattr__(self, name: str) -> Any:
        make = _MAKE.get(name)
        if make is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        made = self._made.setdefault(name, make(*self._seeds))
        object.__setattr__(self, name, made)
        return made

    def __repr__(self) -> str:  # the inherited one would make them
        return f"<random generators of worker {self._seeds[1]}>"

    def __reduce__(self) -> Any:
        parts = (self.random_generator, self.torch_generator, self.numpy_generator)
        return Rng, parts

    def made(self) -> Iterator[tuple[str, Any]]:
        """Those that were made, with the paths by which their states are kept."""
        for name, generator in list(self._made.items()):
            yield _PATH + name, generator

    @property
    def count(self) -> int:
        """How many were made."""
        return len(self._made)

    @staticmethod
    def owns(path: str) -> bool:
        """Whether a path is of a generator in here: it is always known when it was made."""
        return path.startswith(_PATH)

    def prepare(self, paths: Collection[str]) -> None:
        """Be ready for states with these paths: make those generators, and begin the others anew,
        which had not been made when these states were kept."""
        for path in paths:
            if self.owns(path):
                getattr(self, path.removeprefix(_PATH))
        for path, generator in self.made():
            state = state_of(generator)
            if path not in paths and state is not None:
                fresh = state_of(_MAKE[path.removeprefix(_PATH)](*self._seeds))
                assert fresh is not None
                state.write(fresh.read())
