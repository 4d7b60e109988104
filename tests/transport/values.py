"""One of each kind of value that a dataset may give, made afresh at every call, small and large.

Large values go through the arena, small ones through the frame; both ways must give back what went in. Everything is
at module level so that it pickles by reference.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

SMALL, LARGE = 7, 30_011  # elements: odd, so that nothing is aligned by accident

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint16, torch.uint32, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex32, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
]  # fmt: skip
if hasattr(torch, "float8_e8m0fnu"):  # torch 2.7 and later
    DTYPES.append(torch.float8_e8m0fnu)


def of_dtype(dtype: torch.dtype, elements: int) -> torch.Tensor:
    raw = torch.arange(elements * dtype.itemsize) % 97
    if dtype is torch.bool:
        return raw % 2 == 0
    return raw.to(torch.uint8).view(dtype)


class Subclass(torch.Tensor):
    """Carries an attribute."""


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    image: torch.Tensor
    name: str
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    data: np.ndarray[Any, Any]
    key: tuple[int, ...]


class User:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.itself = "x"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, User) and torch.equal(self.tensor, other.tensor)

    __hash__ = None  # type: ignore[assignment]


class Slotted:
    __slots__ = ("array", "number")

    def __init__(self, array: Any, number: int) -> None:
        self.array = array
        self.number = number


class Colour(enum.Enum):
    RED = 1
    GREEN = 2


class Words(dict[str, Any]):
    """A user's own mapping."""


def _subclass(elements: int) -> torch.Tensor:
    made = torch.arange(elements, dtype=torch.float32).as_subclass(Subclass)
    made.origin = "camera"  # type: ignore[attr-defined]
    return made


def _parameter(elements: int) -> torch.Tensor:
    return torch.nn.Parameter(torch.arange(elements, dtype=torch.float32))


def _sparse_coo(elements: int) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        torch.stack([torch.arange(elements), torch.arange(elements)]),
        torch.ones(elements),
        (elements, elements),
    )


def _sparse_csr(elements: int) -> torch.Tensor:
    return torch.sparse_csr_tensor(
        torch.arange(elements + 1),
        torch.arange(elements),
        torch.rand(elements, generator=_generator()),
        (elements,) * 2,
    )


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _structured(elements: int) -> Any:
    made = np.zeros(elements, dtype=[("x", "<i4"), ("y", ">f8", (2,)), ("name", "U5")])
    made["x"] = np.arange(elements)
    made["name"] = "abc"
    return made


def _deep(elements: int) -> Any:
    made: Any = torch.arange(elements)
    for level in range(40):
        made = [made] if level % 3 else {"level": level, "inner": (made, None)}
    return made


def _ordered(elements: int) -> Any:
    return collections.OrderedDict(b=torch.arange(elements), a=[1, "x"])


def _image(elements: int) -> Any:
    side = max(2, int(elements**0.5))
    return Image.fromarray(
        (np.arange(side * side * 3) % 251).astype(np.uint8).reshape(side, side, 3), "RGB"
    )


