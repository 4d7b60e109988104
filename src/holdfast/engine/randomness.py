"""The random state of a worker: seeding it as torch does, saving it, bringing it back.

A lost batch is redone bit for bit only if the replacement starts from the very state the dead
worker had before that batch. So every worker saves the state of ``torch``, ``random`` and
``numpy.random`` after every batch, into memory that survives it. The public getters take 15 µs
(``random.getstate``) and 75 µs (``numpy.random.get_state``), as long as a small batch itself.
Both generators are Mersenne twisters in plain memory: NumPy publishes the address of its own; that
of ``random`` follows the object's header. The raw copy is tried against the public getter when this
is imported, before any worker is forked; where the two differ (another interpreter, another bit
generator) the getters are used. Only the cached second Gaussian needs NumPy's getter, and only
after a draw. Most datasets draw nothing: then it is enough to see that nothing has changed, which
leaves the processor's nearest cache to the dataset.

Generators that the dataset has of its own are kept behind these (`generators`). They are looked for
after the first batch, the second, the fourth and so on; when one was seen to come into being
(`births`); and as often as it takes no more than a two-hundredth of the time, which is after every
batch that takes some tens of milliseconds. Otherwise, where there are none, this costs a few
comparisons. With a state goes the number of the one for which they were last looked for: so it is
known later what may be missing in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import pickle
import random
import struct
import sys
from collections.abc import Iterator
from time import monotonic
from typing import Any, Protocol

import numpy as np
import numpy.random  # here, and not first in every worker: NumPy loads it lazily
import torch
from numpy.typing import NDArray
from torch.utils.data._utils.worker import _generate_state

from holdfast.engine.births import Births, are_seen
from holdfast.engine.generators import Generators, Own, Roots, bring_back_own

__all__ = ["OWN_AT", "SIZE", "Randomness", "Snapshot", "bring_back", "seed_worker"]

_TORCH = 5056
_TWISTER = 624 * 4 + 4
# Kind, size, random's and numpy's cached Gaussian; the number of the state for which generators
# were last looked for, and whether none was seen to come into being since.
_HEAD = struct.Struct("<IIBdBdq?")
_JUST_NOW = -1  # in place of that number
_SHARE = 200  # of the time, one part is for looking
_FRUITLESS = 32  # looks because something has come into being that was none of them, in a row
_RAW, _PICKLED = 1, 2
_BODY = 64
_PYTHON_AT = _BODY + _TORCH
_NUMPY_AT = _PYTHON_AT + _TWISTER
SIZE = _NUMPY_AT + _TWISTER  # bytes a saved state takes at least
OWN_AT = 16 * 1024  # where the states of the dataset's own generators begin
Bytes = NDArray[np.uint8]
_Global = tuple[torch.Tensor, bytes, bytes, float | None]  # of torch, random, numpy; a Gaussian
Snapshot = tuple[torch.Tensor, Any, Any, Own]  # of torch, random, numpy and the dataset's own


def seed_worker(base_seed: int, worker_id: int) -> int:
    """Seed ``random``, ``torch`` and ``numpy`` as torch seeds the worker with this id."""
    seed = base_seed + worker_id
    random.seed(seed)
    with _without_stacks():
        torch.manual_seed(seed)
    np.random.seed(_generate_state(base_seed, worker_id))  # type: ignore[no-untyped-call]
    return seed


@contextlib.contextmanager
def _without_stacks() -> Iterator[None]:
    """torch notes from where it was asked to seed an accelerator that is not in use yet. To name
    those lines it would read the source of every module on the stack, in every worker: some
    milliseconds and 1.5 MB, and nobody would learn more than that it was us. (A thread of this
    process that failed meanwhile would show no stack; but a worker has none yet.)"""
    limited = hasattr(sys, "tracebacklimit")
    before = sys.tracebacklimit if limited else None
    sys.tracebacklimit = 0
    try:
        yield
    finally:
        if limited:
            sys.tracebacklimit = before
        else:
            del sys.tracebacklimit


class _Slot:
    """Where a state is written to, taken apart once: slicing an array costs more than a copy."""

    def __init__(self, memory: Bytes) -> None:
        self.memory = memory
        view = memory.data
        self.head = view[:_BODY]
        self.torch: int = memory.ctypes.data + _BODY
        self.python = view[_PYTHON_AT:_NUMPY_AT]
        self.numpy = view[_NUMPY_AT:SIZE]
        self.own = view[OWN_AT:]


class Keeper(Protocol):
    """Where states are kept, by number: see `autopsy.blackbox.Recorder`."""

    def free_slot(self) -> Bytes: ...
    def commit(self, number: int, size: int) -> None: ...
    def still(self, number: int) -> None: ...


def _nothing() -> tuple[()]:
    return ()


class Randomness:
    """Saves the random state of this process quickly, again and again.

    `roots` are the objects, with their names, whose own generators belong to it; `room` is how many
    bytes there are for those.
    """

    def __init__(self, roots: Roots = _nothing, room: int = 1 << 20) -> None:
        self.own = Generators(roots, room)
        self._until_look, self._pause = 1, 1  # calls, until generators are looked for
        self._look_at = 0.0  # and when, by the clock
        self._births = Births()
        self._fruitless = 0
        self._looked, self._all_births = _JUST_NOW, True
        self._slots: dict[int, _Slot] = {}
        self._python = None if _python_twister is None else _python_twister.data
        self._generator, self._numpy = _numpy_twister
        self._numpy_last = b""
        self._gauss = (False, 0.0)
        self._last: _Global | None = None

    def begin(self, number: int) -> None:
        """Look for the dataset's own generators before anything is drawn from them, which is when
        every process with this dataset sees the same. The present state has this number."""
        self._look(born=False)
        self._births.seen()
        self._looked = number

    def look_again(self) -> bool:
        """After a batch, and where it matters before a sample: look for the dataset's own
        generators, because some are made when they are first needed. Whether it was time to."""
        self._until_look -= 1
        born = self._births.seen()
        in_time = monotonic() >= self._look_at
        if not (born or in_time) and self._until_look:
            return False
        if not self._until_look:
            self._until_look = self._pause
            self._pause *= 2
        elif not in_time and self._fruitless >= _FRUITLESS:
            self._all_births = False
            return False
        self._look(born)
        return True

    def _look(self, born: bool) -> None:
        before = self.own.paths
        start = monotonic()
        self.own.look()
        end = monotonic()
        self._look_at = end + _SHARE * (end - start)
        if self.own.paths != before:
            self._fruitless = 0
        elif born:
            self._fruitless += 1

    def born(self) -> bool:
        """Whether a generator may have come into being that nobody has looked for."""
        return self._births.seen()

    def keep(self, keeper: Keeper, number: int) -> None:
        """Have the present state kept as state `number`; the one before it is `number` - 1."""
        all_births = self._all_births
        looked = self.look_again()
        if looked and not self.own.in_doubt:
            self._looked, self._all_births = number, True
        changed = self.own.changed() if self.own else False
        if changed or looked or self._all_births != all_births or not self.unchanged():
            keeper.commit(number, self.save(keeper.free_slot()))
        else:
            keeper.still(number)

    def save(self, slot: Bytes) -> int:
        """Write the present state into `slot`, which has at least `SIZE` bytes and is written to
        again and again; how many bytes it takes. Of the dataset's own generators it is the state
        when they were last seen to have changed."""
        parts = self._slots.get(id(slot))
        if parts is None:
            parts = self._slots[id(slot)] = _Slot(slot)
        size, self._last = self._save_global(parts, self._looked, self._all_births)
        return OWN_AT + self.own.save(parts.own) if self.own else size

    def saved(self, looked: bool = False) -> bytes:
        """The present state, as `restore` takes it; `looked` if the dataset's own generators were
        looked for just now."""
        slot = np.zeros(OWN_AT, np.uint8)
        self._save_global(_Slot(slot), _JUST_NOW, True)
        return slot.tobytes() + self.own.saved(looked)

    def restore(self, saved: bytes, number: int | None = None) -> None:
        """Bring back a state that `save` wrote, in this or another process. If its `number` is
        given, what cannot be known about the dataset's own generators will be said."""
        looked, all_births = _restore_global(saved)
        own = saved[OWN_AT:]
        self.own.restore(own)
        if number is None:
            return
        self.own.check(own)
        self._looked = number
        if looked not in (_JUST_NOW, number):
            self._looked, self._all_births = looked, all_births
            self.own.doubt(lambda kind: not (all_births and are_seen(kind)))

    def _save_global(
        self, parts: _Slot, looked: int, all_births: bool
    ) -> tuple[int, _Global | None]:
        """Write the states of the three libraries' own generators, and what is known of the others;
        how many bytes that takes, and what to compare with later."""
        numpy_memory = self._numpy_memory()
        if self._python is None or numpy_memory is None:
            return _save_pickled(parts.memory, looked, all_births), None
        numpy_raw = numpy_memory.tobytes()
        python_raw = self._python.tobytes()
        has_gauss, gauss = self._numpy_gauss(numpy_raw)
        python_gauss = random._inst.gauss_next  # type: ignore[attr-defined]
        torch_state = torch.default_generator.get_state()
        ctypes.memmove(parts.torch, torch_state.data_ptr(), _TORCH)
        parts.python[:] = python_raw
        parts.numpy[:] = numpy_raw
        _HEAD.pack_into(
            parts.head,
            0,
            _RAW,
            SIZE,
            python_gauss is not None,
            python_gauss or 0.0,
            has_gauss,
            gauss,
            looked,
            all_births,
        )
        return SIZE, (torch_state, python_raw, numpy_raw, python_gauss)

    def unchanged(self) -> bool:
        """Whether the present state is the one that was saved last."""
        last = self._last
        if last is None or self._gauss[0]:
            return False  # a cached Gaussian may have been taken without a trace in the twister
        torch_state, python_raw, numpy_raw, python_gauss = last
        numpy_memory = self._numpy_memory()
        return (
            numpy_memory is not None
            and self._python is not None
            and numpy_memory.tobytes() == numpy_raw
            and self._python.tobytes() == python_raw
            and random._inst.gauss_next == python_gauss  # type: ignore[attr-defined]
            and _same(torch.default_generator.get_state(), torch_state)
        )

    def snapshot(self) -> Snapshot:
        """The present state, to be brought back in this process or never; about 3 µs."""
        self.look_again()
        numpy_memory = self._numpy_memory()
        if self._python is None or numpy_memory is None:
            states = torch.get_rng_state(), random.getstate(), np.random.get_state()
            return (*states, self.own.snapshot())
        numpy_raw = numpy_memory.tobytes()
        python_gauss = random._inst.gauss_next  # type: ignore[attr-defined]
        return (
            torch.default_generator.get_state(),
            (self._python.tobytes(), python_gauss),
            (numpy_raw, self._numpy_gauss(numpy_raw)),
            self.own.snapshot(),
        )

    def _numpy_gauss(self, raw: bytes) -> tuple[bool, float]:
        """The cached second Gaussian, which only a draw can have changed."""
        if self._gauss[0] or raw != self._numpy_last:
            state: Any = np.random.get_state(legacy=False)
            self._gauss = bool(state["has_gauss"]), float(state["gauss"])
            self._numpy_last = raw
        return self._gauss

    def _numpy_memory(self) -> Bytes | None:
        generator = np.random.mtrand._rand._bit_generator
        if generator is not self._generator:
            self._generator, self._numpy, self._numpy_last = generator, _in_numpy(generator), b""
        return self._numpy


