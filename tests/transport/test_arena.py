"""Blocks of shared memory: which side may use them, and when they are free again."""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from holdfast import kernel
from holdfast.kernel import files
from holdfast.transport import arena as arenas
from holdfast.transport.arena import Arena
from holdfast.transport.mapping import LARGEST, create, default_capacity
from holdfast.transport.window import Kept, Window
from tests.support import warm

from .support import MIB, Child, Slot, in_use, new_slot, worker


@pytest.fixture
def slot() -> Iterator[Slot]:
    with new_slot() as slot:
        yield slot


def new_block(arena: Arena, nbytes: int, value: int) -> int:
    """A block as a worker leaves it: written, published, no longer referred to."""
    block = arena.take(nbytes)
    assert block is not None
    block.array[:] = value
    arena.publish(block.offset)
    return block.offset


def offset_of_new_block(slot: Slot, nbytes: int, value: int = 0) -> int:
    return new_block(slot.arena, nbytes, value)


def resident() -> int:
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))


# -- the file --------------------------------------------------------------------------------


def test_the_file_is_large_and_sparse_and_has_no_name() -> None:
    fd = create("test")
    try:
        status = os.fstat(fd)
        assert status.st_size == default_capacity() >= 64 * MIB
        assert status.st_blocks == 0
        assert status.st_nlink == 0
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_capacity_is_memory_and_swap_rounded_up(tmp_path: Any) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 5000000 kB\nMemFree: 1 kB\nSwapTotal: 4000000 kB\n")
    assert default_capacity(str(meminfo)) == 16 << 30
    meminfo.write_text("MemTotal: 100 kB\n")
    assert default_capacity(str(meminfo)) == 64 * MIB
    meminfo.write_text("MemTotal: 4000000000 kB\n")
    assert default_capacity(str(meminfo)) == LARGEST
    assert default_capacity(str(tmp_path / "missing")) >= 64 * MIB


@pytest.mark.parametrize("limit", ["RLIMIT_FSIZE", "RLIMIT_AS"])
def test_where_limits_forbid_the_size_a_smaller_one_is_made(limit: str) -> None:
    script = f"""
import os, resource
from holdfast.transport.arena import Arena
from holdfast.transport.mapping import create
from holdfast.transport.window import Window
with open("/proc/self/statm") as f:
    used = int(f.read().split()[0]) * 4096
resource.setrlimit(resource.{limit}, (used + (3 << 30), resource.RLIM_INFINITY))
fd = create("test", 1 << 36)
size = os.fstat(fd).st_size
assert 1 << 30 <= size <= used + (3 << 30), size
Window(fd)
slots = [create("test") for _ in range(4)]
if "{limit}" == "RLIMIT_AS":
    assert {{os.fstat(fd).st_size for fd in slots}} <= {{64 << 20, 128 << 20}}
arena, windows = Arena(slots[0]), [Window(fd) for fd in slots]
assert arena.take(1 << 20) is not None
"""
    ended = warm.run(["-c", script], env=with_source(), timeout=60)
    assert ended.returncode == 0, ended.stderr


def with_source() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


# -- the worker's side -----------------------------------------------------------------------


def test_a_block_nobody_refers_to_is_taken_again(slot: Slot) -> None:
    block = slot.arena.take(100_000)
    assert block is not None
    first = block.offset
    tensor = torch.from_numpy(block.array).view(torch.float32)[10:20]
    del block
    other = slot.arena.take(100_000)
    assert other is not None
    assert other.offset != first
    del tensor
    again = slot.arena.take(100_000)
    assert again is not None
    assert again.offset == first


def test_a_published_block_waits_for_its_release(slot: Slot) -> None:
    offset = offset_of_new_block(slot, 100_000)
    other = slot.arena.take(100_000)
    assert other is not None
    assert other.offset != offset
    slot.arena.release(offset)
    again = slot.arena.take(100_000)
    assert again is not None
    assert again.offset == offset


