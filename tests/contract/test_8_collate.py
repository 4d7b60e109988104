"""contract.md section 8: default collation, in a worker and out of it."""

from __future__ import annotations

import functools
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data._utils.worker as torchs_worker
from torch.utils.data import default_collate

from tests.support.datasets import DTYPES, Calls, ChannelsLast, Dtypes, Numbers, Pair, Views
from tests.support.errors import error_of, error_of_next, outcomes
from tests.support.fingerprint import fingerprint
from tests.support.loaders import STOCK, Loader
from tests.support.texts import normalised

pytestmark = pytest.mark.timeout(60)

WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


class MyDict(dict[str, Any]):
    pass


class MyList(list[Any]):
    pass


class MyPair(Pair):
    pass


class OneWay(dict[str, Any]):
    """A mapping that cannot be rebuilt from a dict."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(a=a, b=b)


Big = namedtuple("Big", "x y z")

SAMPLES: dict[str, Any] = {
    "int": lambda i: i,
    "float": lambda i: i / 3,
    "bool": lambda i: i % 2 == 0,
    "str": lambda i: f"s{i}",
    "bytes": lambda i: bytes([i]),
    "tensor": lambda i: torch.full((2, 3), float(i)),
    "zero-dim tensor": lambda i: torch.tensor(i),
    "zero-size tensor": lambda i: torch.empty(0, 3),
    "array": lambda i: np.full((2, 2), i, dtype=np.int32),
    "zero-dim array": lambda i: np.array(i, dtype=np.float32),
    "numpy float": lambda i: np.float32(i),
    "numpy int": lambda i: np.int8(i),
    "numpy bool": lambda i: np.bool_(i % 2),
    "fortran array": lambda i: np.asfortranarray(np.arange(6.0).reshape(2, 3) + i),
    "negative strides": lambda i: np.arange(6)[::-1].copy() + i,
    "dict": lambda i: {"a": i, "b": torch.tensor([i])},
    "nested dict": lambda i: {"a": {"b": {"c": i}}},
    "int keys": lambda i: {1: i, 2: i + 1},
    "subclass of dict": lambda i: MyDict(a=i),
    "ordered": lambda i: OrderedDict(z=i, a=i),
    "one-way mapping": lambda i: OneWay(i, i),
    "list": lambda i: [i, float(i)],
    "subclass of list": lambda i: MyList([i, i]),
    "tuple": lambda i: (i, "x"),
    "nested tuple": lambda i: ((i, (i,)), [i]),
    "namedtuple": lambda i: Pair(i, torch.ones(1)),
    "subclass of namedtuple": lambda i: MyPair(i, i),
    "empty tuple": lambda i: (),
    "empty dict": lambda i: {},
    "range": lambda i: range(i, i + 3),
    "mixed": lambda i: {"a": [Big(i, {"d": (i, b"x")}, np.ones(2))], "t": "text"},
    "expanded": lambda i: torch.tensor([i]).expand(3, 4),
    "transposed": lambda i: (torch.arange(6.0).reshape(2, 3) + i).t(),
    "sliced": lambda i: (torch.arange(12) + i)[::3],
    "parameter": lambda i: torch.nn.Parameter(torch.full((2,), float(i)), requires_grad=False),
    "view of a big tensor": lambda i: torch.arange(1000)[i : i + 2],
    "bool tensor": lambda i: torch.tensor([i % 2 == 0]),
    "int then float": lambda i: i if i % 2 else float(i),
    "float then int": lambda i: float(i) if i % 2 else i,
    "int then bool": lambda i: True if i % 2 else i,
    "mixed dtypes": lambda i: torch.ones(2, dtype=torch.float32 if i % 2 else torch.int64),
    "tensor and number": lambda i: torch.tensor(i) if i % 2 == 0 else i,
    "str and bytes": lambda i: "s" if i % 2 else b"b",
}


# There torch collates in a worker into storage of the first sample's type, and says so.
DIFFERS_IN_A_WORKER = {"mixed dtypes", "tensor and number"}


def collated_in_two_workers(loader_class: Loader, sample: Any) -> list[Any]:
    found = outcomes(iter(loader_class(Calls(5, sample), batch_size=2, num_workers=2)))
    return [compared(each) for each in found]


def compared(batch: Any) -> tuple[type, Any]:
    if isinstance(batch, Exception):
        return type(batch), str(batch)
    return dict, fingerprint(batch)


ALIKE = sorted(set(SAMPLES) - DIFFERS_IN_A_WORKER)


class OfAnyKind:
    """Its indices are a kind and a number."""

    def __getitem__(self, index: tuple[str, int]) -> Any:
        kind, number = index
        return SAMPLES[kind](number)


@functools.cache
def all_collated(loader_class: Loader) -> dict[str, list[Any]]:
    """Three batches of each kind, by one loader for all: that is much quicker."""
    batches = [[(kind, i) for i in part] for kind in ALIKE for part in ((0, 1), (2, 3), (4,))]
    loader = loader_class(OfAnyKind(), batch_sampler=batches, num_workers=2)
    found = [compared(each) for each in outcomes(iter(loader))]
    assert len(found) == len(batches)
    return {kind: found[3 * place : 3 * place + 3] for place, kind in enumerate(ALIKE)}


@pytest.mark.parametrize("kind", ALIKE)
def test_default_collation_in_a_worker_gives_what_it_gives_in_the_main_process(
    loader_class: Loader, kind: str
) -> None:
    """Or raises what it raises; shapes, strides, types and bits."""
    sample = SAMPLES[kind]
    got = all_collated(loader_class)[kind]
    for start, (sort, what) in zip((0, 2, 4), got, strict=True):
        samples = [sample(i) for i in range(start, min(5, start + 2))]
        if issubclass(sort, Exception):
            error = error_of(lambda: default_collate(samples))  # noqa: B023
            assert sort is type(error)
            assert str(error) in what
        else:
            assert what == fingerprint(default_collate(samples))


def test_where_torch_refuses_in_a_worker_only_so_does_holdfast(holdfast_class: Loader) -> None:
    torchs = collated_in_two_workers(STOCK, SAMPLES["mixed dtypes"])
    ours = collated_in_two_workers(holdfast_class, SAMPLES["mixed dtypes"])
    assert all(issubclass(sort, Exception) for sort, _ in torchs[:2])
    assert torchs[2][0] is dict
    assert [sort for sort, _ in ours] == [sort for sort, _ in torchs]
    for (_, mine), (_, theirs) in zip(ours[:2], torchs[:2], strict=True):
        assert normalised(mine).startswith(normalised(theirs))


def test_a_number_among_tensors_is_refused_as_torch_refuses_it_with_or_without_workers(
    holdfast_class: Loader,
) -> None:
    """In a worker torch stumbles over `'int' object has no attribute 'numel'`; without, it says
    what it expected."""
    found = collated_in_two_workers(holdfast_class, SAMPLES["tensor and number"])
    words = (
        "'int' object has no attribute 'numel'",
        "expected Tensor as element 1 in argument 0, but got int",
    )
    assert [sort for sort, _ in found[2:]] == [dict]
    for sort, text in found[:2]:
        assert sort in (AttributeError, TypeError)
        assert any(each in text for each in words), text


@WORKERS
def test_numbers_become_64_bit_tensors_and_text_stays(
    loader_class: Loader, num_workers: int
) -> None:
    def collated(sample: Any) -> Any:
        return next(iter(loader_class(Calls(2, sample), batch_size=2, num_workers=num_workers)))

    assert collated(SAMPLES["int"]).dtype is torch.int64
    assert collated(SAMPLES["float"]).dtype is torch.float64
    assert collated(SAMPLES["bool"]).dtype is torch.bool
    assert collated(SAMPLES["str"]) == ["s0", "s1"]
    assert collated(SAMPLES["bytes"]) == [b"\x00", b"\x01"]
    assert type(collated(SAMPLES["tuple"])) is list
    assert type(collated(SAMPLES["range"])) is list
    assert type(collated(SAMPLES["namedtuple"])) is Pair
    assert type(collated(SAMPLES["subclass of dict"])) is MyDict
    assert type(collated(SAMPLES["subclass of list"])) is MyList


@WORKERS
def test_every_dtype_is_collated(loader_class: Loader, num_workers: int) -> None:
    batch = next(iter(loader_class(Dtypes(2), batch_size=2, num_workers=num_workers)))
    for dtype in DTYPES:
        expected = torch.stack([torch.arange(3).to(dtype), torch.arange(1, 4).to(dtype)])
        assert fingerprint(batch[str(dtype)]) == fingerprint(expected)


@pytest.mark.parametrize("dataset", [Views(4), ChannelsLast(4)], ids=["views", "channels last"])
def test_views_are_collated_with_torchs_strides(loader_class: Loader, dataset: Any) -> None:
    expected = [fingerprint(batch) for batch in STOCK(dataset, batch_size=2, num_workers=2)]
    assert [
        fingerprint(batch) for batch in loader_class(dataset, batch_size=2, num_workers=2)
    ] == expected


class MemoryMapped(Numbers):
    def __init__(self, path: str) -> None:
        super().__init__(4)
        self.rows = np.memmap(path, dtype=np.int32, mode="w+", shape=(4, 3))
        self.rows[:] = np.arange(12).reshape(4, 3)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


@WORKERS
def test_memory_mapped_arrays_are_collated(
    loader_class: Loader, num_workers: int, tmp_path: Path
) -> None:
    dataset = MemoryMapped(str(tmp_path / "rows"))
    batches = list(loader_class(dataset, batch_size=2, num_workers=num_workers))
    assert torch.equal(torch.cat(batches), torch.arange(12, dtype=torch.int32).reshape(4, 3))


def ragged_list(index: int) -> Any:
    return list(range(index + 1))


def strings_array(index: int) -> Any:
    return np.array(["a", "b"])


def objects_array(index: int) -> Any:
    return np.array([object()])


def none(index: int) -> None:
    return None


def an_object(index: int) -> Any:
    return Path("x")


def sparse(index: int) -> Any:
    return torch.eye(3).to_sparse()


def nested(index: int) -> Any:
    return torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)])


def other_keys(index: int) -> Any:
    return {f"key {index}": index}


def longer_and_longer(index: int) -> torch.Tensor:
    return torch.zeros(index + 1)


def shorter_and_shorter(index: int) -> torch.Tensor:
    return torch.zeros(4 - index)


@WORKERS
@pytest.mark.parametrize(
    ("sample", "kind", "text"),
    [
        (ragged_list, RuntimeError, "each element in list of batch should be of equal size"),
        (
            strings_array,
            TypeError,
            "default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists",
        ),
        (
            objects_array,
            TypeError,
            "default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists",
        ),
        (none, TypeError, "found <class 'NoneType'>"),
        (an_object, TypeError, "default_collate: batch must contain"),
        (sparse, RuntimeError, "not currently supported by the default collate_fn"),
        (nested, RuntimeError, "not currently supported by the default collate_fn"),
        (other_keys, KeyError, "key 0"),
        (
            longer_and_longer,
            RuntimeError,
            "stack expects each tensor to be equal size, but got [1] at entry 0 and [2]",
        ),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Sparse")
def test_what_default_collation_refuses_it_refuses_in_the_same_words(
    loader_class: Loader, num_workers: int, sample: Any, kind: type[Exception], text: str
) -> None:
    error = error_of_next(
        iter(loader_class(Calls(4, sample), batch_size=2, num_workers=num_workers))
    )
    assert type(error) is kind
    assert text in str(error)


def test_ragged_samples_are_told_apart_from_storage_that_cannot_grow(
    holdfast_class: Loader,
) -> None:
    """torch says "Trying to resize storage that is not resizable" when the first sample is the
    longest."""
    error = error_of_next(
        iter(holdfast_class(Calls(4, shorter_and_shorter), batch_size=2, num_workers=2))
    )
    assert type(error) is RuntimeError
    assert (
        "stack expects each tensor to be equal size, but got [4] at entry 0 and [3] at entry 1"
        in str(error)
    )


def private_variable_is_set(index: int) -> bool:
    info = torch.utils.data.get_worker_info()
    return torchs_worker._worker_info is not None and torchs_worker._worker_info is info


def test_the_private_variable_of_torchs_worker_module_is_set_in_workers(
    loader_class: Loader,
) -> None:
    """default_collate itself, and other libraries, look at it."""
    assert torchs_worker._worker_info is None
    assert (
        list(loader_class(Calls(4, private_variable_is_set), batch_size=None, num_workers=2))
        == [True] * 4
    )
    assert torchs_worker._worker_info is None


def collate_and_look(samples: list[Any]) -> Any:
    collated = default_collate(samples)
    return collated, collated * 2, collated.is_contiguous()


def test_a_collate_fn_may_call_default_collate_and_use_the_result(loader_class: Loader) -> None:
    loader = loader_class(
        Calls(4, SAMPLES["tensor"]), batch_size=2, num_workers=2, collate_fn=collate_and_look
    )
    for start, (one, two, contiguous) in zip((0, 2), loader, strict=True):
        expected = torch.stack([torch.full((2, 3), float(i)) for i in (start, start + 1)])
        assert torch.equal(one, expected)
        assert torch.equal(two, 2 * expected)
        assert contiguous


class Tagged:
    """Registered with torch's collate function map by a user."""

    def __init__(self, tag: int) -> None:
        self.tag = tag


