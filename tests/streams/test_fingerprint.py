"""Eight bytes that stand for a batch: the same in every process, another for other samples."""

from __future__ import annotations

import dataclasses
import datetime
import os
import pathlib
import subprocess
import sys
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from holdfast.engine.fingerprint import fingerprint, fingerprint_of_error

Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Record:
    name: str
    values: Any


@dataclasses.dataclass(slots=True)
class Slotted:
    number: int


class Unknown:
    def __init__(self, secret: Any) -> None:
        self.secret = secret


class Hostile(dict):  # type: ignore[type-arg]
    """Runs when it is asked anything."""

    def __len__(self) -> int:
        raise AssertionError("the user's own code")

    __iter__ = items = keys = __getitem__ = __len__  # type: ignore[assignment]


class HostileSet(set):  # type: ignore[type-arg]
    def __len__(self) -> int:
        raise AssertionError("the user's own code")

    __iter__ = __contains__ = __len__  # type: ignore[assignment]


class HostileFrozenSet(frozenset):  # type: ignore[type-arg]
    __len__ = __iter__ = HostileSet.__len__  # type: ignore[assignment]


class Marked(torch.Tensor):
    pass


def picture(shade: int) -> Any:
    return Image.new("RGB", (40, 30), (shade, 1, 2))


def filled(*shape: int, by: int = 0) -> torch.Tensor:
    return (torch.arange(int(np.prod(shape))).reshape(shape) * 7 + by).float()


# For each, how it is made of a number: another number, another fingerprint.
VALUES: dict[str, Callable[[int], Any]] = {
    "int": lambda n: n,
    "a large int": lambda n: (1 << 90) + n,
    "bool": lambda n: n == 1,
    "float": lambda n: n / 3,
    "complex": lambda n: complex(n, 1),
    "text": lambda n: f"été {n} \ud800",
    "a long text": lambda n: "x" * 10_000 + str(n),
    "bytes": lambda n: bytes([n]) * 3,
    "bytearray": lambda n: bytearray([n]),
    "list": lambda n: [n, None],
    "tuple": lambda n: (n, ()),
    "its length": lambda n: [0] * (100 + n),
    "dict": lambda n: {"a": n},
    "key": lambda n: {f"a{n}": 1},
    "order of keys": lambda n: OrderedDict([("a", 1), ("b", 1)][:: 1 if n else -1]),
    "set": lambda n: {"one", "two", "three", f"a{n}"},
    "named tuple": lambda n: Point(1, n),
    "dataclass": lambda n: Record("a", [n]),
    "dataclass with slots": lambda n: Slotted(n),
    "UserDict": lambda n: UserDict({"a": torch.tensor(n)}),
    "date": lambda n: datetime.datetime(2026, 1, 1 + n),
    "path": lambda n: pathlib.PurePosixPath(f"a/{n}"),
    "array": lambda n: np.full((3, 4), n),
    "array of objects": lambda n: np.array(["a", n], dtype=object),
    "structured array": lambda n: np.array([(n, 0.5)], dtype=[("a", "i4"), ("b", "f8")]),
    "scalar of NumPy": lambda n: np.float32(n),
    "datetime64": lambda n: np.datetime64("2026-01-01") + n,
    "tensor": lambda n: filled(3, by=n),
    "dtype": lambda n: torch.zeros(4, dtype=torch.int32 if n else torch.float32),
    "shape": lambda n: torch.zeros(2, 6) if n else torch.zeros(3, 4),
    "bfloat16": lambda n: filled(64, 64, by=n).bfloat16(),
    "float8": lambda n: torch.full((8,), float(n)).to(torch.float8_e4m3fn),
    "bool tensor": lambda n: torch.tensor([bool(n)]),
    "subclass of tensor": lambda n: filled(4, by=n).as_subclass(Marked),
    "requires grad": lambda n: torch.full((3,), float(n), requires_grad=True),
    "conjugate": lambda n: torch.full((3,), complex(1, n)).conj(),
    "large": lambda n: filled(16, 3, 64, 64, by=n),
    "large array": lambda n: filled(64, 1000, by=n).numpy(),
    "transposed": lambda n: filled(16, 64, 64, by=n).permute(0, 2, 1),
    "strided": lambda n: filled(64, 256, by=n)[::2, ::3],
    "one row of many": lambda n: filled(200, 1000).index_add(
        0, torch.tensor([77]), torch.full((1, 1000), float(n))
    ),
    "two rows changed places": lambda n: filled(64, 3000)[
        torch.tensor([n if one == 1 else 1 if one == n else one for one in range(64)])
    ],
    "expanded": lambda n: torch.tensor([float(n)]).expand(5000, 2),
    "picture": picture,
}


EITHER = {"bool", "shape", "bool tensor", "dtype", "order of keys"}  # there is no third


@pytest.mark.parametrize("name", VALUES)
def test_it_is_the_same_for_the_same_and_another_for_another(name: str) -> None:
    make = VALUES[name]
    assert fingerprint(make(1)) == fingerprint(make(1))
    assert fingerprint(make(1)) != fingerprint(make(0 if name in EITHER else 2))
    assert 1 < fingerprint(make(1)) < 1 << 64


ODD: dict[str, Any] = {
    "nothing": None,
    "empty": [],
    "no rows": torch.empty(0, 5),
    "zero-dim": torch.tensor(3),
    "sparse": torch.eye(3).to_sparse(),
    "meta": torch.empty(3, device="meta"),
    "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "deep": [[[[[[[[[[[[[[1]]]]]]]]]]]]]],
    "wide": {str(number): torch.rand(3) for number in range(1000)},
    "hostile": Hostile(a=1),
    "no picture": Image.new("L", (0, 0)),
    "many in a set": set(map(str, range(1000))),
    "NaN": float("nan"),
}


@pytest.mark.parametrize("name", ODD)
def test_whatever_a_batch_is_it_has_one(name: str) -> None:
    assert fingerprint(ODD[name]) == fingerprint(ODD[name])


def test_of_what_is_not_known_only_the_type_counts() -> None:
    assert fingerprint(Unknown(1)) == fingerprint(Unknown(object()))
    assert fingerprint([Unknown(1)]) != fingerprint([object()])


@pytest.mark.parametrize("kind", [HostileSet, HostileFrozenSet])
def test_a_set_is_not_asked_by_methods_of_its_own(kind: Any) -> None:
    assert fingerprint(kind([1, 2])) == fingerprint(kind([2, 1]))
    assert fingerprint(kind([1, 2])) != fingerprint(kind([1, 3]))


def test_an_error_is_known_by_its_type_and_not_by_its_text() -> None:
    assert fingerprint_of_error(ValueError("at 0x7f1")) == fingerprint_of_error(ValueError("0x7f2"))
    assert fingerprint_of_error(ValueError()) != fingerprint_of_error(KeyError())


def test_it_is_the_same_in_another_process_with_other_hashes() -> None:
    script = (
        "from tests.streams.test_fingerprint import VALUES, fingerprint;"
        "print([fingerprint(make(1)) for make in VALUES.values()])"
    )
    made = subprocess.run(
        [sys.executable, "-c", script],
        env={
            **os.environ,
            "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2",
        },
        capture_output=True,
        check=True,
        text=True,
        timeout=100,
    )
    assert made.stdout.strip() == str([fingerprint(make(1)) for make in VALUES.values()])
