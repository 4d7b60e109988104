"""Eight bytes that stand for a batch: the same in every process, another for other samples."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import os
import pathlib
import random
import re
import subprocess
import sys
from array import array as Array
from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from holdfast.worker.batch_fingerprint import (
    DROPPED_BATCH,
    NO_BATCH,
    fingerprint,
    fingerprint_of_error,
    unseen,
)

Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Record:
    name: str
    values: Any


@dataclasses.dataclass(slots=True)
class Slotted:
    number: int


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value


class Pupil:
    __slots__ = ("__weakref__", "value")

    def __init__(self, value: Any) -> None:
        self.value = value


class Resisting(Plain):
    """Runs when it is asked anything."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError("the user's own code")

    __eq__ = __hash__ = __repr__ = __reduce__ = __getattribute__  # type: ignore[assignment]


class Seeded(random.Random):
    pass


class Day(datetime.date):
    pass


class Colour(enum.Enum):
    RED = 1
    GREEN = 2
    BLUE = 3


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
    "object": lambda n: [Plain("a"), Plain(n)],
    "object with slots": lambda n: Pupil(n),
    "object in an object": lambda n: Plain(Plain(torch.tensor(n))),
    "enum": lambda n: list(Colour)[n],
    "class": lambda n: [int, float, str][n],
    "deque": lambda n: deque([n]),
    "array of Python": lambda n: Array("i", [n]),
    "memoryview": lambda n: memoryview(bytes([n])),
    "pattern": lambda n: re.compile(f"a{n}"),
    "subclass of date": lambda n: Day(2026, 1, 1 + n),
    "array of texts": lambda n: np.array(["a", f"b{n}"]),
    "many texts": lambda n: np.array([f"{n} {one}" for one in range(50_000)]),
    "middle of a text": lambda n: "x" * 20_000 + str(n) + "y" * 30_000,
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


NOT_TO_BE_SEEN: dict[str, Any] = {
    "extension type": lambda: re.finditer("a", "b"),
    "inside an object": lambda: Plain(iter([1])),
    "inside a set": lambda: {1, Pupil(random.Random(3))},
    "a class on top of an extension type": lambda: Seeded(1),
    "a large set": lambda: set(map(str, range(1000))),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.empty(3, device="meta"),
    "a structured array of objects": lambda: np.zeros(2, dtype=[("a", "O")]),
    "too deep": lambda: [[[[[[[[[[[[[[1]]]]]]]]]]]]]],
}


@pytest.mark.parametrize("name", NOT_TO_BE_SEEN)
def test_it_says_that_something_could_not_be_looked_at(name: str) -> None:
    make = NOT_TO_BE_SEEN[name]
    assert unseen([fingerprint(make())]) == 1
    assert fingerprint(make()) == fingerprint(make())


@pytest.mark.parametrize("name", VALUES)
def test_it_does_not_say_so_of_what_it_has_looked_at(name: str) -> None:
    assert unseen([fingerprint(VALUES[name](1)), NO_BATCH, DROPPED_BATCH]) == 0


def test_objects_that_hold_each_other_and_that_resist_are_looked_into() -> None:
    parent = Plain(1)
    parent.child = Plain(parent)  # type: ignore[attr-defined]
    assert unseen([fingerprint(parent)]) == 0
    assert fingerprint(Resisting(1)) != fingerprint(Resisting(2))
    assert fingerprint([Plain(1)]) != fingerprint([object()])


def test_a_row_of_a_picture_that_is_set_is_seen() -> None:
    def row(at: int) -> torch.Tensor:
        made = torch.zeros(3, 224, 224)
        made[:, at] = 1
        return made

    assert len({fingerprint(row(at)) for at in range(224)}) == 224
    assert len({fingerprint(row(at).byte()) for at in range(224)}) == 224


def test_one_byte_of_64_KiB_is_seen() -> None:
    made = torch.zeros(1 << 16, dtype=torch.uint8)
    before = fingerprint(made)
    made[40_001] = 1
    assert fingerprint(made) != before
    words = np.array([""] * 5000 + ["a"] + [""] * 5000)
    assert fingerprint(words) != fingerprint(np.roll(words, 1))


def test_memory_that_is_not_aligned_gives_the_same() -> None:
    memory = torch.randint(0, 255, (200_003,), dtype=torch.uint8)
    assert fingerprint(memory[3:]) == fingerprint(memory[3:].clone())


@pytest.mark.parametrize("kind", [HostileSet, HostileFrozenSet])
def test_a_set_is_not_asked_by_methods_of_its_own(kind: Any) -> None:
    assert fingerprint(kind([1, 2])) == fingerprint(kind([2, 1]))
    assert fingerprint(kind([1, 2])) != fingerprint(kind([1, 3]))


def test_an_error_is_known_by_its_type_and_not_by_its_text() -> None:
    assert fingerprint_of_error(ValueError("at 0x7f1")) == fingerprint_of_error(ValueError("0x7f2"))
    assert fingerprint_of_error(ValueError()) != fingerprint_of_error(KeyError())


@pytest.mark.slow
def test_it_is_the_same_in_another_process_with_other_hashes() -> None:
    script = (
        "from tests.worker.test_batch_fingerprint import VALUES, fingerprint;"
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