def collate_tagged(batch: list[Tagged], *, collate_fn_map: Any = None) -> str:
    return "+".join(str(each.tag) for each in batch)


def test_a_type_registered_with_torchs_collate_map_is_collated_in_workers(
    loader_class: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.data._utils.collate import default_collate_fn_map

    monkeypatch.setitem(default_collate_fn_map, Tagged, collate_tagged)
    loader = loader_class(Calls(4, Tagged), batch_size=2, num_workers=2)
    assert list(loader) == ["0+1", "2+3"]


def test_a_registered_collation_of_tensors_is_honoured(
    loader_class: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader that writes batches by itself must not overlook it."""
    from torch.utils.data._utils.collate import default_collate_fn_map

    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, _sum_up)
    loader = loader_class(Calls(4, SAMPLES["tensor"]), batch_size=2, num_workers=2)
    assert [batch.sum().item() for batch in loader] == [6.0, 30.0]


def _sum_up(batch: list[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
    return torch.stack(batch).sum(0)


@pytest.mark.parametrize("kind", [torch.Tensor, np.ndarray])
def test_a_registered_collation_gets_the_samples_themselves(
    loader_class: Loader, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not parts of a batch that a loader has begun to put together."""
    from torch.utils.data._utils.collate import default_collate_fn_map

    monkeypatch.setitem(default_collate_fn_map, kind, _whose_memory)
    loader = loader_class(Calls(4, LARGE[kind]), batch_size=2, num_workers=1)
    assert list(loader) == [[True, True], [True, True]]


LARGE: dict[Any, Any] = {
    torch.Tensor: lambda index: torch.full((1 << 18,), float(index)),
    np.ndarray: lambda index: np.full(1 << 18, float(index)),
}


def _whose_memory(batch: list[Any], *, collate_fn_map: Any = None) -> list[bool]:
    if isinstance(batch[0], np.ndarray):
        return [one.base is None for one in batch]
    return [one.untyped_storage().nbytes() == one.nbytes for one in batch]