def test_a_released_block_waits_for_the_workers_own_references(slot: Slot) -> None:
    block = slot.arena.take(100_000)
    assert block is not None
    kept = torch.from_numpy(block.array)
    offset = block.offset
    slot.arena.publish(offset)
    slot.arena.release(offset)
    del block
    other = slot.arena.take(100_000)
    assert other is not None
    assert other.offset != offset
    del kept
    again = slot.arena.take(100_000)
    assert again is not None
    assert again.offset == offset


def test_a_release_that_overtakes_the_workers_last_reference_frees_once(slot: Slot) -> None:
    block = slot.arena.take(100_000)
    assert block is not None
    slot.arena.publish(block.offset)
    offset = block.offset
    del block  # noticed only by the next take
    slot.arena.release(offset)
    slot.arena.release(offset)
    assert in_use(slot.arena) == 0


def test_unknown_releases_are_ignored(slot: Slot) -> None:
    block = slot.arena.take(100_000)
    assert block is not None
    slot.arena.release(block.offset)
    slot.arena.release(12345)
    assert in_use(slot.arena) > 0
    with pytest.raises(ValueError, match="no unpublished block"):
        slot.arena.publish(12345)


def test_memory_is_found_in_unpublished_blocks_only(slot: Slot) -> None:
    slot.arena.take(1000)
    block = slot.arena.take(1000)
    assert block is not None
    address = block.array.__array_interface__["data"][0]
    assert slot.arena.find(address, 1000) == (block.offset, 0)
    assert slot.arena.find(address + 10, 990) == (block.offset, 10)
    assert slot.arena.find(address + 10, 991) is None
    assert slot.arena.find(address - 1, 1) is None
    assert slot.arena.find(np.zeros(10).__array_interface__["data"][0], 10) is None
    slot.arena.publish(block.offset)
    assert slot.arena.find(address, 1000) is None


def test_a_full_arena_says_so() -> None:
    with new_slot(MIB) as slot:
        assert slot.arena.take(2 * MIB) is None
        block = slot.arena.take(MIB)
        assert block is not None
        assert slot.arena.take(1) is None
        del block
        assert slot.arena.take(MIB) is not None