def _save_pickled(slot: Bytes, looked: int, all_births: bool) -> int:
    """By the getters; how many bytes it takes."""
    state = (torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False))
    body = np.frombuffer(pickle.dumps(state, protocol=5), np.uint8)
    if len(body) > min(len(slot), OWN_AT) - _BODY:
        raise ValueError(f"a random state of {len(body)} bytes does not fit the black box")
    slot[_BODY : _BODY + len(body)] = body
    head = (_PICKLED, _BODY + len(body), False, 0.0, False, 0.0)
    _HEAD.pack_into(slot.data, 0, *head, looked, all_births)
    return _BODY + len(body)


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def _same(state: torch.Tensor, other: torch.Tensor) -> bool:
    """``torch.equal`` takes five times as long."""
    return not _memcmp(state.data_ptr(), other.data_ptr(), _TORCH)


def _in_python() -> Bytes | None:
    """The twister inside `random`'s own generator, if it lies where we expect it."""
    instance = random._inst
    header = object.__basicsize__
    if type(instance).__basicsize__ < header + _TWISTER:
        return None
    memory = _memory_at(id(instance) + header, _TWISTER)
    words = np.frombuffer(memory.tobytes(), np.uint32)
    _, state, _ = random.getstate()
    return memory if (*words[1:].tolist(), int(words[0])) == state else None


