"""The state of one random generator as bytes: read quickly, and restored.

There is one class for each kind of generator. Raw memory is read where a public getter would take
longer than a small sample (125 µs for a Mersenne twister of NumPy's, 30 µs for one of ``random``):
NumPy publishes the address of a bit generator's state, that of ``random.Random`` follows the
object's header, and where a ``RandomState`` keeps its second Gaussian is found by drawing one. Each
of these places is compared with the public getter once for each class and process. If they differ
(another interpreter, another NumPy) the getters are used. The Mersenne twisters of ``random`` and
``RandomState`` are written where they were read; other states are restored by the public setters,
where there is one.

No code of the user's runs: for subclasses the methods of the base class are called.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import pickle
import random
import struct
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.random
import torch

from holdfast import at_fork
from holdfast.introspection.attributes import dict_of, is_a

_TWISTER = 624 * 4 + 4
_PYTHONS: Any = random.getstate.__self__  # type: ignore[attr-defined]
_NUMPYS: Any = np.random.get_state.__self__  # type: ignore[attr-defined]
"""The default generators: the functions of the two modules are their methods."""
_POINTER = ctypes.sizeof(ctypes.c_void_p)
_GAUSS: Final = struct.Struct("<Bd")
_COUNT: Final = struct.Struct("<q")
_NO_GAUSS: Final = _GAUSS.pack(False, 0.0)
_Set = Callable[["np.ndarray[Any, np.dtype[np.uint32]]"], None]

GENERATORS: Final = (
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
    np.random.SeedSequence,
    random.Random,
    torch.Generator,
)
"""Objects of these classes have states of their own."""


class State:
    """The state of one generator."""

    kind: str
    subject: Any  # the object that has the state; two generators may share it
    varies = False  # whether its size varies; then `write` ignores zeros after it

    def read(self) -> bytes:
        raise NotImplementedError

    def write(self, raw: bytes) -> None:
        raise NotImplementedError


def state_of(generator: Any) -> State | None:
    """The state of a generator; None if it is not kept here: the libraries' default generators,
    which are kept anyway, the system's, and those on a GPU."""
    if is_a(generator, np.random.Generator):
        bits = vars(np.random.Generator)["bit_generator"].__get__(generator)
        return None if bits is np.random.mtrand.get_bit_generator() else _of_bits(bits)
    if is_a(generator, np.random.RandomState):
        return None if generator is _NUMPYS else _of_random_state(generator)
    if is_a(generator, np.random.BitGenerator):
        return None if generator is np.random.mtrand.get_bit_generator() else _of_bits(generator)
    if is_a(generator, np.random.SeedSequence):
        return _Seeds(generator)
    if is_a(generator, random.Random):
        if generator is _PYTHONS or is_a(generator, random.SystemRandom):
            return None
        return _of_random(generator)
    if is_a(generator, torch.Generator):
        if generator is torch.default_generator or generator.device.type != "cpu":
            return None
        return _Torch(generator)
    return None


def global_states() -> list[State]:
    """The states of the default generators of ``torch``, ``random`` and ``numpy.random``."""
    return [
        _Torch(torch.default_generator),
        _of_random(_PYTHONS),
        _of_random_state(_NUMPYS),
    ]


class KeptGenerators:
    """The default generators as the program has them, while others draw from them."""

    def __init__(self) -> None:
        self._states = global_states()
        self._kept = self._read()

    def _read(self) -> list[bytes]:
        return [state.read() for state in self._states]

    def _write(self, raw: list[bytes]) -> None:
        for state, one in zip(self._states, raw, strict=True):
            state.write(one)

    def put_back(self) -> None:
        self._write(self._kept)

    @contextlib.contextmanager
    def given_back(self) -> Iterator[None]:
        """What is drawn inside is drawn from the program's."""
        others = self._read()
        self.put_back()
        try:
            yield
        finally:
            self._kept = self._read()
            self._write(others)


@contextlib.contextmanager
def default_generators_kept() -> Iterator[KeptGenerators]:
    """Whatever is drawn inside from the default generators, they are afterwards as before."""
    kept = KeptGenerators()
    try:
        yield kept
    finally:
        kept.put_back()


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, texts, containers and arrays, and runs no code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module.replace("numpy.core", "numpy._core"), name) in _OF_ARRAYS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"a random state has no {module}.{name} in it")


_OF_ARRAYS: Final = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy._core.numeric", "_frombuffer"),
}