def test_lack_of_memory_is_an_answer_and_not_a_signal(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(fd: int, start: int, end: int, in_use: object) -> None:
        if end > MIB:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(kernel, "reserve", no_room)
    assert slot.arena.take(2 * MIB) is None
    assert in_use(slot.arena) == 0
    assert slot.arena.take(MIB // 2) is not None


def test_what_the_consumer_keeps_stays_where_memory_is_reserved_by_writing_zeros(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A successor reserves anew what its predecessor had, with kept blocks in the middle of it."""

    def refused(fd: int, start: int, nbytes: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(files, "allocate", refused)
    blocks = [slot.arena.take(size) for size in (1000, 100_000, 1000, 100_000)]
    for number, block in enumerate(blocks, start=1):
        assert block is not None
        block.array[:] = number
    held = [(block.offset, block.nbytes) for block in blocks[1:3] if block is not None]
    successor = Arena(slot.fd, held)
    new = successor.take(1 << 20)
    assert new is not None
    new.array[:] = 9
    for number, block in enumerate(blocks[1:3], start=2):
        assert block is not None
        assert set(block.array.tolist()) == {number}


def test_recycled_memory_costs_no_system_call(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    slot.arena.take(10 * MIB)
    monkeypatch.setattr(kernel, "reserve", None)
    for _ in range(10):
        assert slot.arena.take(10 * MIB) is not None


def test_a_process_forked_off_the_worker_gets_no_room(slot: Slot) -> None:
    child = Child(lambda _: slot.arena.take(1000) is None)
    assert child.ask() is True
    assert child.end() == 0


def test_other_threads_of_the_worker_get_no_room(slot: Slot) -> None:
    blocks: list[Any] = []
    thread = threading.Thread(target=lambda: blocks.append(slot.arena.take(1000)))
    thread.start()
    thread.join()
    assert blocks == [None]


def test_blocks_dying_in_a_collection_inside_take_do_no_harm(slot: Slot) -> None:
    class Cycle:
        pass

    gc.disable()
    try:
        for _ in range(200):
            block = slot.arena.take(5000)
            assert block is not None
            cycle: Any = Cycle()
            cycle.me, cycle.array = cycle, block.array
    finally:
        gc.enable()
    del block, cycle
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        live = [slot.arena.take(5000) for _ in range(200)]
    finally:
        gc.set_threshold(*threshold)
    offsets = [block.offset for block in live if block is not None]
    assert len(set(offsets)) == 200


def test_trim_gives_back_what_the_last_batches_did_not_need(slot: Slot) -> None:
    held = [offset_of_new_block(slot, 8 * MIB, 1) for _ in range(20)]
    lease = slot.window.lease(held[-1], 8 * MIB)
    assert slot.resident() >= 160 * MIB
    for offset in held[:-1]:
        slot.arena.release(offset)
    for _ in range(3 * arenas.MEMORY_OF_PEAK):
        slot.arena.take(MIB)
        slot.arena.trim()
    # Also below the one block that is still lent out.
    assert slot.resident() <= 40 * MIB
    assert (lease == 1).all()
    assert slot.arena.take(100 * MIB) is not None


def test_shrinking_gives_back_all_that_no_block_uses_and_nothing_else(slot: Slot) -> None:
    kept = [slot.send(torch.full((MIB,), number, dtype=torch.uint8)) for number in range(40)]
    made = slot.arena.take(3 * MIB)
    assert made is not None
    made.array[:] = 99
    del kept[::2]
    slot.recycle()
    slot.arena.shrink()
    assert slot.resident() <= (20 + 3 + 2) * MIB
    assert slot.arena.reserved >= slot.resident()
    again = [slot.send(torch.full((2 * MIB,), 77, dtype=torch.uint8)) for _ in range(9)]
    assert [int(one.min()) for one in kept] == list(range(1, 40, 2))
    assert [int(one.max()) for one in kept] == list(range(1, 40, 2))
    assert all(bool((one == 77).all()) for one in again)
    assert bool((made.array == 99).all())


def test_trim_leaves_a_steady_state_alone(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = [offset_of_new_block(slot, 8 * MIB) for _ in range(4)]
    monkeypatch.setattr(kernel, "reserve", None)
    for _ in range(3 * arenas.MEMORY_OF_PEAK):
        slot.arena.release(queue.pop(0))
        block = slot.arena.take(8 * MIB)
        assert block is not None
        slot.arena.publish(block.offset)
        queue.append(block.offset)
        del block
        slot.arena.trim()


# -- the main process's side -----------------------------------------------------------------


def test_both_sides_see_the_same_bytes(slot: Slot) -> None:
    child = worker(slot, lambda arena, value: new_block(arena, 100_000, value))
    for value in (3, 4, 5):
        offset = child.ask(([], value))
        assert (slot.window.lease(offset, 100_000) == value).all()
    assert child.end() == 0


def test_a_lease_is_released_when_the_last_tensor_on_it_is_gone(slot: Slot) -> None:
    offset = offset_of_new_block(slot, 4000)
    lease = slot.window.lease(offset, 4000)
    whole = torch.from_numpy(np.ndarray((10, 100), np.float32, lease))
    del lease
    part = whole[3:4].t().numpy()
    del whole
    assert slot.window.take_released() == []
    assert slot.window.handover() == [(offset, 4000)]
    assert slot.lent() == 4000
    del part
    assert slot.window.take_released() == [offset]
    assert slot.lent() == 0
    assert slot.window.take_released() == []
    assert slot.lent() == 0


def test_releases_can_be_popped_like_a_deque(slot: Slot) -> None:
    first, second = offset_of_new_block(slot, 1000), offset_of_new_block(slot, 1000)
    leases = [slot.window.lease(first, 1000), slot.window.lease(second, 1000)]
    assert not slot.window.released
    leases.clear()
    popped = []
    while slot.window.released:
        popped.append(slot.window.released.popleft())
    assert sorted(popped) == [first, second]
    with pytest.raises(IndexError):
        slot.window.released.popleft()


def test_a_block_is_lent_out_once(slot: Slot) -> None:
    offset = offset_of_new_block(slot, 1000)
    lease = slot.window.lease(offset, 1000)
    with pytest.raises(ValueError, match="already"):
        slot.window.lease(offset, 1000)
    del lease


def test_leases_die_in_any_thread_and_in_any_order(slot: Slot) -> None:
    offsets = [offset_of_new_block(slot, 1000, number % 256) for number in range(400)]
    piles: list[list[Any]] = [[] for _ in range(4)]
    for number, offset in enumerate(offsets):
        lease: Any = slot.window.lease(offset, 1000)
        cycle: list[Any] = [lease]
        cycle.append(cycle)
        piles[number % 4].append(cycle if number % 3 else lease)
        del lease, cycle

    def drop(pile: list[Any]) -> None:
        while pile:
            pile.pop()

    threads = [threading.Thread(target=drop, args=(pile,)) for pile in piles]
    for thread in threads:
        thread.start()
    released = []
    while any(thread.is_alive() for thread in threads):
        released += slot.window.take_released()
    for thread in threads:
        thread.join()
    gc.collect()
    released += slot.window.take_released()
    assert sorted(released) == sorted(offsets)


def test_a_replacement_spares_what_the_user_still_holds(slot: Slot) -> None:
    def job(arena: Arena, value: int) -> int:
        return new_block(arena, 100_000, value)

    child = worker(slot, job)
    leases = [slot.window.lease(child.ask(([], value)), 100_000) for value in range(6)]
    offsets = [offset for offset, _ in slot.window.handover()]
    del leases[4], leases[1]
    child.end(signal.SIGKILL)

    held = slot.window.handover()
    assert [offset for offset, _ in held] == [offsets[i] for i in (0, 2, 3, 5)]
    assert slot.window.take_released() == []  # meant for the dead one

    child = worker(slot, job, held)
    for value in range(10, 20):
        leases.append(slot.window.lease(child.ask(([], value)), 100_000))
    assert [int(lease[0]) for lease in leases] == [0, 2, 3, 5, *range(10, 20)]
    del leases[0]
    assert child.ask((slot.window.take_released(), 99)) == offsets[0]
    assert [int(lease[-1]) for lease in leases] == [2, 3, 5, *range(10, 20)]
    assert child.end() == 0


def test_a_release_that_comes_late_is_not_taken_for_the_successors(slot: Slot) -> None:
    offset = offset_of_new_block(slot, 1000)
    lease = slot.window.lease(offset, 1000)
    late = slot.window.released.leases[offset]
    del lease
    slot.window.released.clear()  # as if the collector had not got round to the callback yet
    assert slot.window.handover() == []
    successor = slot.window.lease(offset, 1000)
    slot.window.released.append(late)
    assert slot.window.take_released() == []
    del successor
    assert slot.window.take_released() == [offset]


def test_what_a_dead_worker_left_behind_is_given_back(slot: Slot) -> None:
    kept = slot.window.lease(offset_of_new_block(slot, 8 * MIB, 7), 8 * MIB)
    offset_of_new_block(slot, 64 * MIB, 1)
    replacement = Arena(slot.fd, slot.window.handover())
    assert slot.resident() <= 9 * MIB
    assert (kept == 7).all()
    assert in_use(replacement) == 8 * MIB


def test_what_a_dead_worker_left_behind_is_used_again_if_that_is_asked_for(slot: Slot) -> None:
    kept = slot.window.lease(offset_of_new_block(slot, 8 * MIB, 7), 8 * MIB)
    offset_of_new_block(slot, 64 * MIB, 1)
    before = slot.resident()
    slot.arena = Arena(slot.fd, slot.window.handover(), takes_over=True)
    assert in_use(slot.arena) == 8 * MIB
    assert slot.resident() == before
    again = slot.arena.take(32 * MIB)
    assert again is not None
    again.array[:] = 3
    assert slot.resident() == before
    assert (kept == 7).all()


@pytest.mark.parametrize("way", ["after a while", "at once"])
def test_what_was_left_behind_and_is_not_needed_is_given_back(slot: Slot, way: str) -> None:
    kept = slot.window.lease(offset_of_new_block(slot, 100_000, 7), 100_000)
    offset_of_new_block(slot, 64 * MIB, 1)
    slot.arena = Arena(slot.fd, slot.window.handover(), takes_over=True)
    again = slot.arena.take(8 * MIB)
    assert again is not None
    again.array[:] = 3
    if way == "at once":
        slot.arena.shrink()
    else:
        for _ in range(arenas.MEMORY_OF_PEAK):
            slot.arena.trim()
    assert slot.resident() <= 9 * MIB
    assert (kept == 7).all()
    assert (again.array == 3).all()
    more = slot.arena.take(16 * MIB)
    assert more is not None
    more.array[:] = 1
    assert (kept == 7).all()
    assert (again.array == 3).all()


@pytest.mark.parametrize(("nbytes", "count"), [(8 * MIB, 2), (100_000, 160)])
def test_what_the_user_kept_over_a_replacement_is_given_back_when_it_is_let_go(
    slot: Slot, nbytes: int, count: int
) -> None:
    """Whole chunks of memory, and many blocks that are smaller than one."""
    kept = [slot.window.lease(offset_of_new_block(slot, nbytes, 7), nbytes) for _ in range(count)]
    slot.arena = Arena(slot.fd, slot.window.handover())
    assert all((one == 7).all() for one in kept)
    last = kept.pop()
    kept.clear()
    slot.recycle()
    slot.arena.shrink()
    assert slot.resident() <= nbytes + 2 * arenas.CHUNK
    assert (last == 7).all()
    again = slot.arena.take(16 * MIB)
    assert again is not None
    again.array[:] = 1
    assert (last == 7).all()


def test_what_a_successor_finds_reserved_counts_for_it(slot: Slot) -> None:
    kept = slot.window.lease(offset_of_new_block(slot, 64 * MIB, 7), 64 * MIB)
    slot.arena = Arena(slot.fd, slot.window.handover())
    assert 63 * MIB <= slot.arena.reserved <= slot.resident()
    del kept
    slot.recycle()
    for _ in range(3 * arenas.MEMORY_OF_PEAK):
        slot.arena.take(MIB)
        slot.arena.trim()
    assert slot.resident() <= 40 * MIB


def test_what_is_kept_can_be_asked_for_as_soon_as_a_window_is_in_the_books(slot: Slot) -> None:
    class Asked(Kept):
        """Reads the size at once, as another thread may."""

        def open(self, window: Window) -> None:
            super().open(window)
            assert (self.nbytes, window.delivered()) == (0, [])

    Window(slot.fd, Asked()).close()


def test_what_the_user_keeps_outlives_the_window_and_everything_else() -> None:
    with new_slot() as slot:
        leases = [
            slot.window.lease(offset_of_new_block(slot, 10 * MIB, value), 10 * MIB)
            for value in range(1, 6)
        ]
        tensors = [torch.from_numpy(lease) for lease in leases]
        del leases
        del tensors[1]
        offset_of_new_block(slot, 50 * MIB, 9)
        duplicate = os.dup(slot.fd)
    try:
        gone = weakref.ref(slot.window), weakref.ref(slot.arena)
        del slot
        gc.collect()
        assert [ref() for ref in gone] == [None, None]
        assert [int(tensor.sum()) for tensor in tensors] == [v * 10 * MIB for v in (1, 3, 4, 5)]
        # Nothing but the four is left, and they go one by one.
        assert os.fstat(duplicate).st_blocks * 512 == 40 * MIB
        before = resident()
        del tensors[2]
        assert os.fstat(duplicate).st_blocks * 512 == 30 * MIB
        assert resident() <= before - 9 * MIB
        assert [int(tensor.sum()) for tensor in tensors] == [v * 10 * MIB for v in (1, 3, 5)]
        tensors.clear()
        assert os.fstat(duplicate).st_blocks == 0
    finally:
        os.close(duplicate)


def test_pages_shared_with_a_live_neighbour_stay(slot: Slot) -> None:
    offsets = [offset_of_new_block(slot, 5000, value) for value in (1, 2, 3)]
    leases = [slot.window.lease(offset, 5000) for offset in offsets]
    slot.window.close()
    del leases[1]
    assert [int(lease.sum()) for lease in leases] == [5000, 15000]
    with pytest.raises(ValueError, match="closed"):
        slot.window.lease(offsets[1], 5000)
    slot.window.close()


@pytest.mark.parametrize("closed", [False, True])
def test_a_forked_child_that_drops_a_batch_does_no_harm(slot: Slot, closed: bool) -> None:
    lease = slot.window.lease(offset_of_new_block(slot, MIB, 5), MIB)
    if closed:
        slot.window.close()
    pile = [lease]

    def drop(_: Any) -> int:
        nonlocal lease
        total = int(pile.pop().sum())
        del lease
        gc.collect()
        return total

    child = Child(drop)
    assert child.ask() == 5 * MIB
    assert child.end() == 0
    assert int(lease.sum()) == 5 * MIB
    if not closed:
        assert slot.window.take_released() == []


def test_a_forked_child_that_closes_its_copy_of_the_window_does_no_harm(slot: Slot) -> None:
    lease = slot.window.lease(offset_of_new_block(slot, MIB, 5), MIB)
    later = offset_of_new_block(slot, MIB, 6)
    child = Child(lambda _: slot.window.close())
    child.ask()
    assert child.end() == 0
    assert int(lease.sum()) == 5 * MIB
    assert int(slot.window.lease(later, MIB).sum()) == 6 * MIB


def test_descriptors_and_mappings_stay_few_however_much_is_kept(slot: Slot) -> None:
    def count() -> tuple[int, int]:
        with open("/proc/self/maps") as lines:
            mappings = sum("memfd:test" in line for line in lines)
        return len(os.listdir("/proc/self/fd")), mappings

    before = count()
    kept = [
        slot.window.lease(offset_of_new_block(slot, 20_000, value % 256), 20_000)
        for value in range(2000)
    ]
    assert count() == before
    assert all(lease[0] == value % 256 for value, lease in enumerate(kept))


def test_the_hole_is_left_out_of_core_dumps(slot: Slot) -> None:
    with open("/proc/self/smaps") as lines:
        text = lines.read()
    flags = [part.split("VmFlags:")[1].split("\n")[0] for part in text.split("memfd:test")[1:]]
    assert flags
    assert all(" dd" in f for f in flags)


def test_before_more_is_reserved_it_asks_for_what_was_released(slot: Slot) -> None:
    asked = []
    first = new_block(slot.arena, MIB, 1)

    def look() -> bool:
        asked.append(None)
        slot.arena.release(first)
        return True

    slot.arena.look_for_released = look
    block = slot.arena.take(MIB)
    assert block is not None
    assert (block.offset, len(asked)) == (first, 1)
    again = slot.arena.take(MIB)  # asks in vain, and finds room all the same
    assert again is not None
    assert len(asked) == 2
    assert again.offset != first


def test_recycled_memory_needs_no_asking(slot: Slot) -> None:
    slot.arena.release(new_block(slot.arena, MIB, 1))
    slot.arena.look_for_released = lambda: pytest.fail("nothing new has to be reserved")
    assert slot.arena.take(MIB) is not None