def _in_numpy(generator: Any) -> Bytes | None:
    """The twister inside NumPy's generator, if it is one."""
    if type(generator) is not np.random.MT19937:
        return None
    memory = _memory_at(generator.ctypes.state_address, _TWISTER)
    words = np.frombuffer(memory.tobytes(), np.uint32)
    state = generator.state["state"]
    known = (words[:624] == state["key"]).all() and int(words[624]) == state["pos"]
    return memory if known else None


def _memory_at(address: int, size: int) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


_python_twister = _in_python()
_numpy_twister = (
    np.random.mtrand._rand._bit_generator,
    _in_numpy(np.random.mtrand._rand._bit_generator),
)


def bring_back(snapshot: Snapshot) -> None:
    """Go back to where `Randomness.snapshot` was taken, in this process."""
    torch_state, python_state, numpy_state, own = snapshot
    bring_back_own(own)
    torch.set_rng_state(torch_state)
    if isinstance(python_state[0], bytes):
        _set_python(python_state[0], python_state[1])
        _set_numpy(numpy_state[0], *numpy_state[1])
    else:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _restore_global(saved: bytes) -> tuple[int, bool]:
    """Bring back what `Randomness._save_global` wrote; what is said there of the others."""
    kind, size, has_python_gauss, python_gauss, has_gauss, gauss, *looked = _HEAD.unpack_from(saved)
    if kind == _PICKLED:
        torch_state, python_state, numpy_state = pickle.loads(saved[_BODY:size])
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
    elif kind == _RAW:
        torch.set_rng_state(torch.frombuffer(bytearray(saved[_BODY:_PYTHON_AT]), dtype=torch.uint8))
        _set_python(saved[_PYTHON_AT:_NUMPY_AT], python_gauss if has_python_gauss else None)
        _set_numpy(saved[_NUMPY_AT:SIZE], has_gauss, gauss)
    else:
        raise ValueError(f"not a saved random state: kind {kind}")
    return looked[0], looked[1]


def _set_python(raw: bytes, gauss: float | None) -> None:
    words = np.frombuffer(raw, np.uint32)
    random.setstate((3, (*words[1:].tolist(), int(words[0])), gauss))


def _set_numpy(raw: bytes, has_gauss: bool, gauss: float) -> None:
    words = np.frombuffer(raw, np.uint32)
    np.random.set_state(("MT19937", words[:624], int(words[624]), int(has_gauss), gauss))