def plain_loads(raw: bytes) -> Any:
    """What was pickled of a random state. It may come from a file (``loader.load_state_dict``), so
    nothing in it may run code."""
    return _PlainUnpickler(io.BytesIO(raw)).load()


def _of_random(generator: random.Random) -> State:
    return _Twister(generator) if _twister_lies_in() else _TwisterAsked(generator)


def _view(address: int, size: int) -> memoryview:
    return _memory(address, size).toreadonly()


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_uint8 * size).from_address(address)).cast("B")


def twister_setters() -> tuple[_Set, _Set]:
    """Functions that give ``random`` and ``numpy.random`` the state of these 624 words, none of
    which is used up."""
    return _python_setter(), _numpy_setter()


# -- random ---------------------------------------------------------------------------------


class _TwisterAsked(State):
    """A Mersenne twister of ``random``, read by the getter."""

    kind = "random.Random"

    def __init__(self, generator: random.Random) -> None:
        self.subject = generator
        self._attributes = dict_of(generator)

    def read(self) -> bytes:
        *words, index = _base_of_random.getstate(self.subject)
        return np.array([index, *words], np.uint32).tobytes() + self._gauss()

    def write(self, raw: bytes) -> None:
        words = np.frombuffer(raw[:_TWISTER], np.uint32)
        has, gauss = _GAUSS.unpack_from(raw, _TWISTER)
        state = (3, (*words[1:].tolist(), int(words[0])), gauss if has else None)
        random.Random.setstate(self.subject, state)

    def _gauss(self) -> bytes:
        gauss = self._attributes.get("gauss_next")
        return _NO_GAUSS if gauss is None else _GAUSS.pack(True, gauss)


_base_of_random: Any = random.Random.__base__  # written in C


class _Twister(_TwisterAsked):
    """The same, read from memory."""

    def __init__(self, generator: random.Random) -> None:
        super().__init__(generator)
        self._memory = _memory(id(generator) + object.__basicsize__, _TWISTER)
        self._twister = self._memory.tobytes

    def read(self) -> bytes:
        gauss = self._attributes.get("gauss_next")
        return self._twister() + (_NO_GAUSS if gauss is None else _GAUSS.pack(True, gauss))

    def write(self, raw: bytes) -> None:
        has, gauss = _GAUSS.unpack_from(raw, _TWISTER)
        self._memory[:] = raw[:_TWISTER]
        self._attributes["gauss_next"] = gauss if has else None


def _python_setter() -> _Set:
    def ask(words: Any) -> None:
        random.setstate((3, (*words.tolist(), 0), None))

    if not _twister_lies_in():
        return ask
    memory = np.frombuffer(_memory(id(_PYTHONS) + object.__basicsize__, _TWISTER), np.uint32)
    index, state = memory[:1], memory[1:]

    def write(words: Any) -> None:
        index[0] = 0
        state[:] = words
        _PYTHONS.gauss_next = None

    return write


@functools.cache
def _twister_lies_in() -> bool:
    if _base_of_random.__basicsize__ < object.__basicsize__ + _TWISTER:
        return False
    tried = random.Random(7)
    return all(
        _Twister(tried).read() == _TwisterAsked(tried).read()
        for _ in range(3)
        if tried.gauss(0.0, 1.0) is not None
    )


# -- NumPy ----------------------------------------------------------------------------------


class _Bits(State):
    """A bit generator, read by the getter. A `Generator` has no other state, except how many
    children it has spawned."""

    varies = True

    def __init__(self, bits: Any) -> None:
        self.subject = bits
        self.kind = f"numpy.random.{type(bits).__name__}"
        self._seeds = _seeds_of(bits)

    def read(self) -> bytes:
        return self._spawned() + pickle.dumps(self.subject.state, 5)

    def write(self, raw: bytes) -> None:
        self.subject.state = self._decoded(raw[_COUNT.size :])
        if self._seeds is not None:
            self._seeds.write(raw)

    def _decoded(self, raw: bytes) -> Any:
        return plain_loads(raw)

    def _spawned(self) -> bytes:
        return _COUNT.pack(0) if self._seeds is None else self._seeds.read()


class _RawBits(_Bits):
    """The same, read from memory."""

    varies = False

    def __init__(self, bits: Any, at: int, size: int) -> None:
        super().__init__(bits)
        self.memory = _view(at, size)

    def read(self) -> bytes:
        return self._spawned() + self.memory.tobytes()


