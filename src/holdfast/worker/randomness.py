"""The random state of a worker: seeded as torch does, saved and restored.

A lost batch is made again bit for bit only if the replacement starts from the state that the dead
worker had before that batch. So every worker saves the state of ``torch``, ``random`` and
``numpy.random`` after every batch, into memory that survives it (`generator_states` reads them
quickly). If nothing was drawn, as in most datasets, comparing is enough, and writes nothing.

Generators of the dataset's own are kept behind these (`generators`). They are searched for after
the first batch, the second, the fourth and so on, and as often as that takes no more than a
two-hundredth of the time, which is after every batch that takes some tens of milliseconds.
Otherwise, where there are none, this costs a few comparisons. A state says for which number they
were last searched for: so it is known later whether some may be missing in it.
"""

from __future__ import annotations

import contextlib
import random
import struct
import sys
from collections.abc import Callable, Iterator
from functools import partial
from time import monotonic
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.random  # here, and not first in every worker: NumPy loads it lazily
import torch
from numpy.typing import NDArray

from holdfast.private_names import numpy_seeds
from holdfast.worker.generator_states import State, global_states
from holdfast.worker.generators import Generators, Own, Roots
from holdfast.worker.worker_rng import WorkerRng

# For which number the dataset's own generators were last searched for; the sizes of the global
# states.
_HEAD = struct.Struct("<qIII")
_JUST_NOW = -1  # in place of that number
_SHARE = 200  # one part of so many of the time is for searching
T = TypeVar("T")
OWN_AT = 16 * 1024  # where the states of the dataset's own generators begin
Snapshot = Own
_numpy_bits = np.random.mtrand.get_bit_generator


def seed_worker(base_seed: int, worker_id: int) -> int:
    """Seed ``random``, ``torch`` and ``numpy`` as torch seeds the worker with this id."""
    seed = base_seed + worker_id
    random.seed(seed)
    with _without_stacks():
        torch.manual_seed(seed)
    np.random.seed(numpy_seeds(base_seed, worker_id))
    return seed


@contextlib.contextmanager
def _without_stacks() -> Iterator[None]:
    """Have torch keep no stack when it seeds an accelerator that is not in use yet. To name the
    lines it would read the source of every module on the stack, in every worker: some milliseconds
    and 1.5 MB. (A thread that fails meanwhile shows no stack; but a worker has no threads yet.)"""
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


class Keeper(Protocol):
    """Where states are kept, by number: see `autopsy.blackbox.Recorder`."""

    def free_slot(self) -> NDArray[np.uint8]: ...
    def commit(self, number: int, size: int) -> None: ...
    def still(self, number: int) -> None: ...


