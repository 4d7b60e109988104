"""Memory of large batches: used again, and never while the user has any part of it."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import default_collate

from holdfast import DataLoader, private_names
from holdfast.transport.batch_memory import FEW, LARGE, BatchMemory
from holdfast.transport.placement import PLACED
from holdfast.transport.stacking import install_for_threads, use_memory
from tests.threads.datasets import Gate


def address(memory: Any) -> int:
    return int(memory.__array_interface__["data"][0])


@pytest.fixture
def memory() -> BatchMemory:
    found = BatchMemory()
    found.allow(100 * LARGE)
    return found


def taken(memory: BatchMemory, nbytes: int = LARGE) -> Any:
    block = memory.take(nbytes)
    assert block is not None
    return block.array


def free_bytes(memory: BatchMemory) -> int:
    """Bytes that no batch uses."""
    with memory._lock:
        memory._sort()
        return sum(map(len, memory._free))


# -- blocks ---------------------------------------------------------------------------------


def test_a_block_is_used_again_when_nothing_of_it_is_left(memory: BatchMemory) -> None:
    first = taken(memory)
    where = address(first)
    assert where % 64 == 0
    part = first[10:20]
    del first
    other = taken(memory)
    assert address(other) != where  # a part of the first is still there
    del part
    assert address(taken(memory)) == where


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_views_arrays_and_storages_keep_it(memory: BatchMemory, dtype: torch.dtype) -> None:
    from holdfast.transport.placement import tensor_on

    array = taken(memory)
    where = address(array)
    tensor = tensor_on(array, (LARGE // dtype.itemsize,), dtype)
    del array
    keeps: list[Any] = [tensor[3:5], tensor.untyped_storage(), tensor.detach().view(-1)]
    if dtype is torch.float32:
        keeps += [tensor.numpy()[::2], memoryview(tensor.numpy()), np.from_dlpack(tensor)]
    del tensor
    while keeps:
        assert free_bytes(memory) == 0
        keeps.pop(0)
        gc.collect()
    assert free_bytes(memory) >= LARGE
    assert address(taken(memory)) == where


def test_small_memory_is_left_to_the_allocator(memory: BatchMemory) -> None:
    assert memory.take(LARGE - 1) is None


def test_batches_of_about_the_same_size_use_each_others_blocks(memory: BatchMemory) -> None:
    first = taken(memory, 10 * LARGE + 1)
    where = address(first)
    del first
    again = taken(memory, 10 * LARGE + 5000)
    assert len(again) == 10 * LARGE + 5000
    assert address(again) == where
    del again
    assert address(taken(memory, LARGE)) != where  # far too large for that


def test_what_is_free_is_bounded(memory: BatchMemory) -> None:
    kept = [taken(memory) for _ in range(50)]
    memory.allow(3 * LARGE)
    kept.clear()
    assert len(memory._returned) <= FEW  # before anything of ours runs again
    assert free_bytes(memory) <= 3 * LARGE
    memory.allow(0)
    assert free_bytes(memory) == 0


def test_what_is_not_used_for_long_is_released(memory: BatchMemory) -> None:
    del_me = taken(memory)
    del del_me
    memory.rest()  # something was taken since the last time
    assert free_bytes(memory) >= LARGE
    memory.rest()
    assert free_bytes(memory) == 0


def test_after_closing_what_is_in_use_stays_and_nothing_comes_back(memory: BatchMemory) -> None:
    kept = [taken(memory) for _ in range(3)]
    kept[0][:] = 7
    memory.close()
    assert (kept[0] == 7).all()
    assert memory.take(LARGE) is None
    kept.clear()
    assert not memory._returned
    assert free_bytes(memory) == 0


def test_many_threads_never_share_a_block(memory: BatchMemory) -> None:
    wrong: list[int] = []

    def use(mark: int) -> None:
        for _ in range(300):
            array = taken(memory)
            array[::4096] = mark
            if not (array[::4096] == mark).all():
                wrong.append(mark)

    threads = [threading.Thread(target=use, args=(mark,)) for mark in range(1, 6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong
    assert free_bytes(memory) <= 100 * LARGE


# -- in a loader ----------------------------------------------------------------------------

SIDE = 128  # a sample has 64 KiB, a batch of 32 of them 2 MiB


class Large(torch.utils.data.Dataset[Any]):
    def __init__(self, length: int = 32 * 12, gate: Gate | None = None) -> None:
        self.length = length
        self.gate = gate
        self.addresses: set[int] = set()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if self.gate is not None:
            self.gate.enter(index)
        whole = torch.full((SIDE, SIDE), float(index))
        return {"tensor": whole, "array": np.full((SIDE, SIDE), index), "number": index}


def loader(dataset: Any, kind: Any = DataLoader, **options: Any) -> Any:
    if kind is DataLoader:
        options = {"worker_method": "thread", **options}
    return kind(dataset, batch_size=32, num_workers=2, **options)


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_batches_that_are_kept_stay_as_they_are_and_those_of_torch() -> None:
    kept = list(loader(Large()))
    expected = list(loader(Large(), torch.utils.data.DataLoader))
    assert len(kept) == 12
    assert all(map(same, kept, expected))
    assert len({batch["tensor"].data_ptr() for batch in kept}) == 12


@pytest.mark.parametrize("options", [{}, {"on_bad_sample": "skip"}], ids=str)
def test_memory_is_used_again(options: dict[str, Any]) -> None:
    assert SIDE * SIDE * 4 >= PLACED
    where = set()
    for number, batch in enumerate(loader(Large(32 * 40), prefetch_factor=1, **options)):
        assert (batch["tensor"] == torch.arange(32 * number, 32 * number + 32)[:, None, None]).all()
        where.add(batch["tensor"].data_ptr())
        del batch  # or it would live until the next one is there
    assert len(where) < 12


def test_a_part_of_a_batch_keeps_all_of_it() -> None:
    rows = [batch["tensor"][7] for batch in loader(Large())]
    assert [float(row[0, 0]) for row in rows] == [32.0 * n + 7 for n in range(12)]


def test_storages_are_as_large_as_their_tensors_and_can_be_sent_anywhere() -> None:
    batch = next(iter(loader(Large())))["tensor"]
    assert batch.untyped_storage().nbytes() == batch.nbytes
    assert not batch.is_shared()
    assert batch.is_contiguous()
    assert batch._base is None
    assert len(pickle.dumps(batch)) < batch.nbytes + 10_000
    file = io.BytesIO()
    torch.save(batch, file)
    assert len(file.getvalue()) < batch.nbytes + 10_000
    assert torch.equal(copy.deepcopy(batch), batch)
    before = batch.clone()
    batch.share_memory_()
    assert batch.is_shared()
    assert torch.equal(batch, before)
    batch.resize_(16, SIDE, SIDE)  # smaller
    assert torch.equal(batch, before[:16])


def test_a_budget_counts_what_is_free() -> None:
    one = 32 * SIDE * SIDE * 12
    made = loader(Large(32 * 30), memory_budget=2 * one)
    batches = iter(made)
    for _ in range(12):
        next(batches)
    pool = batches._pool
    with pool.lock:
        pool.driver.release()
        free, flying = free_bytes(pool.driver._memory), pool.machine.in_flight
    assert free + flying <= 2 * one
    made.close()
    assert free_bytes(pool.driver._memory) == 0


def test_nothing_is_free_after_the_end_and_kept_batches_are_valid() -> None:
    made = loader(Large())
    batches = iter(made)
    first = next(batches)
    pool = batches._pool
    for _ in batches:
        pass
    assert free_bytes(pool.driver._memory) == 0
    assert same(first, default_collate([Large()[index] for index in range(32)]))


def test_a_forked_child_keeps_what_it_had() -> None:
    made = loader(Large(32 * 60), prefetch_factor=1)
    batches = iter(made)
    first = next(batches)["tensor"]
    read, write = os.pipe()
    go, tell = os.pipe()
    child = os.fork()
    if not child:
        os.read(go, 1)
        os.write(write, b"yes" if (first[5] == 5).all() else b"no")
        os._exit(0)
    del first
    for _ in range(40):
        next(batches)
    os.write(tell, b"x")
    assert os.read(read, 3) == b"yes"
    assert os.waitpid(child, 0)[1] == 0
    for fd in (read, write, go, tell):
        os.close(fd)
    made.close()


@pytest.fixture
def worker_thread(memory: BatchMemory) -> Iterator[BatchMemory]:
    """This thread stacks as a worker thread does."""
    install_for_threads()
    private_names.set_thread_worker_info(object())
    use_memory(memory)
    yield memory
    use_memory(None)
    private_names.set_thread_worker_info(None)


ROWS = {
    "equal": [torch.ones(PLACED) * n for n in range(20)],
    "not contiguous": [torch.ones(512, 128).t() * n for n in range(20)],
    "bfloat16": [torch.ones(2 * PLACED, dtype=torch.bfloat16) for _ in range(20)],
    "a scalar dtype of its own each": [
        torch.ones(PLACED, dtype=torch.float32 if n else torch.float64) for n in range(20)
    ],
    "ragged": [torch.ones(PLACED + n) for n in range(20)],
    "with a gradient": [torch.ones(PLACED, requires_grad=True) for _ in range(20)],
    "a subclass": [torch.nn.Parameter(torch.ones(PLACED), requires_grad=False) for _ in range(20)],
}


@pytest.mark.parametrize("name", ROWS)
def test_stacking_into_it_gives_the_result_or_error_of_torch(
    name: str, worker_thread: BatchMemory
) -> None:
    rows = ROWS[name]
    try:
        out: Any = torch.empty((len(rows), *rows[0].shape), dtype=rows[0].dtype)
        expected: Any = torch.stack(rows, 0, out=out)
    except Exception as error:
        with pytest.raises(type(error)):
            default_collate(list(rows))
    else:
        found = default_collate(list(rows))
        assert found.dtype is expected.dtype
        assert torch.equal(found, expected)
        assert type(found) is torch.Tensor


def test_an_abandoned_threads_block_is_not_given_to_another() -> None:
    gate = Gate(40)
    made = loader(Large(gate=gate), stall_timeout=0.3)
    kept = list(made)
    gate.open.set()
    expected = list(loader(Large(), torch.utils.data.DataLoader))
    assert all(map(same, kept, expected))
    assert [one.kind for one in made.incidents] == ["unkillable"]
