"""Batches come out as they went in."""

from __future__ import annotations

import collections
import copy
import ctypes
import dataclasses
import gc
import io
import os
import pickle
import signal
import warnings
import weakref
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from holdfast.transport.arena import Arena
from holdfast.transport.codec import SMALL, Parcel, decode, encode
from holdfast.transport.codec.placing import COMMON

from .support import MIB, Slot, in_use, new_slot, worker

DTYPES = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
    },
    key=str,
)


ARRAY_DTYPES: list[Any] = ["u1", "<f4", ">f4", "?", "c16", "M8[ns]", "m8[s]", "<U3", "S5", "f2"]
ARRAY_DTYPES += ["V7", [("a", "<i4"), ("b", "<f8", (2,))]]


@pytest.fixture(scope="module")
def module_slot() -> Iterator[Slot]:
    with new_slot() as slot:
        yield slot


@pytest.fixture
def slot() -> Iterator[Slot]:
    with new_slot() as slot:
        yield slot


@pytest.fixture(params=["arena", "inline"])
def send(request: pytest.FixtureRequest) -> Iterator[Any]:
    with new_slot() as slot:
        if request.param == "inline":
            yield lambda batch: decode(encode(batch, None), None)
        else:
            yield slot.send


def span(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((n - 1) * step for n, step in steps)) * tensor.itemsize


def memory_of(tensor: torch.Tensor) -> bytes:
    """All bytes between the first and the last element."""
    return ctypes.string_at(tensor.data_ptr(), span(tensor)) if tensor.numel() else b""


def assert_same_tensor(got: torch.Tensor, sent: torch.Tensor) -> None:
    assert type(got) is type(sent)
    assert got.dtype == sent.dtype
    assert got.shape == sent.shape
    assert got.stride() == sent.stride()
    assert got.requires_grad == sent.requires_grad
    assert got.is_leaf
    assert not got._is_view()
    assert memory_of(got) == memory_of(sent)


# -- any structure ---------------------------------------------------------------------------


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Record:
    name: str
    value: Any


lengths = st.lists(st.integers(0, 5), max_size=4)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    base = torch.arange(draw(st.integers(0, 40000)) % 256, 40000 + 256, dtype=torch.int32)
    raw = base.to(torch.uint8)
    if draw(st.booleans()):  # a view into something larger
        storage = raw[: len(raw) // 16 * 16].clone().untyped_storage()
    else:
        storage = raw[:4096].clone().untyped_storage()
    size = draw(lengths)
    count = storage.nbytes() // dtype.itemsize
    stride = draw(st.lists(st.integers(0, 30), min_size=len(size), max_size=len(size)))
    if draw(st.booleans()):
        stride = list(torch.empty(size).stride())
    extent = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True) if n)
    if extent > count:
        stride = [0] * len(size)
        extent = 1
    offset = draw(st.integers(0, max(count - extent, 0)))
    tensor = torch.frombuffer(bytearray(16), dtype=dtype, count=1)
    tensor.set_(storage, offset, size, stride)
    if dtype.is_floating_point and dtype.itemsize >= 2 and draw(st.booleans()):
        tensor.requires_grad_()
    return tensor


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    dtype = draw(st.sampled_from(ARRAY_DTYPES))
    shape = tuple(draw(lengths))
    kind: np.dtype[Any] = np.dtype(dtype)
    count = int(np.prod(shape))
    if draw(st.booleans()):
        shape, count = (5000 // kind.itemsize * 4,), 5000 // kind.itemsize * 4
    raw = np.resize(np.arange(97, 123, dtype=np.uint8), max(count * kind.itemsize, 1))
    array = np.ndarray(shape, kind, raw, order=draw(st.sampled_from("CF")))
    array = array.copy(order="K")
    if draw(st.booleans()) and array.ndim:
        array = array[::2]
    if draw(st.booleans()):
        array.setflags(write=False)
    return array


leaves = st.one_of(
    tensors(),
    arrays(),
    st.none(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
)
batches = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=4),
        st.builds(Point, inner, inner),
        st.builds(Record, st.text(max_size=3), inner),
    ),
    max_leaves=8,
)


