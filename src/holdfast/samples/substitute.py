"""Which samples a batch has, and which sample replaces a bad one.

Whether an index names one sample or a batch of them depends on the loader (``batch_size=None`` or
not). The type does not tell: a list may be one sample's key, an array a batch of keys.

A substitute is chosen by seed, among those the sampler has given. Never from
``range(len(dataset))``: samples that the sampler leaves out (another split, another rank's part)
must not leak in, and an index need not be a number. The choice depends only on the seed, the epoch,
the batch and the position, so it is the same in every run, whichever workers die.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from holdfast.samples.bad_sample import BadSample
from holdfast.samples.sample_keys import key_of


def keys_of(index: Any, batched: bool) -> Sequence[Any]:
    """The keys of the samples that `index` asks for, in order."""
    if not batched:
        return (index,)
    if type(index) is list:
        return index
    return list(index) if hasattr(index, "__len__") else (index,)


def copy_index(index: Any) -> Any:
    """A copy of the index, because a sampler may reuse its list or array for the next one, and a
    batch may have to be ordered again."""
    if type(index) is list:
        return index.copy()
    if isinstance(index, np.ndarray):
        return index.copy()
    return index.clone() if isinstance(index, torch.Tensor) else index


CANDIDATES: Final = 16  # sent with every batch
REMEMBERED: Final = 4096  # indices of the sampler to choose from
_SHIFT: Final = 32


class BatchHints(NamedTuple):
    """What a worker is told about a batch besides its indices."""

    known: dict[int, BadSample]  # by code: not to be tried again
    candidates: tuple[tuple[int, Any], ...] = ()  # number and index, those known to be bad left out
    seed: int = 0
    avoid: tuple[Any, ...] = ()  # indices found bad since, which must not be used
    apart: bool = False  # load sample by sample, even if the dataset takes many at once


NOTHING: Final = BatchHints({})


def code(position: int, number: int | None = None) -> int:
    """The number of a sample in the black box and the machine: its position, and which candidate
    for that position it is, if any."""
    return position if number is None else position | (number + 1) << _SHIFT


def position_of(code: int | None) -> int | None:
    return None if code is None else code & ((1 << _SHIFT) - 1)


def number_of(code: int) -> int | None:
    """Which candidate it is; None for the sample itself."""
    number = code >> _SHIFT
    return number - 1 if number else None


def sample_of(keys: Sequence[Any], hints: BatchHints | None, code: int | None) -> Any:
    """The sampler's index for the sample `code` of a batch, if it has one."""
    if code is None:
        return None
    number = number_of(code)
    if number is not None:
        return dict(_all_candidates(hints or NOTHING, keys)).get(number)
    return keys[code] if code < len(keys) else None


def seed_for(*parts: int) -> int:
    """A seed of 63 bits from some numbers."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


class Drawn:
    """The last few thousand indices of the sampler."""

    def __init__(self) -> None:
        self._ring: list[Any] = []
        self._at = 0

    def add(self, indices: Iterable[Any]) -> None:
        for index in indices:
            if len(self._ring) < REMEMBERED:
                self._ring.append(index)
            else:
                self._ring[self._at] = index
                self._at = (self._at + 1) % REMEMBERED

    def candidates(self, seed: int) -> list[Any]:
        return random.Random(seed).sample(self._ring, min(CANDIDATES, len(self._ring)))


def _all_candidates(hints: BatchHints, keys: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """All replacements, with their numbers: the candidates, then the batch's samples."""
    yield from hints.candidates
    yield from enumerate(keys, CANDIDATES)


def order(hints: BatchHints, index: Sequence[Any], position: int) -> list[tuple[int, Any]]:
    """The replacements for `position`, first choice first. Never the sample itself."""
    itself = key_of(index[position])
    dice = random.Random(seed_for(hints.seed, position))
    chosen = [one for one in hints.candidates if key_of(one[1]) != itself]
    # By number, not by place in the list: candidates that were left out must not matter.
    first = {number: dice.random() for number in range(CANDIDATES)}
    chosen.sort(key=lambda one: first[one[0]])
    others = [one for one in enumerate(index, CANDIDATES) if key_of(one[1]) != itself]
    dice.shuffle(others)
    return chosen + others