VALUES: dict[str, Callable[[int], Any]] = {
    **{f"{dtype}": (lambda n, dtype=dtype: of_dtype(dtype, n)) for dtype in DTYPES},
    "0-d tensor": lambda n: torch.tensor(n + 0.5),
    "zero-size tensor": lambda n: torch.empty(0, n, dtype=torch.int16),
    "zero-size 1-d tensor": lambda n: torch.empty(0),
    "transposed": lambda n: torch.arange(3 * n).reshape(3, n).t(),
    "every other element": lambda n: torch.arange(2 * n)[::2],
    "with an offset": lambda n: torch.arange(n + 5)[5:],
    "channels last": lambda n: torch.arange(3 * 4 * n).reshape(1, 3, 4, n).to(memory_format=torch.channels_last),
    "expanded": lambda n: torch.arange(n).unsqueeze(1).expand(n, 50),
    "expanded scalar": lambda n: torch.tensor(3.0).expand(n),
    "conjugate view": lambda n: torch.arange(n).to(torch.complex64).conj(),
    "negative view": lambda n: torch.arange(n).to(torch.complex64).conj().imag,
    "requires_grad": lambda n: torch.arange(n, dtype=torch.float32).requires_grad_(),
    "parameter": _parameter,
    "frozen parameter": lambda n: torch.nn.Parameter(torch.ones(n), requires_grad=False),
    "subclass": _subclass,
    "sparse coo": _sparse_coo,
    "coalesced coo": lambda n: _sparse_coo(n).coalesce(),
    "sparse csr": _sparse_csr,
    "sparse csc": lambda n: _sparse_csr(n).to_sparse_csc(),
    "nested": lambda n: torch.nested.nested_tensor([torch.ones(2, n), torch.zeros(3, n)]),
    "nested, jagged": lambda n: torch.nested.nested_tensor([torch.ones(2, n), torch.zeros(3, n)], layout=torch.jagged),
    "array": lambda n: np.arange(n, dtype=np.float32),
    "Fortran array": lambda n: np.asfortranarray(np.arange(3 * n).reshape(3, n)),
    "strided array": lambda n: np.arange(3 * n)[::3],
    "reversed array": lambda n: np.arange(n)[::-1],
    "structured array": _structured,
    "record array": lambda n: np.rec.fromarrays([np.arange(n), np.ones(n)], names="a,b"),
    "object array": lambda n: np.array([None, "x", 3] * (n // 3 + 1), dtype=object),
    "datetime array": lambda n: np.arange(n).astype("datetime64[s]"),
    "timedelta array": lambda n: np.arange(n).astype("timedelta64[ns]"),
    "bool array": lambda n: np.arange(n) % 2 == 0,
    "complex array": lambda n: np.arange(n) * 1j,
    "big-endian array": lambda n: np.arange(n).astype(">i4"),
    "string array": lambda n: np.array([f"{i}é" for i in range(n)]),
    "bytes array": lambda n: np.array([b"%d" % i for i in range(n)]),
    "float16 array": lambda n: np.arange(n, dtype=np.float16),
    "long double array": lambda n: np.arange(n, dtype=np.longdouble),
    "masked array": lambda n: np.ma.masked_array(np.arange(n), mask=np.arange(n) % 2 == 0),
    "0-d array": lambda n: np.array(2.5),
    "empty array": lambda n: np.empty((0, n)),
    "read-only bytes": lambda n: bytes(range(256)) * (n // 256 + 1),
    "bytearray": lambda n: bytearray(n),
    "str": lambda n: "äöü€🙂" * n,
    "lone surrogate": lambda n: "\udcff" * n,
    "int": lambda n: 10**n if n < 1000 else 1 << n,
    "negative": lambda n: -n,
    "float": lambda n: [0.1, float("inf"), float("nan"), -0.0],
    "complex": lambda n: 1 + 2j,
    "None": lambda n: None,
    "bools": lambda n: [True, False],
    "Ellipsis": lambda n: ...,
    "NumPy scalars": lambda n: [np.float32(1.5), np.int64(3), np.bool_(True), np.datetime64("2020-01-01"), np.str_("x")],
    "dtype and device": lambda n: [torch.float32, torch.device("cpu"), torch.Size([1, 2]), np.dtype("f4")],
    "image": _image,
    "dataclass": lambda n: Record(torch.arange(n), "a", {"k": [1]}),
    "frozen dataclass": lambda n: Frozen(np.arange(n), (1, 2)),
    "namedtuple": lambda n: Pair(torch.arange(n), Pair("x", None)),
    "defaultdict": lambda n: collections.defaultdict(list, a=[torch.arange(n)]),
    "OrderedDict": _ordered,
    "Counter": lambda n: collections.Counter("abca"),
    "deque": lambda n: collections.deque([torch.arange(n)], maxlen=3),
    "user's mapping": lambda n: Words(a=torch.arange(n)),
    "user class": lambda n: User(torch.arange(n)),
    "slotted class": lambda n: Slotted(np.arange(n), 3),
    "enum": lambda n: Colour.GREEN,
    "sets": lambda n: [{1, 2}, frozenset("ab")],
    "date, path, uuid": lambda n: [
        datetime.datetime(2020, 1, 1), pathlib.PurePosixPath("a/b"), uuid.UUID(int=5),
        decimal.Decimal("1.10"), fractions.Fraction(1, 3), slice(1, 2), range(n),
    ],
    "deep nesting": _deep,
    "many tensors": lambda n: [torch.full((i % 50,), i) for i in range(min(n, 3000))],
    "empty containers": lambda n: [[], (), {}, set(), "", b""],
    "mixture": lambda n: {"image": torch.rand(3, n, generator=_generator()), "label": 3, "meta": ("x", None, [np.arange(n)])},
}  # fmt: skip