def assert_same(got: Any, sent: Any) -> None:
    assert type(got) is type(sent)
    if isinstance(sent, torch.Tensor):
        assert_same_tensor(got, sent)
    elif isinstance(sent, np.ndarray):
        if not (sent.flags.c_contiguous or sent.flags.f_contiguous):
            sent = pickle.loads(pickle.dumps(sent, 5))  # may change the byte order
        assert got.dtype == sent.dtype
        assert got.shape == sent.shape
        assert got.flags.writeable
        assert got.tobytes() == sent.tobytes()
        if sent.flags.c_contiguous or sent.flags.f_contiguous:
            assert got.flags.c_contiguous == sent.flags.c_contiguous
            assert got.flags.f_contiguous == sent.flags.f_contiguous
    elif isinstance(sent, list | tuple):
        assert len(got) == len(sent)
        for g, s in zip(got, sent, strict=True):
            assert_same(g, s)
    elif isinstance(sent, dict):
        assert list(got) == list(sent)
        for key in sent:
            assert_same(got[key], sent[key])
    elif isinstance(sent, Record):
        assert_same(got.value, sent.value)
        assert got.name == sent.name
    else:
        assert got == sent


@settings(
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(batch=batches, in_arena=st.booleans())
def test_any_batch_comes_out_as_it_went_in(module_slot: Slot, batch: Any, in_arena: bool) -> None:
    if in_arena:
        got = module_slot.send(batch)
    else:
        got = decode(encode(batch, None), None)
    assert_same(got, batch)
    del got
    module_slot.recycle()
    assert in_use(module_slot.arena) == 0


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_views_of_one_storage_share_it_afterwards(module_slot: Slot, data: st.DataObject) -> None:
    base = torch.arange(data.draw(st.sampled_from([40, 20000])), dtype=torch.float64)
    views = []
    for _ in range(data.draw(st.integers(2, 5))):
        start = data.draw(st.integers(0, 30))
        view = base[start : start + data.draw(st.integers(1, 10))]
        if data.draw(st.booleans()):
            view = view.view(torch.int16)[data.draw(st.integers(0, 3)) :]
        views.append(view)
    views.append(base)
    got = module_slot.send(views)
    for g, v in zip(got, views, strict=True):
        assert_same_tensor(g, v)
        assert g.untyped_storage()._cdata == got[-1].untyped_storage()._cdata
        assert g.data_ptr() - got[-1].data_ptr() == v.data_ptr() - base.data_ptr()
    got[-1].fill_(7)
    base.fill_(7)
    for g, v in zip(got, views, strict=True):
        assert_same_tensor(g, v)
    del got, g
    module_slot.recycle()
    assert in_use(module_slot.arena) == 0


# -- tensors ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 3, 40000])
def test_every_dtype_travels(send: Any, dtype: torch.dtype, count: int) -> None:
    raw = torch.arange(count * dtype.itemsize).to(torch.uint8)
    tensor = torch.frombuffer(bytearray(16), dtype=dtype, count=1)
    tensor.set_(raw.untyped_storage(), 0, (count,), (1,))
    if dtype is torch.bool:
        tensor = raw > 100
    assert_same_tensor(send([tensor])[0], tensor)


@pytest.mark.parametrize("rows", [3, 300])
def test_sizes_and_strides_are_kept(send: Any, rows: int) -> None:
    base = torch.randn(rows, 40, 5)
    batch = [
        base.permute(2, 0, 1),
        base[:, ::3, 1],
        base[0].expand(rows, 40, 5),
        base[:1].t() if base.dim() == 2 else base[:, :1].transpose(0, 1),
        base.sum(),
        base[2, 3, 4],
        base[:0],
        base[:, :, 2:2].transpose(0, 1),
        torch.empty(0),
    ]
    for tensor in batch:
        assert_same_tensor(send(tensor), tensor)
    for got, tensor in zip(send(batch), batch, strict=True):
        assert_same_tensor(got, tensor)


@pytest.mark.parametrize("nbytes", [1000, 10 * MIB])
def test_a_tensor_owns_just_its_bytes(send: Any, nbytes: int) -> None:
    first, second = send([torch.zeros(nbytes, dtype=torch.uint8), torch.ones(10)])
    assert first.untyped_storage().nbytes() == nbytes
    assert second.untyped_storage().nbytes() == 40
    file = io.BytesIO()
    torch.save(second, file)
    assert file.tell() < 3000
    first.add_(1)
    second.add_(1)
    assert first[0] == 1
    assert second[0] == 2


def test_a_view_of_something_huge_ships_only_its_span(slot: Slot) -> None:
    dataset = torch.zeros(64, MIB, dtype=torch.uint8)
    dataset[3], dataset[60] = 1, 2
    got = slot.send([dataset[3], dataset[60]])
    assert in_use(slot.arena) == 2 * MIB
    assert [tensor.untyped_storage().nbytes() for tensor in got] == [MIB, MIB]
    assert [int(tensor.sum()) for tensor in got] == [MIB, 2 * MIB]
    halves = slot.send([dataset[:2], dataset[2:4]])
    assert halves[0].untyped_storage()._cdata == halves[1].untyped_storage()._cdata


def test_tensors_that_only_share_an_array_come_out_apart_as_torch_has_it(slot: Slot) -> None:
    array = np.zeros(20000)
    batch = [torch.from_numpy(array), torch.from_numpy(array[10:]), array, array[5:]]
    got = slot.send(batch)
    for thing in got:
        thing += 1
    assert all((thing == 1).all() for thing in got)


def test_conjugate_and_negative_views_are_resolved(send: Any) -> None:
    z = torch.randn(5, 7, dtype=torch.complex64)
    for tensor in (z.conj(), z.t().conj(), z.conj().imag, z.imag):
        got = send(tensor)
        assert torch.equal(got, tensor)
        assert not got.is_conj()
        assert not got.is_neg()


def test_tensors_without_memory(send: Any) -> None:
    assert send(torch._efficientzerotensor((3,))).tolist() == [0, 0, 0]
    freed = torch.zeros(1000)
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="storage was freed"):
        send([freed])