class Randomness:
    """Saves the random state of a worker quickly, again and again.

    `roots` returns the objects, with their names, in which generators are searched for; `room` is
    how many bytes there are for the states of these. `rng` is the worker's own, if it has that.
    `instead`: what is kept in place of the global states, if those are set for each sample anyway
    (``seeding="sample"``), or are those of other threads too, and are left alone.
    """

    def __init__(
        self,
        roots: Roots = tuple,
        room: int = 1 << 20,
        instead: list[State] | None = None,
        rng: WorkerRng | None = None,
    ) -> None:
        self._rng = rng
        self._rng_count = 0  # generators in it when they were last searched for
        if rng is not None:
            roots = partial(_with_rng, roots, rng)
        self.own = Generators(roots, room)
        self._instead = instead
        self._global = global_states() if instead is None else instead
        self._bits = _numpy_bits()  # of numpy.random
        self._last: list[bytes] | None = None  # the global states that were kept last
        self._until_search, self._pause = 1, 1  # batches, until generators are searched for
        self._search_at = 0.0  # and when, by the clock
        self._searched = _JUST_NOW
        self._memories: dict[int, tuple[memoryview, memoryview]] = {}  # of slots, cast once

    # -- searching ------------------------------------------------------------------------

    def begin(self, number: int) -> None:
        """Search for the dataset's own generators before anything is drawn from them, which is when
        every process with this dataset sees the same. The present state has this number."""
        self._search()
        self._searched = number

    def search_if_due(self) -> bool:
        """After a batch, and where it matters before a sample: search for the dataset's own
        generators, because some are made when they are first needed. Whether it was time to."""
        self._until_search -= 1
        if self._rng is not None and self._rng.count != self._rng_count:
            pass
        elif not self._until_search:
            self._until_search = self._pause
            self._pause *= 2
        elif monotonic() < self._search_at:
            return False
        self._search()
        return True

    def _search(self) -> None:
        start = monotonic()
        if self._rng is not None:
            self._rng_count = self._rng.count
        self.own.find_all()
        end = monotonic()
        self._search_at = end + _SHARE * (end - start)

    # -- saving ---------------------------------------------------------------------------

    def keep(self, keeper: Keeper, number: int) -> None:
        """Have the present state kept as state `number`; the one before it is `number` - 1."""
        searched = self.search_if_due()
        if searched and not self.own.in_doubt:
            self._searched = number
        changed = self.own.changed() if self.own else False
        states = self._read()
        if changed or searched or states != self._last:
            self._last = states
            keeper.commit(number, self._write(keeper.free_slot(), states))
        else:
            keeper.still(number)

    def _read(self) -> list[bytes]:
        if _numpy_bits() is not self._bits and self._instead is None:  # set_bit_generator()
            self._global = global_states()
            self._bits = _numpy_bits()
        return [state.read() for state in self._global]

    def _write(self, slot: NDArray[np.uint8], states: list[bytes]) -> int:
        """Write a state into a slot, of which there are a few; how many bytes it takes."""
        memory, own = self._memories.get(id(slot)) or self._memories.setdefault(
            id(slot), (slot.data, slot.data[OWN_AT:])
        )
        head = _head(self._searched, states)
        size = len(head)
        memory[:size] = head
        return OWN_AT + self.own.save(own) if self.own else size

    def saved(self) -> bytes:
        """The present state, as `restore` takes it."""
        head = _head(_JUST_NOW, self._read())
        return head.ljust(OWN_AT, b"\0") + self.own.saved()

    def snapshot(self) -> Snapshot:
        """The present state, for `restore_in_process`; about 5 µs."""
        self.search_if_due()
        return [*zip(self._global, self._read(), strict=True), *self.own.snapshot()]

    def seed(self, number: int) -> None:
        """Seed the global generators, if they are this worker's own."""
        if self._instead is None:
            random.seed(number)
            torch.default_generator.manual_seed(number)  # torch.manual_seed would seed GPUs too
            np.random.seed(number & 0xFFFFFFFF)

    # -- restoring ------------------------------------------------------------------------

    def restore(self, saved: bytes, number: int | None = None, *, search: bool = True) -> None:
        """Restore a state that was kept, in this or another process. If its `number` is given, what
        cannot be known about the dataset's own generators will be said. `search`: whether the
        dataset may have made generators since they were last searched for."""
        searched, *sizes = _HEAD.unpack_from(saved)
        if len(self._global) != len(sizes) - sizes.count(0):
            raise ValueError("not a saved random state")
        at = _HEAD.size
        for state, size in zip(self._global, sizes, strict=False):
            state.write(saved[at : at + size])
            at += size
        own = saved[OWN_AT:]
        if self._rng is not None:
            self._rng.prepare(self.own.paths_in(own))
            search = search or self._rng.count != self._rng_count
        self.own.restore(own, search=search)
        if number is None:
            return
        self.own.check(own)
        self._searched = number
        if searched not in (_JUST_NOW, number):
            self._searched = searched
            self.own.doubt()

    def go_back(self, saved: bytes) -> None:
        """Restore a state of this process. Generators that were made since then stay, and that is
        said."""
        self.restore(saved)
        self.own.check(saved[OWN_AT:])

    def from_waiting_states(self, make: Callable[[], T]) -> T:
        """What `make` returns, while states wait for generators that were made on the way before.
        If it makes some of these generators, go back to where it began and call it again, from the
        states that have waited."""
        before = self.saved()
        made, error = None, None
        try:
            made = make()
        except BaseException as raised:
            error = raised
        again = self.own.made_some()
        if again:
            made = error = None
            self.go_back(before)
        self.own.give_up()
        if again:
            return make()
        if error is not None:
            raise error
        return made  # type: ignore[return-value]


def _head(searched: int, states: list[bytes]) -> bytes:
    sizes = [len(state) for state in states] + [0] * (3 - len(states))
    head = b"".join((_HEAD.pack(searched, *sizes), *states))
    if len(head) > OWN_AT:
        raise ValueError(f"a random state of {len(head)} bytes does not fit the black box")
    return head


def _with_rng(roots: Roots, rng: WorkerRng) -> Iterator[tuple[str, Any]]:
    yield from roots()
    yield from rng.made()


def restore_in_process(snapshot: Snapshot) -> None:
    """Restore a state that `Randomness.snapshot` returned in this process."""
    for state, raw in snapshot:
        if state.read() != raw:
            state.write(raw)
