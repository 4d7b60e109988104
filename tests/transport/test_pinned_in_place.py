"""Chunks of an arena that are registered as pinned memory, with a driver that is none: it only checks that it is used
as CUDA has to be."""

from __future__ import annotations

import gc
import os
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.transport import pinned_in_place
from holdfast.transport.arena import Bytes
from holdfast.transport.cuda_host_memory import CudaHostMemory
from holdfast.transport.extents import PAGE, Extents
from holdfast.transport.pinned_in_place import LEAST, PATIENCE, SLACK, PinnedBlocks, Quota, sweep

MIB = 1 << 20
ADDRESS = 1 << 40
CAPACITY = 256 * MIB


class FakeFence:
    def __init__(self) -> None:
        self.open = False

    def passed(self) -> bool:
        return self.open


class FakeMemory:
    """Refuses what CUDA refuses, and remembers what is registered."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.calls: list[str] = []
        self.fences: list[FakeFence] = []
        self.fails = False

    def register(self, address: int, nbytes: int) -> str | None:
        assert address % PAGE == nbytes % PAGE == 0
        assert nbytes > 0
        for start, size in self.registered.items():
            assert address + nbytes <= start or start + size <= address, "registered twice"
        self.calls.append("register")
        if self.fails:
            return "out of memory"
        self.registered[address] = nbytes
        return None

    def unregister(self, address: int) -> None:
        self.calls.append("unregister")
        del self.registered[address]

    def fence(self) -> FakeFence:
        self.fences.append(FakeFence())
        return self.fences[-1]

    def pass_all(self) -> None:
        for fence in self.fences:
            fence.open = True

    def holds(self, offset: int, nbytes: int) -> bool:
        """All of it, in one registration."""
        start = ADDRESS + offset
        return any(
            at <= start and start + nbytes <= at + size for at, size in self.registered.items()
        )

    def touches(self, offset: int, nbytes: int) -> bool:
        start = ADDRESS + offset
        return any(
            at < start + nbytes and start < at + size for at, size in self.registered.items()
        )


def block(nbytes: int) -> Bytes:
    """Stands for memory of that size. It takes none, because nothing is written to it."""
    return np.empty(nbytes, np.uint8)


def pinned(memory: FakeMemory, limit: int = CAPACITY, **options: Any) -> PinnedBlocks:
    return PinnedBlocks(memory, ADDRESS, CAPACITY, Quota(limit), **options)


def test_blocks_that_come_again_in_the_same_places_are_registered_once() -> None:
    memory = FakeMemory()
    blocks = pinned(memory)
    for _ in range(3):
        for number in range(4):
            batch = block(5 * MIB)
            assert blocks.claim(number * 5 * MIB, batch) == "in place"
        del batch
        gc.collect()
        assert blocks.release(range(0, 20 * MIB, 5 * MIB)) == []
        blocks.attend()
        memory.pass_all()
        blocks.attend()
        assert blocks.release([]) == list(range(0, 20 * MIB, 5 * MIB))
    assert memory.calls == ["register"] * 4


def test_a_block_goes_back_only_when_a_fence_behind_its_release_has_passed() -> None:
    memory, woken = FakeMemory(), []
    blocks = pinned(memory, wake=lambda: woken.append(1))
    batch = block(MIB)
    blocks.claim(0, batch)
    assert blocks.attend() is None, "nothing to wait for"
    assert memory.fences == []
    del batch
    assert blocks.release([0, 7 * MIB]) == [7 * MIB], "the other one was not pinned in place"
    assert woken == [1]
    wait = blocks.attend()
    assert wait is not None
    assert wait > 0
    assert len(memory.fences) == 1
    blocks.attend()
    assert (len(memory.fences), blocks.has_free, blocks.release([])) == (1, False, [])
    memory.pass_all()
    assert blocks.attend() is None
    assert blocks.has_free
    assert blocks.release([]) == [0]


def test_small_blocks_are_copied_unless_they_lie_in_a_chunk() -> None:
    memory = FakeMemory()
    blocks = pinned(memory)
    assert blocks.claim(0, block(LEAST - 1)) == "elsewhere"
    assert memory.registered == {}
    blocks.claim(0, block(LEAST))
    assert blocks.claim(64, block(100)) == "in place"
    assert blocks.release([64]) == [], "so it waits behind a fence as any other"


def test_a_block_across_a_border_is_copied_until_the_chunks_are_empty_and_can_be_joined() -> None:
    memory = FakeMemory()
    blocks = pinned(memory)
    first, second = block(4 * MIB), block(4 * MIB)
    blocks.claim(0, first)
    blocks.claim(4 * MIB, second)
    assert blocks.claim(3 * MIB, block(2 * MIB)) == "across"
    assert blocks.claim(4 * MIB, block(MIB)) == "across", "no more blocks, or they never are empty"
    del first, second
    blocks.release([0, 4 * MIB])
    blocks.attend()
    assert blocks.claim(3 * MIB, block(2 * MIB)) == "across", "copies may still be reading"
    memory.pass_all()
    blocks.attend()
    assert blocks.claim(3 * MIB, block(2 * MIB)) == "in place"
    assert memory.registered == {ADDRESS: SLACK}
    assert blocks.claim(9 * MIB, block(2 * MIB)) == "in place"


def test_a_chunk_in_which_the_user_keeps_a_tensor_is_used_again_as_it_is() -> None:
    memory = FakeMemory()
    blocks = pinned(memory)
    kept = block(4 * MIB)
    blocks.claim(0, kept)
    assert blocks.claim(3 * MIB, block(2 * MIB)) == "across"
    claims = [blocks.claim(2 * MIB, block(MIB)) for _ in range(PATIENCE + 1)]
    assert claims == ["across"] * PATIENCE + ["in place"]
    assert blocks.claim(3 * MIB, block(2 * MIB)) == "across", "for good"
    assert blocks.claim(2 * MIB, block(MIB)) == "in place"
    assert kept.nbytes


def test_the_limit_holds_for_all_arenas_together() -> None:
    memory, quota = FakeMemory(), Quota(10 * MIB)
    one = PinnedBlocks(memory, ADDRESS, CAPACITY, quota)
    other = PinnedBlocks(memory, ADDRESS + CAPACITY, CAPACITY, quota)
    assert one.claim(0, block(6 * MIB)) == "in place"
    assert other.claim(0, block(6 * MIB)) == "elsewhere"
    assert other.claim(0, block(4 * MIB)) == "in place"
    assert one.failure is other.failure is None
    one.close()
    memory.pass_all()
    sweep()
    assert quota.used == 4 * MIB
    other.close()
    memory.pass_all()
    sweep()
    assert (quota.used, memory.registered) == (0, {})


def test_after_a_failure_nothing_more_is_registered() -> None:
    memory = FakeMemory()
    quota = Quota(CAPACITY)
    blocks = PinnedBlocks(memory, ADDRESS, CAPACITY, quota)
    blocks.claim(0, block(MIB))
    memory.fails = True
    assert blocks.claim(MIB, block(MIB)) == "elsewhere"
    assert (blocks.failure, quota.used) == ("out of memory", MIB)
    memory.fails = False
    assert blocks.claim(2 * MIB, block(MIB)) == "elsewhere"
    assert blocks.claim(0, block(MIB)) == "in place", "what is registered is used"
    assert memory.calls == ["register"] * 2


def test_a_successor_is_told_of_blocks_that_a_copy_may_still_read() -> None:
    memory = FakeMemory()
    blocks = pinned(memory)
    kept, dropped, free = block(MIB), block(2 * MIB), block(3 * MIB)
    for offset, batch in ((0, kept), (MIB, dropped), (3 * MIB, free)):
        blocks.claim(offset, batch)
    del free
    blocks.release([3 * MIB])
    blocks.attend()
    memory.pass_all()
    blocks.attend()  # it may go back, and its worker dies before it has
    del dropped
    blocks.release([MIB])
    assert blocks.handover() == [(MIB, 2 * MIB)], "what the user holds is listed by the window"
    assert blocks.release([]) == [], "what is not listed is the successor's already"
    blocks.attend()
    memory.pass_all()
    blocks.attend()
    assert blocks.release([]) == [MIB]
    assert kept.nbytes


def test_after_the_end_a_chunk_is_unregistered_when_no_tensor_lives_in_it() -> None:
    class Mapping:
        pass

    memory, mapping = FakeMemory(), Mapping()
    gone: list[int] = []
    finalizer = weakref.finalize(mapping, gone.append, 1)
    blocks = pinned(memory, keep=mapping)
    kept, dropped = block(MIB), block(MIB)
    blocks.claim(0, kept)
    blocks.claim(MIB, dropped)
    del dropped, mapping
    memory.fences.clear()
    blocks.close()
    assert len(memory.registered) == 2, "its fence has not passed"
    memory.pass_all()
    sweep()
    assert memory.registered == {ADDRESS: MIB}
    assert (finalizer.alive, gone) == (True, []), "it must not be unmapped while it is registered"
    del kept
    sweep()
    memory.pass_all()
    sweep()
    assert memory.registered == {}
    assert gone == [1]
    assert pinned_in_place._left == []


def test_a_forked_child_leaves_the_registrations_of_its_parent_alone() -> None:
    memory = FakeMemory()
    blocks = pinned(memory)
    kept = block(MIB)
    blocks.claim(0, kept)
    blocks.close()
    child = os.fork()
    if child == 0:
        del kept
        memory.pass_all()
        sweep()
        os._exit(10 + len(memory.registered))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 11
    del kept
    sweep()
    memory.pass_all()
    sweep()
    assert memory.registered == {}


class Life(RuleBasedStateMachine):
    """An arena of a worker that allocates as ours do, and a user that keeps and drops batches in any order."""

    @initialize(limit=st.integers(1, 40))
    def begin(self, limit: int) -> None:
        self.memory = FakeMemory()
        self.quota = Quota(limit * MIB)
        self.blocks = PinnedBlocks(self.memory, ADDRESS, CAPACITY, self.quota)
        self.extents = Extents(CAPACITY)
        self.held: dict[int, Bytes] = {}  # by the user
        self.in_place: set[int] = set()  # and not back at the worker
        self.released: dict[int, int] = {}  # offset: fences made before its release
        self.sizes: dict[int, int] = {}

    @rule(size=st.sampled_from([1, 60 << 10, MIB, MIB + 1, 3 * MIB, 7 * MIB, 7 * MIB - PAGE]))
    def batch_arrives(self, size: int) -> None:
        offset = self.extents.allocate(size)
        assert offset is not None
        assert offset not in self.in_place, "the worker has not got it back"
        array = block(size)
        claim = self.blocks.claim(offset, array)
        self.sizes[offset] = size
        if claim == "in place":
            assert self.memory.holds(offset, size)
            self.in_place.add(offset)
        elif claim == "elsewhere":
            assert not self.memory.touches(offset, size)
        self.held[offset] = array

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def user_drops(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[offset]
        self.released[offset] = len(self.memory.fences)
        self._back(self.blocks.release([offset]))

    @rule()
    def thread_looks(self) -> None:
        self.blocks.attend()

    @rule()
    def worker_is_sent_something(self) -> None:
        self._back(self.blocks.release([]))

    @rule(data=st.data())
    def device_goes_on(self, data: st.DataObject) -> None:
        closed = [fence for fence in self.memory.fences if not fence.open]
        if closed:
            closed[0].open = True

    @rule()
    def worker_dies(self) -> None:
        held = {offset for offset, _ in self.blocks.handover()} | set(self.held)
        for offset in [one for one, _ in self.extents.used()]:
            if offset not in held:
                assert self._quiet(offset)
                self._forget(offset)

    def _quiet(self, offset: int) -> bool:
        """Whether nothing can be reading this block."""
        if offset in self.held:
            return False
        return offset not in self.in_place or any(
            fence.open for fence in self.memory.fences[self.released[offset] :]
        )

    def _back(self, offsets: list[int]) -> None:
        for offset in offsets:
            assert self._quiet(offset)
            self._forget(offset)

    def _forget(self, offset: int) -> None:
        self.extents.free(offset)
        self.in_place.discard(offset)
        self.released.pop(offset, None)

    @invariant()
    def what_is_in_use_is_registered(self) -> None:
        for offset in getattr(self, "in_place", ()):
            assert self.memory.holds(offset, self.sizes[offset])

    @invariant()
    def the_limit_is_kept(self) -> None:
        if hasattr(self, "quota"):
            assert sum(self.memory.registered.values()) == self.quota.used <= self.quota.limit

    def teardown(self) -> None:
        if hasattr(self, "blocks"):
            self.held.clear()
            self.blocks.close()
            for _ in range(2):
                self.memory.pass_all()
                sweep()
            assert self.memory.registered == {}


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class FakeCuda:
    """As much of `torch.cuda` as fences need: two devices, three streams in each pool."""

    def __init__(self) -> None:
        self.busy: set[int] = set()
        self.captured: set[int] = set()
        self.handed = 0
        self.current = 0
        self.asked_while_capturing = False

    def cudart(self) -> Any:
        return SimpleNamespace(cudaHostRegister=lambda *_: 2, cudaHostUnregister=lambda _: 0)

    def device_count(self) -> int:
        return 2

    def _stream(self, number: int) -> Any:
        return SimpleNamespace(
            cuda_stream=number,
            query=lambda: self._idle(number),
            record_event=lambda: SimpleNamespace(query=lambda: self._idle(number)),
        )

    def _idle(self, number: int) -> bool:
        self.asked_while_capturing |= bool(self.captured)
        return number not in self.busy

    def default_stream(self, device: int) -> Any:
        return self._stream(100 * device)

    def Stream(self, device: int, priority: int) -> Any:
        self.handed += 1
        return self._stream(100 * device + 10 * (1 - max(priority, -1)) + self.handed % 3)

    def stream(self, stream: Any) -> Any:
        class Current:
            def __enter__(_) -> None:
                self.current = stream.cuda_stream

            def __exit__(_, *error: object) -> None:
                pass

        return Current()

    def is_current_stream_capturing(self) -> bool:
        return self.current in self.captured


def memory_of(cuda: FakeCuda, *others: int) -> CudaHostMemory:
    """For device 1 of these; `others` have a context, too."""
    return CudaHostMemory(1, cuda, others.__contains__)


def test_a_device_is_asked_only_if_it_has_a_context() -> None:
    cuda = FakeCuda()
    cuda.busy = {10}
    assert memory_of(cuda).fence().passed()
    assert not memory_of(cuda, 0).fence().passed()


@pytest.mark.parametrize("busy", [100, 110, 112, 121])
def test_a_fence_waits_for_every_stream_of_torch_that_has_something_to_do(busy: int) -> None:
    cuda = FakeCuda()
    cuda.busy = {busy}
    memory = memory_of(cuda)
    fence = memory.fence()
    assert not fence.passed()
    cuda.busy = {busy + 1 if busy != 112 else 110}  # what begins later is not waited for
    assert fence.passed()
    assert memory.register(ADDRESS, PAGE) == "cudaHostRegister failed with error 2"


def test_no_stream_is_asked_anything_while_a_graph_is_captured() -> None:
    cuda = FakeCuda()
    cuda.busy = {100}
    memory = memory_of(cuda)
    before = memory.fence()
    cuda.captured = {111}
    during = memory.fence()
    cuda.busy = set()
    assert not before.passed()
    assert not during.passed()
    assert not cuda.asked_while_capturing
    cuda.captured = set()
    assert before.passed()
    assert during.passed()