def test_requires_grad_is_kept_for_leaves_and_refused_for_others(send: Any) -> None:
    leaf = torch.randn(3, requires_grad=True)
    got = send({"a": leaf})["a"]
    assert got.requires_grad
    assert got.is_leaf
    with pytest.raises(RuntimeError, match="Cowardly refusing to serialize non-leaf tensor"):
        send([torch.zeros(10000), leaf * 2])


def test_parameters_keep_their_attributes(send: Any) -> None:
    parameter = torch.nn.Parameter(torch.randn(100, 100))
    parameter.tag = "x"  # type: ignore[attr-defined]
    frozen = torch.nn.Parameter(torch.arange(3), requires_grad=False)
    got, got_frozen = send((parameter, frozen))
    assert_same_tensor(got, parameter)
    assert_same_tensor(got_frozen, frozen)
    assert got.tag == "x"


class Labelled(torch.Tensor):
    label: Any


@pytest.mark.parametrize("rows", [3, 3000])
def test_subclasses_travel_by_their_own_rules(send: Any, rows: int) -> None:
    plain = torch.randn(rows, 4)
    mine = plain.as_subclass(Labelled)
    mine.label = "cat"
    got = send([mine, plain])
    assert type(got[0]) is Labelled
    assert got[0].label == "cat"
    assert torch.equal(got[0], mine)
    assert got[0].untyped_storage()._cdata == got[1].untyped_storage()._cdata
    got[0][0] = 5
    assert (got[1][0] == 5).all()


def kept_for_a_check() -> list[torch.Tensor]:
    """Sparse tensors that torch has rebuilt and keeps until a torch.load looks at them: in one list, or in one for each
    thread."""
    if hasattr(torch._utils, "_get_sparse_tensors_to_validate"):
        return torch._utils._get_sparse_tensors_to_validate()  # type: ignore[no-any-return]
    return torch._utils._sparse_tensors_to_validate


