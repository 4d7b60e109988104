"""The part of a fingerprint that comes from memory: a checksum, or a sample of the bytes.

Small arrays go in whole. Of larger ones both ends and some words are read, at places that are
spread over all of it, drawn once and the same in every process.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

SMALL: Final = 2048  # bytes of an array up to which they go in as they are,
WHOLE: Final = 1 << 16  # and up to which their checksum does;
IN_ALL: Final = 1 << 18  # bytes of a batch at most that go in in that way
WORD: Final = 8  # bytes that are read at one place of a larger array
PLACES: Final = 4096  # in a batch at most; each array gets half of what is left, or
FEW: Final = 64
ENDS: Final = 64  # bytes at either end
LENGTHS: Final = 32  # lengths of arrays for which the places are remembered

_SPREAD = np.random.default_rng(0).random(PLACES)  # the same in every process
_places_of: dict[tuple[int, int], NDArray[np.int64]] = {}


class MemoryReader:
    """Reads the arrays of one batch."""

    def __init__(self, add: Callable[[Any], object]) -> None:
        """`add` is called with everything that is to go into the fingerprint."""
        self._add = add
        self._places = PLACES
        self._whole = IN_ALL

    def array(self, array: NDArray[Any]) -> None:
        """Add the bytes of an array, all or some."""
        nbytes = array.nbytes
        if nbytes <= SMALL:
            self._add(array.tobytes())
        elif array.flags.c_contiguous:
            self.flat(array.reshape(-1).view(np.uint8))
        elif nbytes <= WHOLE and nbytes <= self._whole:
            self.flat(np.frombuffer(array.tobytes(), np.uint8))
        else:
            array = _thinned(array, self._share() * WORD // array.itemsize)
            self._add(_checksum(array.tobytes()))

    def flat(self, flat: NDArray[np.uint8]) -> None:
        """Add contiguous bytes, all or some."""
        nbytes = len(flat)
        if nbytes <= WHOLE and nbytes <= self._whole:
            self._whole -= nbytes
            self._add(_checksum(flat))
            return
        self._add(flat[:ENDS].tobytes())
        self._add(flat[-ENDS:].tobytes())
        words = nbytes // WORD
        places = min(self._share(), words)
        table = flat[: words * WORD].reshape(words, WORD)  # as bytes: they may not be aligned
        self._add(_checksum(table.take(_places(words, places), axis=0, mode="clip")))

    def _share(self) -> int:
        """At how many places this array is read."""
        share = max(FEW, self._places // 2)
        self._places -= share
        return share


def _places(words: int, count: int) -> NDArray[np.int64]:
    """Which words are read: one in each of `count` stretches of equal length, somewhere in it. A
    fixed distance might be that of rows, and images have equal borders."""
    found = _places_of.get((words, count))
    if found is None:
        if len(_places_of) >= LENGTHS:
            _places_of.clear()
        found = ((np.arange(count) + _SPREAD[:count]) * (words / count)).astype(np.int64)
        _places_of[words, count] = found
    return found


def _checksum(memory: Any) -> bytes:
    return zlib.crc32(memory).to_bytes(4, "little")


def _thinned(array: NDArray[Any], elements: int) -> NDArray[Any]:
    """Every so many of each dimension, so that about `elements` are left."""
    left = max(1, elements)
    steps = []
    for number, size in enumerate(array.shape):
        share = max(1, int(left ** (1 / (array.ndim - number))))
        taken = min(size, share)
        steps.append(slice(size // taken // 2, None, -(-size // taken)))
        left = max(1, left // taken)
    return array[tuple(steps)]
