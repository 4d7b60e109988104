"""Collation in the arena gives what torch's own gives in a worker."""

from __future__ import annotations

import collections
import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

from holdfast.transport import placement as placement_module
from holdfast.transport.collate import install
from holdfast.transport.placement import PLACED, Placement
from tests.support import warm

from .support import MIB, Slot, in_use, new_slot, worker

torch_stack = torch_collate.collate_tensor_fn


@pytest.fixture
def slot() -> Iterator[Slot]:
    known: Any = torch_collate.default_collate_fn_map
    with new_slot() as slot:
        install(slot.arena)
        try:
            yield slot
        finally:
            known[torch.Tensor] = torch_stack


@pytest.fixture
def in_torchs_worker(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """What torch's own collation does with a batch when it runs in a worker."""

    def reference(batch: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(torch_worker, "_worker_info", "a worker")
            patch.setitem(torch_collate.default_collate_fn_map, torch.Tensor, torch_stack)
            return default_collate(batch)

    return reference


def in_arena(slot: Slot, tensor: torch.Tensor) -> bool:
    return slot.arena.find(tensor.data_ptr(), tensor.nbytes) is not None


def assert_same(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        assert got.stride() == expected.stride()
        assert got._is_view() == expected._is_view()
        assert torch.equal(got, expected)
        assert got.untyped_storage().nbytes() == got.nbytes
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key in expected:
            assert_same(got[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for g, e in zip(got, expected, strict=True):
            assert_same(g, e)
    else:
        assert got == expected


class Pair(NamedTuple):
    image: Any
    label: Any


class Labelled(torch.Tensor):
    pass


def test_large_results_go_to_the_arena_and_small_ones_do_not(slot: Slot) -> None:
    small = default_collate([torch.zeros(3)] * 4)
    large = default_collate([torch.ones(100, 100)] * 4)
    assert not in_arena(slot, small)
    assert in_arena(slot, large)
    assert not large.is_shared()
    assert_same(large, torch.ones(4, 100, 100))
    del large
    assert in_use(slot.arena) == 0


def test_a_collated_batch_is_sent_without_a_copy(slot: Slot) -> None:
    batch = default_collate([(torch.full((1000, 100), float(i)), i) for i in range(8)])
    used = in_use(slot.arena)
    got = slot.send(batch)
    assert in_use(slot.arena) == used
    assert_same(got, batch)


@pytest.mark.parametrize("width", [2, 20000])
@pytest.mark.parametrize(
    "make",
    [
        lambda n: [torch.randn(n) for _ in range(3)],
        lambda n: [torch.randn(n).to(torch.bfloat16) for _ in range(3)],
        lambda n: [torch.zeros(n), torch.ones(n, dtype=torch.float64)],
        lambda n: [torch.zeros(n, dtype=torch.float64), torch.ones(n)],
        lambda n: [torch.zeros(n), torch.ones(n, dtype=torch.int64)],
        lambda n: [torch.randn(n, 2, 3).permute(2, 0, 1) for _ in range(3)],
        lambda n: [torch.zeros(()), torch.ones(())],
        lambda n: [torch.zeros(n, 0)] * 3,
        lambda n: [np.arange(n), np.arange(n)],
        lambda n: [np.arange(n)[::2], np.arange(n)[::2]],
        lambda n: [{"a": torch.zeros(n), "b": [1.5, "x"]} for _ in range(3)],
        lambda n: [Pair(np.zeros(n, np.uint8), 3) for _ in range(3)],
        lambda n: [collections.OrderedDict(a=torch.zeros(n)) for _ in range(3)],
        lambda n: [torch.randn(n).as_subclass(Labelled) for _ in range(3)],  # type: ignore[arg-type]
        lambda n: [torch.zeros(n), torch.randn(n).as_subclass(Labelled)],  # type: ignore[arg-type]
    ],
)
def test_results_are_those_of_torch_in_a_worker(
    slot: Slot, in_torchs_worker: Any, make: Callable[[int], Any], width: int
) -> None:
    batch = make(width)
    assert_same(default_collate(batch), in_torchs_worker(batch))


@pytest.mark.parametrize("width", [2, 20000])
@pytest.mark.parametrize(
    "make",
    [
        lambda n: [torch.zeros(n, dtype=torch.int64), torch.ones(n)],
        lambda n: [torch.zeros(n), torch.zeros(n, requires_grad=True)],
        lambda n: [torch.zeros(n, requires_grad=True)] * 2,
        lambda n: [torch.zeros(n, n % 7).to_sparse()] * 2,
        lambda n: [torch.eye(3).to_sparse_csr()] * 2,
        lambda n: [torch.nested.nested_tensor([torch.zeros(n)])] * 2,
        lambda n: [np.array(["x"] * n)] * 2,
        lambda n: [np.arange(n)[::-1]] * 2,
        lambda n: [torch.zeros(n), 3],
        lambda n: [torch.zeros(n).as_subclass(Labelled).requires_grad_()] * 2,  # type: ignore[arg-type]
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested")
def test_errors_are_those_of_torch_in_a_worker(
    slot: Slot, in_torchs_worker: Any, make: Callable[[int], Any], width: int
) -> None:
    batch = make(width)
    with pytest.raises(Exception) as expected:
        in_torchs_worker(batch)
    with pytest.raises(type(expected.value)) as got:
        default_collate(batch)
    assert str(got.value) == str(expected.value)


@pytest.mark.parametrize("width", [2, 200])
def test_conjugates_which_torch_cannot_collate_in_a_worker(slot: Slot, width: int) -> None:
    samples = [torch.randn(width, width, dtype=torch.complex64).conj() for _ in range(3)]
    assert torch.equal(default_collate(samples), torch.stack(samples))
    assert torch.equal(collate_placed(slot, samples), torch.stack(samples))


@pytest.mark.parametrize("sizes", [(3, 2), (2, 3), (30000, 20000), (20000, 30000)])
def test_unequal_sizes_are_named(slot: Slot, sizes: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        default_collate([torch.zeros(size) for size in sizes])


def test_without_room_the_heap_serves() -> None:
    known: Any = torch_collate.default_collate_fn_map
    with new_slot(MIB) as slot:
        install(slot.arena)
        try:
            batch = [torch.randn(MIB), torch.randn(MIB)]
            result = default_collate(batch)
            placement = Placement(slot.arena, 2)
            again = default_collate([placement.place(sample) for sample in batch])
        finally:
            known[torch.Tensor] = torch_stack
    assert_same(result, torch.stack(batch))
    assert_same(again, torch.stack(batch))


def test_a_users_own_function_for_tensors_is_left_in_place() -> None:
    known: Any = torch_collate.default_collate_fn_map
    known[torch.Tensor] = mine = lambda batch, *, collate_fn_map=None: "mine"
    try:
        with new_slot() as slot:
            install(slot.arena)
            assert known[torch.Tensor] is mine
    finally:
        known[torch.Tensor] = torch_stack


def test_a_worker_collates_for_the_main_process(slot: Slot) -> None:
    from holdfast.transport.codec import decode, encode

    def job(arena: Any, number: int) -> bytes:
        install(arena)
        placement = Placement(arena, 4)
        samples = [
            placement.place((torch.full((3, 100, 100), number + i), i, np.full(30000, number)))
            for i in range(4)
        ]
        return encode(default_collate(samples), arena)

    child = worker(slot, job)
    for number in range(0, 200, 10):
        frame = child.ask((slot.window.take_released(), number))
        assert len(frame) < 1000
        images, labels, arrays = decode(frame, slot.window)
        assert images[:, 0, 0, 0].tolist() == [number + i for i in range(4)]
        assert labels.tolist() == [0, 1, 2, 3]
        assert (arrays == number).all()
    assert slot.resident() < 20 * MIB
    assert child.end() == 0


# -- sample by sample ------------------------------------------------------------------------

BIG = (3, 100, 100)


def collate_placed(slot: Slot, samples: list[Any], size: int | None = None) -> Any:
    placement = Placement(slot.arena, size or len(samples))
    return default_collate([placement.place(sample) for sample in samples])


@pytest.mark.parametrize(
    "make",
    [
        lambda i: torch.full(BIG, float(i)),
        lambda i: np.full(BIG, i, np.float32),
        lambda i: torch.full(BIG, float(i)).to(torch.bfloat16).repeat(2, 1, 1),
        lambda i: (torch.full(BIG, float(i)), i, "name"),
        lambda i: [np.full(BIG, i).transpose(2, 0, 1), torch.tensor(i)],
        lambda i: {"a": {"b": (torch.full(BIG, i), [np.full(BIG, i)])}, "c": 1.5},
        lambda i: Pair(torch.full((100, 100, 3), i).permute(2, 0, 1), {"x": i}),
        lambda i: (np.full((9, *BIG), i > 1), torch.full(BIG, i, dtype=torch.complex64)),
        lambda i: collections.OrderedDict(a=torch.full(BIG, i)),
        lambda i: (torch.full(BIG, float(i)), torch.zeros(3)),
    ],
)
@pytest.mark.parametrize(("count", "size"), [(4, 4), (1, 1), (3, 8)])
def test_placed_samples_collate_to_the_same_batch(
    slot: Slot, in_torchs_worker: Any, make: Callable[[int], Any], count: int, size: int
) -> None:
    samples = [make(i) for i in range(count)]
    expected = in_torchs_worker(samples)
    got = collate_placed(slot, samples, size)
    assert_same(got, expected)


def test_a_placed_batch_is_the_block_itself(slot: Slot) -> None:
    placement = Placement(slot.arena, 4)
    samples = [(torch.full(BIG, float(i)), np.full(BIG, i)) for i in range(4)]
    placed = [placement.place(sample) for sample in samples]
    addresses = [placed[0][0].data_ptr(), placed[0][1].__array_interface__["data"][0]]
    used = in_use(slot.arena)
    batch = default_collate(placed)
    assert in_use(slot.arena) == used
    assert [tensor.data_ptr() for tensor in batch] == addresses
    assert all(sample[0].data_ptr() != addresses[0] for sample in samples)
    del placed, placement
    gc.collect()
    assert in_use(slot.arena) == used
    del batch
    assert in_use(slot.arena) == 0


def test_the_users_containers_are_not_touched(slot: Slot) -> None:
    tensor = torch.zeros(BIG)
    sample = {"a": [tensor, 1]}
    placed = Placement(slot.arena, 2).place(sample)
    assert placed["a"][0] is not tensor
    assert sample["a"][0] is tensor


def test_small_samples_pass_through_as_they_are(slot: Slot) -> None:
    placement = Placement(slot.arena, 2)
    for _ in range(3):
        sample = (torch.zeros(PLACED // 4 - 1), {"a": np.zeros(3)}, "x")
        assert placement.place(sample) is sample
    assert in_use(slot.arena) == 0


class Odd:
    """Represents any sample that is not like the first."""

    kinds: tuple[Callable[[], Any], ...] = (
        lambda: torch.zeros(BIG),
        lambda: torch.zeros(BIG, dtype=torch.float64),
        lambda: torch.zeros(BIG, dtype=torch.int64),
        lambda: torch.zeros(3, 100, 101),
        lambda: torch.zeros(BIG, requires_grad=True),
        lambda: torch.zeros(BIG).as_subclass(Labelled),  # type: ignore[arg-type]
        lambda: np.zeros(BIG, np.float32),
        lambda: np.zeros(BIG, ">f4"),
        lambda: np.zeros(BIG)[:, ::-1],
        lambda: np.zeros(BIG, "S1"),
        lambda: torch.zeros(3),
        lambda: 5,
    )


@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    choices=st.lists(st.integers(0, len(Odd.kinds) - 1), min_size=1, max_size=3),
    first=st.integers(0, len(Odd.kinds) - 1),
    shape=st.sampled_from(["leaf", "tuple", "dict", "ragged"]),
)
@pytest.mark.filterwarnings("ignore")
def test_results_and_errors_do_not_depend_on_placement(
    slot: Slot, choices: list[int], first: int, shape: str
) -> None:
    leaves = [Odd.kinds[number]() for number in [first, *choices]]
    samples: list[Any] = leaves
    if shape == "tuple":
        samples = [(1, leaf) for leaf in leaves]
    elif shape == "dict":
        samples = [{"x": leaf, "y": 2} for leaf in leaves]
    elif shape == "ragged":
        samples = [[leaf] * (1 + number % 2) for number, leaf in enumerate(leaves)]
    expected = outcome(lambda: default_collate(samples))
    got = outcome(lambda: collate_placed(slot, samples))
    if isinstance(expected, Exception):
        assert repr(got) == repr(expected)
    else:
        assert_same(got, expected)


def outcome(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:
        return error


def test_rows_in_another_order_are_stacked_in_that_order(slot: Slot) -> None:
    placement = Placement(slot.arena, 3)
    placed = [placement.place(torch.full(BIG, float(i))) for i in range(3)]
    got = default_collate([placed[1], placed[0], placed[2]])
    assert got[:, 0, 0, 0].tolist() == [1, 0, 2]
    assert default_collate([placed[0], placed[2]])[:, 0, 0, 0].tolist() == [0, 2]
    whole = default_collate(placed)
    again = default_collate(placed)
    whole.zero_()
    assert again[:, 0, 0, 0].tolist() == [0, 1, 2]


def test_samples_beyond_the_announced_size_are_left_alone(slot: Slot) -> None:
    got = collate_placed(slot, [torch.full(BIG, float(i)) for i in range(5)], size=3)
    assert got[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]


LARGE = 1 << 16
buffer = torch.zeros(LARGE)
array = np.zeros((2, LARGE))


def filled(thing: Any, value: float) -> Any:
    thing[:] = value
    return thing


REFILLED: dict[str, Callable[[int], Any]] = {
    "a tensor": lambda row: filled(buffer, row),
    "a new view each time": lambda row: filled(buffer, row)[:],
    "an array": lambda row: filled(array, row),
    "a view of an array": lambda row: filled(array, row)[1],
    "a tensor on an array": lambda row: torch.from_numpy(filled(array, row)),
    "one of two in turn": lambda row: filled(array, row)[row % 2],
    "inside": lambda row: {"x": (filled(buffer, row), row)},
}
OTHERWISE: dict[str, Callable[[int], Any]] = {
    "memory that was freed and taken again": lambda row: torch.full((LARGE,), float(row)),
    "an array that was": lambda row: np.full(LARGE, float(row)),
    "the same sample again": lambda row: filled(buffer, torch.nan),
    "parts of one thing": lambda row: array[row % 2],
    "what is too small to be placed": lambda row: filled(buffer[:9], row),
}


@pytest.mark.parametrize("name", [*REFILLED, *OTHERWISE])
def test_one_buffer_that_is_filled_again_and_again_is_noticed(slot: Slot, name: str) -> None:
    told: list[bool] = []
    placement = Placement(slot.arena, 5, lambda: told.append(True))
    sample = {**REFILLED, **OTHERWISE}[name]
    rows = [placement.place(sample(row)) for row in range(5)]
    assert told == [True] * (name in REFILLED)
    if name == "a tensor":
        assert torch.utils.data.default_collate(rows)[:, 0].tolist() == [0, 1, 2, 3, 4]


def test_a_placement_is_not_kept_alive(slot: Slot) -> None:
    placement = Placement(slot.arena, 3)
    placement.place(torch.zeros(BIG))
    assert in_use(slot.arena) > 0
    del placement
    assert in_use(slot.arena) == 0
    assert placement_module._current.placement() is None


HEAP = """
import numpy as np, os, torch
from holdfast.transport.arena import Arena
from holdfast.transport.mapping import create
from holdfast.transport.placement import Placement

def anonymous():
    fields = open("/proc/self/statm").read().split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")

arena = Arena(create("test"))
source = {source}
warm = Placement(arena, 2)
rows = [warm.place(source.{copy}()) for _ in range(2)]
before = anonymous()
placement = Placement(arena, 64)
rows = [placement.place(source.{copy}()) for _ in range(64)]
print(anonymous() - before)
"""


@pytest.mark.parametrize(
    ("source", "copy"),
    [("torch.ones(3, 224, 224)", "clone"), ("np.ones((3, 224, 224), np.float32)", "copy")],
)
def test_placing_a_batch_takes_the_memory_of_one_sample(source: str, copy: str) -> None:
    """Not of the whole batch: each sample fits into the memory that the last one has freed."""
    program = HEAP.format(source=source, copy=copy)
    ended = warm.run(["-c", program], timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) < 8 << 20  # a batch has 38