class _Mt19937(_RawBits):
    def __init__(self, bits: Any) -> None:
        super().__init__(bits, bits.ctypes.state_address, _TWISTER)

    def _decoded(self, raw: bytes) -> Any:
        words = np.frombuffer(raw, np.uint32)
        state = {"key": words[:624], "pos": int(words[624])}
        return {"bit_generator": "MT19937", "state": state}


class _Pcg(_RawBits):
    """At the address are a pointer, whether half of the last draw is left over, and that half. The
    pointer leads to two numbers of 128 bits, just behind these."""

    def __init__(self, bits: Any) -> None:
        address = bits.ctypes.state_address
        state = ctypes.c_void_p.from_address(address).value or 0
        self._name = type(bits).__name__
        self._at = state - address - _POINTER
        if not 8 <= self._at <= 64:
            raise ValueError("another layout")
        super().__init__(bits, address + _POINTER, self._at + 32)

    def _decoded(self, raw: bytes) -> Any:
        left, half = struct.unpack_from("<iI", raw)
        state, increment = (
            int.from_bytes(raw[at : at + 16], "little") for at in (self._at, self._at + 16)
        )
        return {
            "bit_generator": self._name,
            "state": {"state": state, "inc": increment},
            "has_uint32": left,
            "uinteger": half,
        }


_RAW: Final[dict[type, Callable[[Any], _Bits]]] = {
    np.random.MT19937: _Mt19937,
    np.random.PCG64: _Pcg,
    np.random.PCG64DXSM: _Pcg,
}


def _of_bits(bits: Any) -> _Bits:
    kind: Any = type(bits)
    return _RAW[kind](bits) if kind in _RAW and _lies_in(kind) else _Bits(bits)


@functools.cache
def _lies_in(kind: Any) -> bool:
    """Whether the memory of a bit generator of this class agrees with its getter."""
    bits = kind(7)
    draw = np.random.Generator(bits)
    try:
        raw = _RAW[kind](bits)
    except ValueError:
        return False
    for _ in range(5):  # an odd number of halves: one is left over
        draw.integers(0, 1 << 20, dtype=np.uint32)
        if not _equal(raw._decoded(raw.read()[_COUNT.size :]), bits.state):
            return False
    return True


