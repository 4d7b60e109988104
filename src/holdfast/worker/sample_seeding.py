"""``seeding="sample"``: a random state for each sample, made from the seed, the epoch and its key.

With torch's seeding a sample's random numbers depend on which worker loads it, and after which
other samples. Here ``random``, ``numpy.random`` and ``torch`` are given a state for each sample,
just before it is loaded. So it does not matter how the work was divided, in which order it was
done, or how often a sample had to be loaded.

The states come from a counter-based generator, Philox with a key of 128 bits. Its key is made of
the seed and the epoch, and its counter of the kind of the request and the sample's key. So two
samples of an epoch never share a part of its output, whole numbers as keys by construction and
other keys up to collisions of 128 bits. Its output is the whole state of the three generators,
which are Mersenne twisters: their own functions for seeding take longer, and those of torch and
NumPy accept only 32 bits, which collide among some ten thousand samples. The position is at the
beginning of that state, so the first numbers a sample draws are Philox's own.

It cannot be put off until a number is drawn. No generator has a hook for that: the bound methods
``random.random`` and ``random.getrandbits``, which a program may have imported by name, read the
object's memory; a ``RandomState`` holds a copy of the function pointers of its bit generator; and
``torch`` draws in C++ from a struct that its generator owns. And a generator that was left alone so
far may be used by the next sample.

Batches are requests of their own (for a ``collate_fn``, and for ``__getitems__``), named by their
first key. The elements of a stream are named by the worker and their position in its stream. That
position is all the random state that a worker has then.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.samples.sample_keys import description_of
from holdfast.worker.generator_states import State, twister_setters

# Kinds of requests. Each has a second one, for keys that are no whole numbers of 64 bits.
_SAMPLE, _BATCH, _ELEMENT, _BATCH_OF_STREAM = 0, 2, 4, 6
_BEFORE_THE_FIRST: Final = 2**64 - 1  # the position of a stream when iter() is called
_WORDS = 624  # of 32 bits, in the state of one generator
_RAW = 3 * _WORDS // 2 + 1  # words of 64 bits, for three generators and torch.initial_seed()
_POSITION: Final = struct.Struct("<q")
_TORCH_HEAD: Final = struct.Struct("<QiiQ")
"""Of a state of `torch.Generator`: the seed; the numbers left before others are computed, + 1;
whether it was seeded; the next number. Its words follow, each in 64 bits."""
_SetTorch = Callable[["NDArray[np.uint32]", "NDArray[np.uint64]"], object]


class EpochSeeds(NamedTuple):
    """The seeds of one epoch, beside those that torch gives a worker when it starts."""

    shared: int | None = None  # of a datapipe, equal in all workers
    samples: tuple[int, int] | None = None  # with seeding="sample": the seed and the epoch


NO_SEEDS: Final = EpochSeeds()


class SampleSeeds(State):
    """Seeds the global generators of this process, for one sample after the other.

    As a `State` it is the position in a stream.
    """

    kind = "position in a stream"

    def __init__(self, seed: int, epoch: int, worker: int = 0) -> None:
        self._worker = worker
        self.position = 0  # of the next element of the stream
        self.set_random, self.set_numpy = twister_setters()
        self.set_torch = _torch_setter(torch.default_generator)
        self.begin_epoch(seed, epoch)

    def begin_epoch(self, seed: int, epoch: int) -> None:
        named = b"holdfast %d %d" % (seed, epoch)
        key = hashlib.blake2b(named, digest_size=16).digest()
        self._philox = np.random.Philox(key=int.from_bytes(key, "little"), counter=0)
        self._state: Any = self._philox.state
        self._counter = self._state["state"]["counter"]
        self._random_raw = self._philox.random_raw

    # -- requests -------------------------------------------------------------------------

    def for_sample(self, key: Any) -> None:
        self._for_key(_SAMPLE, key)

    def for_batch(self, key: Any) -> None:
        """For what is done with a batch as a whole. `key` is that of its first sample."""
        self._for_key(_BATCH, key)

    def begin_stream(self) -> None:
        """The stream begins: `iter` is called next."""
        self._seed(_ELEMENT, _BEFORE_THE_FIRST, self._worker)
        self.position = 0

    def for_element(self) -> None:
        """For the next element of the stream."""
        self._seed(_ELEMENT, self.position, self._worker)
        self.position += 1

    def for_batch_of_stream(self, position: int) -> None:
        """`position` is that of its first element."""
        self._seed(_BATCH_OF_STREAM, position, self._worker)

    def _for_key(self, kind: int, key: Any) -> None:
        if isinstance(key, np.integer):
            key = int(key)
        if type(key) is int and -(1 << 63) <= key < 1 << 63:
            self._seed(kind, key & 0xFFFF_FFFF_FFFF_FFFF, 0)
            return
        if type(key) is str:
            self._hash(kind, b"text " + key.encode("utf-8", "surrogatepass"))
            return
        described = description_of(key)
        if described is None:
            raise TypeError(
                f'seeding="sample" cannot tell the sample {key!r} in another process: its key is '
                f"a {type(key).__qualname__} whose repr() does not identify it. Let the sampler "
                "give numbers, texts, or tuples of these"
            )
        if type(described) is int and type(key) is not int:  # a tensor of one number
            self._for_key(kind, described)
            return
        self._hash(kind, b"other " + str(described).encode("utf-8", "surrogatepass"))

    def _hash(self, kind: int, key: bytes) -> None:
        digest = hashlib.blake2b(key, digest_size=16).digest()
        self._seed(kind + 1, *struct.unpack("<QQ", digest))

    def draw(self, kind: int, low: int, high: int) -> NDArray[np.uint64]:
        """The words for one request: of three states, and one more."""
        counter = self._counter
        counter[0], counter[1], counter[2], counter[3] = 0, kind, low, high
        self._philox.state = self._state
        return self._random_raw(_RAW)

    def _seed(self, kind: int, low: int, high: int) -> None:
        raw = self.draw(kind, low, high)
        words = raw.view(np.uint32)
        self.set_random(words[:_WORDS])
        self.set_numpy(words[_WORDS : 2 * _WORDS])
        self.set_torch(words[2 * _WORDS : 3 * _WORDS], raw[_RAW - 1 :])

    # -- the position in a stream, as a state ---------------------------------------------

    def read(self) -> bytes:
        return _POSITION.pack(self.position)

    def write(self, raw: bytes) -> None:
        (self.position,) = _POSITION.unpack_from(raw)


def _torch_setter(generator: torch.Generator) -> _SetTorch:
    """A function that gives a generator of torch the state of these words, and this seed. (If the
    layout is not the one that is known, it is only seeded.)"""
    if generator is torch.default_generator and not _torch_state_is_known():
        return lambda words, seed: generator.manual_seed(int(seed[0]))
    state = torch.Generator().get_state()
    raw = state.numpy()
    raw[: _TORCH_HEAD.size] = np.frombuffer(_TORCH_HEAD.pack(0, _WORDS, 1, 1), np.uint8)
    place = raw[_TORCH_HEAD.size : _TORCH_HEAD.size + 8 * _WORDS].view(np.uint64)
    initial_seed, set_state = raw[:8].view(np.uint64), generator.set_state

    def write(words: NDArray[np.uint32], seed: NDArray[np.uint64]) -> None:
        place[:] = words
        initial_seed[:] = seed
        set_state(state)

    return write


@functools.cache
def _torch_state_is_known() -> bool:
    """Whether torch draws what NumPy's Mersenne twister draws from the same words."""
    words = np.arange(1, _WORDS + 1, dtype=np.uint32) * np.uint32(2654435761)
    bits, generator = np.random.MT19937(0), torch.Generator()
    bits.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": 1}}
    try:
        _torch_setter(generator)(words, np.array([7], np.uint64))
    except (RuntimeError, ValueError):
        return False
    drawn = torch.empty(_WORDS + 1, dtype=torch.int32).random_(0, 1 << 16, generator=generator)
    same = drawn.tolist() == (bits.random_raw(_WORDS + 1) & 0xFFFF).tolist()
    return same and generator.initial_seed() == 7


def kept_states(seeds: SampleSeeds | None, iterable: bool) -> list[State] | None:
    """What is kept in place of the states of the global generators, which each sample is given
    anew; None if they are kept."""
    if seeds is None:
        return None
    return [seeds] if iterable else []


class SeededItems:
    """A map-style dataset, of which each sample is loaded from its own random state. With
    ``__getitems__`` each batch is."""

    def __init__(self, dataset: Any, seeds: SampleSeeds) -> None:
        self._dataset = dataset
        self._seeds = seeds

    def __getitem__(self, key: Any) -> Any:
        self._seeds.for_sample(key)
        return self._dataset[key]

    def __getitems__(self, keys: Any) -> Any:
        self._seeds.for_batch(first_key(keys))
        return self._dataset.__getitems__(keys)


def first_key(keys: Any) -> Any:
    """The key that stands for a batch; None if it has none, or they can be read only once."""
    return next(iter(keys), None) if hasattr(keys, "__len__") else None