@pytest.mark.parametrize("rows", [4, 400])
@pytest.mark.parametrize("layout", ["coo", "uncoalesced", "csr", "csc", "bsr", "bsc"])
def test_sparse_tensors(send: Any, rows: int, layout: str) -> None:
    dense = torch.eye(rows) + torch.eye(rows).roll(1, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if layout == "coo":
            sparse = dense.to_sparse()
        elif layout == "uncoalesced":
            sparse = torch.sparse_coo_tensor(torch.zeros(2, rows).long(), torch.ones(rows), (9, 9))
            dense = sparse.to_dense()
        elif layout.startswith("b"):
            sparse = getattr(dense, f"to_sparse_{layout}")((2, 2))
        else:
            sparse = getattr(dense, f"to_sparse_{layout}")()
        sparse.requires_grad_()
        got = send([sparse])[0]
    assert got.layout == sparse.layout
    assert got.requires_grad
    assert torch.equal(got.detach().to_dense(), dense)
    if got.layout is torch.sparse_coo:
        assert got.is_coalesced() == sparse.is_coalesced()
    assert not kept_for_a_check()


@pytest.mark.parametrize("rows", [4, 4000])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(send: Any, rows: int, layout: torch.layout) -> None:
    parts = [torch.randn(rows, 3), torch.randn(2, 3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor(parts, layout=layout)
        got = send([nested])[0]
    assert got.is_nested
    assert got.layout == layout
    for mine, theirs in zip(got.unbind(), parts, strict=True):
        assert torch.equal(mine, theirs)


def test_quantized_tensors(send: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = torch.quantize_per_tensor(torch.randn(100, 100), 0.1, 3, torch.quint8)
        got = send(tensor)
        assert got.q_scale() == tensor.q_scale()
        assert torch.equal(got.int_repr(), tensor.int_repr())


def test_meta_tensors_and_storages(send: Any) -> None:
    got = send([torch.empty(3, 4, device="meta"), torch.randn(5).untyped_storage()])
    assert got[0].device.type == "meta"
    assert got[0].shape == (3, 4)
    assert got[1].nbytes() == 20
    assert send(torch.UntypedStorage(0)).nbytes() == 0
    assert send(torch.FloatStorage([1, 2, 3])).tolist() == [1, 2, 3]


# -- everything else -------------------------------------------------------------------------


def test_a_few_tensors_in_a_plain_container_need_no_pickle(send: Any) -> None:
    few = [torch.arange(5), torch.zeros(2, 0), torch.randn(100, 100)]
    for batch in (few, tuple(few), dict(zip("abc", few, strict=True)), [], (), {}):
        assert_same(send(batch), batch)
    assert b"_taken_out" not in encode(few, None)
    for batch in ({1: few[0]}, [few[0], None], [few[0], few[0]], Point(*few[:2])):
        frame = encode(batch, None)
        assert b"_taken_out" in frame
        assert_same(decode(frame, None), batch)


def test_the_same_object_twice_is_one_object(send: Any) -> None:
    tensor, array = torch.zeros(10000), np.zeros(10000)
    got = send([tensor, array, {"t": tensor, "a": array}])
    assert got[0] is got[2]["t"]
    assert got[1] is got[2]["a"]


def test_arrays_numpy_itself_must_pickle(send: Any, tmp_path: Any) -> None:
    memmap = np.memmap(tmp_path / "file", np.float32, "w+", shape=(100, 100))
    memmap[:] = 3
    masked = np.ma.masked_array(np.arange(10000), np.arange(10000) % 2)
    batch = [
        np.array(["a", None, {}], dtype=object),
        np.arange(10000)[::-1],
        memmap,
        masked,
        np.float32(3),
        np.dtype("M8[ns]"),
        np.zeros((), "<f8"),
    ]
    if hasattr(np.dtypes, "StringDType"):
        batch.append(np.array(["long enough not to be inline" * 3], np.dtypes.StringDType()))
    for got, sent in zip(send(batch), batch, strict=True):
        assert type(got) is type(pickle.loads(pickle.dumps(sent)))
        assert np.array_equal(got, sent)


def test_dtypes_with_names_and_metadata(send: Any) -> None:
    dtype = np.dtype([("x", "<f4"), ("y", "S3")], align=True, metadata={"unit": "m"})
    array = np.zeros(3000, dtype)
    got = send(array)
    assert got.dtype == dtype
    got["x"] = 1


@pytest.mark.parametrize("writable", [False, True])
def test_buffers_of_other_libraries_go_beside_the_stream(slot: Slot, writable: bool) -> None:
    data = bytearray(b"x" * 100_000)
    got = slot.send([Buffered(data if writable else bytes(data)), torch.zeros(3)])
    assert bytes(got[0].data) == data
    assert memoryview(got[0].data).readonly != writable
    assert slot.lent() == 100_000
    small = slot.send(Buffered(b"abc"))
    assert bytes(small.data) == b"abc"


class Buffered:
    def __init__(self, data: Any) -> None:
        self.data = data

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Buffered, (pickle.PickleBuffer(self.data),)


def test_ordinary_objects(send: Any) -> None:
    image = Image.fromarray(np.arange(30000, dtype=np.uint8).reshape(100, 100, 3))
    counts: Any = collections.defaultdict(list, {"a": [1]})
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    batch = [image, counts, collections.OrderedDict(b=1), Point(1, 2), Record("n", 3), deep, None]
    got = send(copy.copy(batch))
    assert got[0].tobytes() == image.tobytes()
    assert got[1:] == batch[1:]
    assert got[1].default_factory is list


class Celsius:
    def __init__(self, degrees: float) -> None:
        self.degrees = degrees


def _celsius_from(degrees: float) -> Celsius:
    return Celsius(degrees + 1)


def test_reducers_that_users_registered_hold(send: Any) -> None:
    reducers = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    ForkingPickler.register(Celsius, lambda c: (_celsius_from, (c.degrees,)))
    try:
        assert send(Celsius(3)).degrees == 4
    finally:
        del reducers[Celsius]


class Unpicklable:
    def __reduce__(self) -> Any:
        raise ValueError("not me")


def test_what_cannot_be_pickled_leaves_nothing_behind(slot: Slot) -> None:
    block = slot.arena.take(MIB)
    assert block is not None
    tensor = torch.from_numpy(block.array)
    with pytest.raises(ValueError, match="not me"):
        encode([tensor, torch.zeros(MIB), Unpicklable()], slot.arena)
    del tensor, block
    gc.collect()
    assert in_use(slot.arena) == 0


# -- where the bytes go ----------------------------------------------------------------------


def test_small_batches_do_not_touch_the_arena(slot: Slot) -> None:
    batch = [torch.zeros(16, 64), torch.arange(16), {"a": np.zeros(100)}, "text"]
    frame = encode(batch, slot.arena)
    assert in_use(slot.arena) == 0
    assert len(frame) < 8192
    assert_same(decode(frame, None), batch)


def test_what_lies_in_the_arena_is_not_copied(slot: Slot) -> None:
    block = slot.arena.take(4 * MIB)
    assert block is not None
    address, offset = block.array.__array_interface__["data"][0], block.offset
    tensor = torch.from_numpy(block.array).view(1024, 4096)
    del block
    labels = torch.arange(1024)
    frame = encode([tensor, labels], slot.arena)
    assert len(frame) < 9000
    assert in_use(slot.arena) == 4 * MIB
    got = decode(frame, slot.window)
    assert slot.window.handover() == [(offset, 4 * MIB)]
    tensor[5, 5] = 99
    assert got[0][5, 5] == 99
    assert tensor.data_ptr() == address
    # Sent again, it is copied: what main does to the first must not show in the second.
    again = slot.send([tensor])
    got[0].zero_()
    assert again[0][5, 5] == 99
    del got, again, tensor
    slot.recycle()
    assert in_use(slot.arena) == 0


def test_keeping_the_labels_does_not_keep_the_images(slot: Slot) -> None:
    images, labels, masks = slot.send([torch.zeros(MIB), torch.arange(64), torch.zeros(20000)])
    assert len(slot.window.handover()) == 2
    del images
    assert slot.window.take_released() != []
    assert slot.lent() == 80000
    del masks
    assert slot.window.take_released() != []
    assert slot.lent() == 0
    assert labels.sum() == 2016


def test_many_small_tensors_share_blocks_of_limited_size(slot: Slot) -> None:
    batch = [torch.full((1000,), float(i)) for i in range(500)]
    frame = encode(batch, slot.arena)
    assert len(frame) < 64 << 10
    got = decode(frame, slot.window)
    assert_same(got, batch)
    held = slot.window.handover()
    assert 500 * 4000 // COMMON <= len(held) <= 10
    del batch
    kept = got[250]
    del got
    (left,) = slot.window.handover()
    assert left in held
    assert (kept == 250).all()


def test_a_long_pickle_goes_through_the_arena_and_is_released_at_once(slot: Slot) -> None:
    batch = {"text": ["word" * 10 + str(i) for i in range(5000)], "x": torch.zeros(3)}
    frame = encode(batch, slot.arena)
    assert len(frame) < 1000
    got = decode(frame, slot.window)
    assert_same(got, batch)
    slot.recycle()
    assert slot.lent() == in_use(slot.arena) == 0


def test_without_room_everything_goes_inline() -> None:
    with new_slot(MIB) as slot:
        batch = [
            torch.randn(MIB),
            np.arange(MIB),
            torch.randn(3),
            ["x" * 100] * 10,
            [torch.full((1000,), float(i)) for i in range(500)],
            list(range(200000)),
        ]
        batch.append(batch[0][10:20])  # type: ignore[index]
        frame = encode(batch, slot.arena)
        assert len(frame) > 13 * MIB
        got = decode(frame, slot.window)
        assert_same(got, batch)
        got[0].add_(1)
        # Each large one is a copy of its own.
        kept = got[1]
        gone = weakref.ref(got[0])
        del got
        assert gone() is None
        assert kept.nbytes == 8 * MIB


def test_a_parcel_that_is_never_unpacked_releases_its_blocks(slot: Slot) -> None:
    frame = encode([torch.zeros(MIB), torch.zeros(3)], slot.arena)
    parcel = Parcel(frame, slot.window)
    assert parcel.nbytes > 4 * MIB
    assert slot.lent() == 4 * MIB
    del parcel
    slot.recycle()
    assert in_use(slot.arena) == 0


def test_a_batch_that_cannot_be_rebuilt_releases_its_blocks(slot: Slot) -> None:
    frame = encode([torch.zeros(MIB), Explosive()], slot.arena)
    try:
        decode(frame, slot.window)
    except ZeroDivisionError:
        pass
    else:
        pytest.fail("no error")
    slot.recycle()
    assert in_use(slot.arena) == 0


class Explosive:
    def __reduce__(self) -> Any:
        return divmod, (1, 0)


def test_batches_made_in_another_process_survive_its_death(slot: Slot) -> None:
    def job(arena: Arena, number: int) -> bytes:
        return encode({"x": torch.full((100, 1000), number), "y": [number]}, arena)

    child = worker(slot, job)
    kept = [decode(child.ask(([], number)), slot.window) for number in range(5)]
    child.end(signal.SIGKILL)
    child = worker(slot, job, slot.window.handover())
    kept += [decode(child.ask(([], number)), slot.window) for number in range(5, 10)]
    child.end(signal.SIGKILL)
    slot.window.close()
    for number, batch in enumerate(kept):
        assert batch["y"] == [number]
        assert (batch["x"] == number).all()


def test_a_child_recycles_the_same_memory_for_ever(slot: Slot) -> None:
    def job(arena: Arena, number: int) -> bytes:
        return encode([torch.full((1000, 1000), number), torch.arange(5000)], arena)

    child = worker(slot, job)
    for number in range(50):
        batch = decode(child.ask((slot.window.take_released(), number)), slot.window)
        assert (batch[0] == number).all()
    assert slot.resident() < 30 * MIB
    assert child.end() == 0


def test_the_inline_threshold_is_below_one_datagram() -> None:
    assert 2 * SMALL < 64 << 10


@pytest.mark.slow
@pytest.mark.skipif(
    os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 6 << 30, reason="needs 6 GiB"
)
@pytest.mark.parametrize("arena", [False, True])
def test_more_than_two_gigabytes(arena: bool) -> None:
    """There are never more than two copies: the test takes 4.5 GB."""
    big = torch.zeros((2 << 30) + 5, dtype=torch.uint8)
    big[-1] = 7
    with new_slot(4 << 30) as slot:
        frame = encode([big, big[-3:], 1], slot.arena if arena else None)
        shape = big.shape
        del big
        got = decode(frame, slot.window)
        del frame
        assert got[0].shape == shape
        assert got[1].tolist() == [0, 0, 7]
        assert got[0][-1] == 7
        assert not got[0][:-1].any()  # a sum would take eight bytes for each of these