def _equal(one: Any, other: Any) -> bool:
    """Whether two states of a bit generator, as its getter gives them, are equal."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return np.array_equal(one, other)


class _Seeds(State):
    """How many children a `SeedSequence` has spawned. NumPy has no setter for it. If the number is
    not found in memory it can only be increased, by spawning."""

    kind = "numpy.random.SeedSequence"

    def __init__(self, seeds: np.random.SeedSequence) -> None:
        self.subject = seeds

    def read(self) -> bytes:
        return _COUNT.pack(self.subject.n_children_spawned)

    def write(self, raw: bytes) -> None:
        wanted = _COUNT.unpack_from(raw)[0]
        at = _children_lie_at()
        if at is not None:
            ctypes.c_uint32.from_address(id(self.subject) + at).value = wanted
        elif wanted > self.subject.n_children_spawned:
            np.random.SeedSequence.spawn(self.subject, wanted - self.subject.n_children_spawned)


@functools.cache
def _children_lie_at() -> int | None:
    """Where a `SeedSequence` counts its children: the only offset at which several objects have the
    number they were made with. None if there is no such offset."""
    size = np.random.SeedSequence.__basicsize__
    found = set(range(0, size - 3, 4))
    for count in (5, 70_001, 3_000_000_019):
        tried = np.random.SeedSequence(7, n_children_spawned=count)
        found &= {at for at in found if ctypes.c_uint32.from_address(id(tried) + at).value == count}
    return found.pop() if len(found) == 1 else None


def _seeds_of(bits: Any) -> _Seeds | None:
    seeds = bits.seed_seq if hasattr(np.random.BitGenerator, "seed_seq") else None
    return _Seeds(seeds) if type(seeds) is np.random.SeedSequence else None


_bits_of: Callable[[Any], Any] = vars(np.random.RandomState)["_bit_generator"].__get__


class _RandomStateAsked(State):
    """A `RandomState`: a bit generator, and the second of two Gaussians."""

    kind = "numpy.random.RandomState"
    varies = True

    def __init__(self, generator: np.random.RandomState) -> None:
        self.subject = generator

    def read(self) -> bytes:
        return pickle.dumps(np.random.RandomState.get_state(self.subject, legacy=False), 5)

    def write(self, raw: bytes) -> None:
        np.random.RandomState.set_state(self.subject, plain_loads(raw))


class _RandomState(_RandomStateAsked):
    varies = False

    def __init__(self, generator: np.random.RandomState, gauss_at: int) -> None:
        super().__init__(generator)
        self.kind = "numpy.random.RandomState (MT19937)"
        self._bits = _bits_of(generator)  # kept alive, for its memory
        self._twister = _memory(self._bits.ctypes.state_address, _TWISTER)
        self._gauss = _memory(id(generator) + gauss_at, 16)

    def read(self) -> bytes:
        return self._gauss.tobytes() + self._twister.tobytes()

    def write(self, raw: bytes) -> None:
        self._gauss[:], self._twister[:] = raw[:16], raw[16 : 16 + _TWISTER]


def _of_random_state(generator: np.random.RandomState) -> State:
    at = _gauss_lies_at()
    bits: Any = type(_bits_of(generator))
    if at is None or bits is not np.random.MT19937 or not _lies_in(bits):
        return _RandomStateAsked(generator)
    return _RandomState(generator, at)


def _numpy_setter() -> _Set:
    get_bits, bits, at = np.random.mtrand.get_bit_generator, _bits_of(_NUMPYS), _gauss_lies_at()

    def ask(words: Any) -> None:
        bits = get_bits()
        state = type(bits)(np.random.SeedSequence(words[:8].tolist())).state
        if type(bits) is np.random.MT19937:
            state = {"bit_generator": "MT19937", "state": {"key": words, "pos": 0}}
        _NUMPYS.set_state({**state, "has_gauss": 0, "gauss": 0.0})

    if at is None or type(bits) is not np.random.MT19937 or not _lies_in(np.random.MT19937):
        return ask
    memory = np.frombuffer(_memory(bits.ctypes.state_address, _TWISTER), np.uint32)
    state, position = memory[:624], memory[624:]
    gauss = np.frombuffer(_memory(id(_NUMPYS) + at, 16), np.uint32)

    def write(words: Any) -> None:
        if get_bits() is bits:
            state[:] = words
            position[0] = gauss[0] = 0
        else:  # set_bit_generator()
            ask(words)

    return write


@functools.cache
def _gauss_lies_at() -> int | None:
    """Where a `RandomState` keeps its second Gaussian: behind a pointer into itself. None if it is
    not found there."""
    tried = np.random.RandomState(7)
    size = np.random.RandomState.__basicsize__
    words = np.frombuffer(_view(id(tried), size - size % 8), np.uint64)
    inside = (words >= id(tried)) & (words < id(tried) + size)
    for at in (8 * np.flatnonzero(inside) + 8).tolist():
        if at + 16 <= size and all(_gauss_is(tried, at) for _ in range(4)):
            return int(at)
    return None


def _gauss_is(tried: np.random.RandomState, at: int) -> bool:
    tried.standard_normal()
    state: Any = tried.get_state(legacy=False)
    has, gauss = struct.unpack("<i4xd", _view(id(tried) + at, 16))
    return bool(has == state["has_gauss"] and (not has or gauss == state["gauss"]))


# -- torch ----------------------------------------------------------------------------------


class _Torch(State):
    kind = "torch.Generator"

    def __init__(self, generator: torch.Generator) -> None:
        self.subject = generator
        self._get: Callable[[], torch.Tensor] = partial(torch.Generator.get_state, generator)

    def read(self) -> bytes:
        with _asking_torch:
            state = self._get()
        return _TorchState.from_address(state.data_ptr()).raw

    def write(self, raw: bytes) -> None:
        state = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        with _asking_torch:
            torch.Generator.set_state(self.subject, state)


# torch's getter has the generator's lock while it makes a Python object, and before Python 3.12
# that may collect garbage, which lets other threads run. One of them that asks too then waits for
# the generator's lock, with Python's lock held, for ever. So ours ask one after the other. A signal
# handler may ask in the middle of it.
_asking_torch = threading.RLock()


_Lock: Callable[[], Any] = type(_asking_torch)
# `threading.RLock` is a function, and its module may be gone when a child is forked.


def _in_child(lock: Callable[[], Any] = _Lock) -> None:
    global _asking_torch
    _asking_torch = lock()  # another thread may have held it


at_fork.in_child(_in_child)


_TorchState = ctypes.c_char * len(torch.Generator().get_state())
