"""Whatever a worker gives comes out as it went in, through real processes, as it would through torch's."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, default_collate

from holdfast import DataLoader
from tests.support.fingerprint import fingerprint
from tests.transport.values import DTYPES, LARGE, SMALL, VALUES, Frozen, Slotted, of_dtype

pytestmark = pytest.mark.timeout(120, method="thread")

SIZES = {"small": SMALL, "large": LARGE}


def describe(value: Any) -> Any:
    """`fingerprint`, and what it does not look at."""
    if isinstance(value, Slotted):
        return "slotted", fingerprint(value.array), value.number
    if isinstance(value, Frozen):
        return "frozen", fingerprint(value.data), value.key
    if isinstance(value, torch.Tensor) and value.is_nested:
        return (
            type(value),
            str(value.layout),
            value.requires_grad,
            [fingerprint(part) for part in value.unbind()],
        )
    if isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo:
        parts = [fingerprint(value._indices()), fingerprint(value._values())]
        return type(value), value.is_coalesced(), value.shape, value.requires_grad, parts
    if isinstance(value, torch.Tensor) and value.layout in (torch.sparse_csr, torch.sparse_csc):
        if value.layout is torch.sparse_csr:
            indices = [value.crow_indices(), value.col_indices()]
        else:
            indices = [value.ccol_indices(), value.row_indices()]
        parts = [fingerprint(part) for part in (*indices, value.values())]
        return type(value), str(value.layout), value.shape, value.requires_grad, parts
    if isinstance(value, np.ndarray) and value.dtype == np.longdouble:
        return value.shape, value.tolist()  # its elements have padding, which holds anything
    if isinstance(value, enum.Enum):
        return value
    if isinstance(value, np.ma.MaskedArray):
        return type(value), fingerprint(value.data), fingerprint(value.mask)
    if hasattr(value, "tobytes") and hasattr(value, "mode"):
        return type(value).__name__, value.mode, value.size, value.tobytes()
    if type(value) is torch.Tensor and value.layout is torch.strided:
        value = (
            value.resolve_conj().resolve_neg()
        )  # lazily negated or not is no property of its own
    return fingerprint(value), getattr(value, "__dict__", {}).get("origin")


class Values(Dataset[Any]):
    """All kinds of values, one after the other."""

    def __init__(self, names: list[str], elements: int) -> None:
        self.names = names
        self.elements = elements

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Any:
        return VALUES[self.names[index]](self.elements)


def as_it_is(sample: Any) -> Any:
    return sample


def as_they_are(samples: list[Any]) -> Any:
    return samples


def first_only(samples: list[Any]) -> Any:
    return samples[0]


WAYS = {
    "without a batch": {"batch_size": None, "collate_fn": as_it_is},
    "alone in its batch": {"batch_size": 1, "collate_fn": first_only},
    "in a list of several": {"batch_size": 4, "collate_fn": as_they_are},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", SIZES)
def test_every_kind_of_value_comes_out_as_it_went_in(size: str, way: str) -> None:
    names = list(VALUES)
    elements = SIZES[size]
    with DataLoader(Values(names, elements), num_workers=2, **WAYS[way]) as loader:
        if WAYS[way]["batch_size"] == 4:
            arrived = [value for batch in loader for value in batch]
        else:
            arrived = list(loader)
    assert len(arrived) == len(names)
    wrong = {}
    for name, value in zip(names, arrived, strict=True):
        expected = describe(VALUES[name](elements))
        if describe(value) != expected:
            wrong[name] = f"{str(expected)[:300]} became {str(describe(value))[:300]}"
    assert not wrong


COLLATABLE = [*map(str, DTYPES), "0-d tensor", "transposed", "every other element", "with an offset", "expanded",
              "zero-size tensor", "array", "strided array", "bool array", "complex array", "Fortran array",
              "float16 array", "negative", "subclass"]  # fmt: skip


class Repeated(Dataset[Any]):
    """Four samples of each kind, so that each batch of four is of one kind."""

    def __init__(self, names: list[str], elements: int) -> None:
        self.names = names
        self.elements = elements

    def __len__(self) -> int:
        return 4 * len(self.names)

    def __getitem__(self, index: int) -> Any:
        return VALUES[self.names[index // 4]](self.elements)


def wrapped(samples: list[Any]) -> Any:
    """A custom collate function that calls the default one."""
    return {"wrapped": default_collate(samples), "count": len(samples)}


@pytest.mark.parametrize(
    "collate", [None, wrapped], ids=["default", "custom that calls the default"]
)
@pytest.mark.parametrize("size", SIZES)
def test_collated_batches_are_those_of_default_collate_in_this_process(
    size: str, collate: Any
) -> None:
    names = COLLATABLE.copy()
    names.remove(str(torch.complex32))  # torch cannot stack it
    dataset = Repeated(names, SIZES[size])
    with DataLoader(dataset, batch_size=4, num_workers=2, collate_fn=collate) as loader:
        arrived = list(loader)
    wrong = {}
    for number, name in enumerate(names):
        samples = [dataset[4 * number + row] for row in range(4)]
        expected = (collate or default_collate)(samples)
        if fingerprint(arrived[number]) != fingerprint(expected):
            wrong[name] = (
                f"{str(fingerprint(expected))[:300]} became {str(fingerprint(arrived[number]))[:300]}"
            )
    assert not wrong


class Sharing(Dataset[Any]):
    """A base tensor, two views that overlap, the base again, and a stranger with equal content."""

    def __init__(self, elements: int) -> None:
        self.elements = elements

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        base = torch.arange(self.elements)
        return {
            "base": base,
            "head": base[:5],
            "tail": base[2:],
            "again": base,
            "other": base.clone(),
        }


@pytest.mark.parametrize("size", SIZES)
def test_tensors_that_share_memory_in_a_batch_share_it_afterwards_and_others_do_not(
    size: str,
) -> None:
    with DataLoader(
        Sharing(SIZES[size]), batch_size=None, collate_fn=as_it_is, num_workers=1
    ) as loader:
        batches = list(loader)
    for batch in batches:
        batch["base"][3] = -1
        assert batch["head"][3] == batch["tail"][1] == batch["again"][3] == -1
        assert batch["again"] is batch["base"]
        assert batch["other"][3] == 3
        batch["base"][3] = 3
    batches[0]["base"].fill_(7)
    assert batches[1]["base"][3] == 3


@pytest.mark.parametrize("size", SIZES)
def test_arrays_are_writable_and_keep_their_own_memory(size: str) -> None:
    names = ["array", "Fortran array", "structured array", "datetime array", "bytearray"]
    with DataLoader(
        Values(names, SIZES[size]), batch_size=None, collate_fn=as_it_is, num_workers=1
    ) as loader:
        for value in loader:
            if isinstance(value, np.ndarray):
                assert value.flags.writeable
                value[...] = value[::-1].copy()
            else:
                value[0] = 7


@pytest.mark.parametrize("size", SIZES)
def test_a_tensor_that_arrives_can_be_trained_resized_and_viewed_like_any_other(size: str) -> None:
    with DataLoader(
        Values(["torch.float32", "requires_grad", "parameter"], SIZES[size]),
        batch_size=None,
        collate_fn=as_it_is,
        num_workers=1,
    ) as loader:
        plain, grad, parameter = loader
    assert plain.is_leaf
    assert plain._base is None  # no view of something hidden
    assert plain.untyped_storage().nbytes() == plain.nbytes
    plain.requires_grad_()
    (plain * 2).sum().backward()
    assert plain.grad is not None
    (grad.sum() + parameter.sum()).backward()
    assert torch.equal(grad.grad, torch.ones_like(grad))
    assert torch.equal(parameter.grad, torch.ones_like(parameter))
    grown = plain.detach().clone().resize_(SIZES[size] * 2)
    assert grown.shape == (SIZES[size] * 2,)


@pytest.mark.parametrize("size", SIZES)
def test_every_dtype_keeps_its_bits_without_a_batch(size: str) -> None:
    class Bits(Dataset[Any]):
        def __len__(self) -> int:
            return len(DTYPES)

        def __getitem__(self, index: int) -> Any:
            return of_dtype(DTYPES[index], SIZES[size])

    with DataLoader(Bits(), batch_size=None, num_workers=2) as loader:
        for dtype, tensor in zip(DTYPES, loader, strict=True):
            assert tensor.dtype is dtype
            assert torch.equal(
                tensor.view(torch.uint8), of_dtype(dtype, SIZES[size]).view(torch.uint8)
            )
