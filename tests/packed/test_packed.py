"""Packed containers behave as the containers they replace, and stay one copy."""

from __future__ import annotations

import collections
import copy
import enum
import math
import multiprocessing
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast import PackedDict, PackedList, PackedStrings
from holdfast.packed.pack import _same
from tests.support import warm
from tests.support.processes import open_files


class Colour(enum.Enum):
    RED = 1


class Point(collections.namedtuple("Point", "x y")):
    __slots__ = ()


Pair = collections.namedtuple("Pair", "left right")

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=8)
    | st.binary(max_size=8)
    | st.builds(np.int32, st.integers(-5, 5))
    | st.builds(Path, st.sampled_from(["a", "/b/c.jpg"]))
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.lists(values, max_size=30))
def test_everything_comes_out_equal_and_of_the_same_type(items: list[Any]) -> None:
    packed = PackedList(items)
    assert _same(list(packed), items)
    assert _same([packed[at] for at in range(-len(items), 0)], items)
    assert _same(list(pickle.loads(pickle.dumps(packed, 5))), items)


@given(st.lists(st.lists(scalars, min_size=2, max_size=2).map(tuple), min_size=1, max_size=50))
def test_rows_of_one_width_come_out_equal(rows: list[Any]) -> None:
    assert _same(list(PackedList(rows)), rows)


@given(
    st.lists(st.integers(0, 5), max_size=30),
    st.slices(30),
    st.integers(-35, 35),
)
def test_positions_are_those_of_a_list(items: list[int], part: slice, at: int) -> None:
    packed = PackedList(items)
    assert packed[part] == items[part]
    assert list(reversed(packed[part])) == list(reversed(items[part]))
    assert packed.count(3) == items.count(3)
    assert (3 in packed) == (3 in items)
    for read in (lambda some: some[at], lambda some: some.index(at)):
        try:
            expected = read(items)
        except (IndexError, ValueError) as error:
            with pytest.raises(type(error)):
                read(packed)
        else:
            assert read(packed) == expected


UNUSUAL = {
    "arrays": [np.arange(n, dtype=np.float32).reshape(1, n) for n in range(5)],
    "equal shapes": [np.full((2, 3), n) for n in range(5)],
    "bool arrays": [np.array([True, False])] * 3,
    "array of objects": [np.array([{}, None], object)],
    "fortran order": [np.asfortranarray(np.arange(6).reshape(2, 3))],
    "dates": [np.datetime64("2024-01-01"), np.array(["2024-01-01"], "M8[D]")],
    "big-endian": [np.arange(3, dtype=">i4")],
    "tensors": [torch.arange(n) for n in range(4)] + [torch.tensor(1.5)],
    "bfloat16": [torch.ones(2, dtype=torch.bfloat16)],
    "named tuples": [Pair(1, "a"), Pair(2, "b")],
    "subclasses": [Point(1, 2), collections.OrderedDict(a=1), collections.Counter("ab")],
    "sets": [{1, 2}, frozenset("ab")],
    "enums": [Colour.RED] * 5,
    "huge numbers": [1 << 63, -(1 << 63), (1 << 63) - 1, 1 << 200, -1],
    "signs and nothing": [0.0, -0.0, math.inf, math.nan],
    "lone surrogates": ["a\udcffb", "ä", "", "\0"],
    "many shapes of dicts": [{f"key{n}": n, "x": None} for n in range(40)],
    "wide dicts": [{str(n): n for n in range(100)}] * 2,
    "ragged": [[1.5] * n for n in range(20)],
    "empty things": [(), [], {}, "", b""],
    "deep": [[[[[[[[[[[[[1]]]]]]]]]]]]],
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_values_come_out_equal(name: str) -> None:
    items = UNUSUAL[name]
    packed = PackedList(items)
    for one, other in zip(packed, items, strict=True):
        assert _same(one, other) or (one is other)
    if name != "sets":  # whose order is not theirs
        assert [repr(one) for one in packed[::-1]] == [repr(one) for one in items[::-1]]


def test_a_list_that_contains_itself_is_not_followed_for_ever() -> None:
    endless: list[Any] = [1]
    endless.append(endless)
    assert PackedList([endless])[0][1][1][0] == 1


def test_what_was_given_out_is_the_readers_own() -> None:
    packed = PackedList([{"boxes": [1, 2], "mask": np.zeros(3)}] * 10)
    packed[0]["boxes"].append(3)
    packed[0]["mask"][:] = 1
    assert packed[0]["boxes"] == [1, 2]
    assert packed[0]["mask"].sum() == 0


CHANGES = {
    "item": lambda some: some.__setitem__(0, 1),
    "deletion": lambda some: some.__delitem__(0),
    "append": lambda some: some.append(1),
    "extend": lambda some: some.extend([1]),
    "insert": lambda some: some.insert(0, 1),
    "pop": lambda some: some.pop(),
    "remove": lambda some: some.remove(1),
    "sort": lambda some: some.sort(),
    "reverse": lambda some: some.reverse(),
    "clear": lambda some: some.clear(),
    "+=": lambda some: some.__iadd__([1]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_refused_with_the_way_out(change: str) -> None:
    packed = PackedList([1, 2, 3])
    with pytest.raises(TypeError, match=r"read-only.*PackedList\(list\(packed\)\)"):
        CHANGES[change](packed)
    assert packed == [1, 2, 3]


def test_a_packed_dict_refuses_changes() -> None:
    packed = PackedDict({"a": 1})
    for change in (
        lambda: packed.update(b=1),  # type: ignore[attr-defined]
        lambda: packed.setdefault("a", 1),  # type: ignore[attr-defined]
        lambda: packed.pop("a"),
        lambda: packed.__setitem__("a", 2),
    ):
        with pytest.raises(TypeError, match="read-only"):
            change()


def test_comparison_addition_and_copies() -> None:
    packed = PackedList([1, 2])
    assert packed == [1, 2]
    assert packed == [1, 2]
    assert packed != (1, 2)
    three, zero = [3], [0]
    assert packed + three == [1, 2, 3]
    assert zero + packed == [0, 1, 2]  # type: ignore[operator]
    assert packed * 2 == 2 * packed == [1, 2, 1, 2]
    assert PackedDict({"a": 1}) | {"b": 2} == {"a": 1, "b": 2}
    assert {"a": 0, "b": 2} | PackedDict({"a": 1}) == {"a": 1, "b": 2}  # type: ignore[operator]
    assert copy.deepcopy(packed) is packed
    with pytest.raises(TypeError):
        hash(packed)


def test_bad_input_is_named() -> None:
    with pytest.raises(TypeError, match=r"PackedList\(items\).*5"):
        PackedList(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"PackedStrings.*item 1 is 2"):
        PackedStrings(["a", 2])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"keys of a PackedDict.*object"):
        PackedDict({object(): 1})
    with pytest.raises(IndexError, match="index 5 is out of range: there are 2 items"):
        PackedList([1, 2])[5]


@pytest.mark.parametrize("bounds", [(), (1,), (-1,), (0, 1), (1, -1), (5,), (-9, 9)])
def test_what_is_found_is_found_where_a_list_finds_it(bounds: tuple[int, ...]) -> None:
    plain = [3, 1, 3]
    try:
        expected = plain.index(3, *bounds)
    except ValueError:
        with pytest.raises(ValueError, match="3 is not in this PackedList"):
            PackedList(plain).index(3, *bounds)
    else:
        assert PackedList(plain).index(3, *bounds) == expected


keys = st.text(max_size=4) | st.integers() | st.floats(allow_nan=False) | st.binary(max_size=3)
keys |= st.sampled_from(["a", "b/c"]).map(PurePosixPath)
keys |= st.tuples(keys, st.none() | st.booleans())


@given(st.dictionaries(keys, st.integers(), max_size=50), st.lists(keys, max_size=20))
def test_a_packed_dict_finds_what_a_dict_finds(items: dict[Any, int], others: list[Any]) -> None:
    packed = PackedDict(items)
    for key in [*items, *others]:
        assert packed.get(key) == items.get(key)
        assert (key in packed) == (key in items)
    assert list(packed.items()) == list(items.items())
    assert list(packed.values()) == list(items.values())
    assert packed == items
    assert items == packed


@pytest.mark.slow
def test_a_dict_keyed_by_strings_is_found_in_under_another_hash_seed() -> None:
    pickled = pickle.dumps(PackedDict({f"key {n}": n for n in range(1000)}))
    script = "import pickle, sys; print(pickle.load(sys.stdin.buffer)['key 812'])"
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=pickled,
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": "src"},
        capture_output=True,
        timeout=60,
    )
    assert done.stdout.strip() == b"812", done.stderr.decode()


def test_a_key_that_cannot_be_hashed_is_an_error_and_a_strange_one_is_not_there() -> None:
    packed = PackedDict({"a": 1})
    with pytest.raises(TypeError):
        packed.get([])  # type: ignore[call-overload]
    assert object() not in packed


@pytest.mark.parametrize(
    "items",
    [
        [f"/data/train/{n:08d}.jpg" for n in range(50_000)],
        ["cat", "dog", "bird"] * 20_000,
        list(range(50_000)),
        [0.5 * n for n in range(50_000)],
        [(f"/data/{n}.jpg", n % 100) for n in range(20_000)],
        [{"image_id": n, "bbox": [1.0 * n, 2.0, 3.0, 4.5], "label": "x"} for n in range(20_000)],
        [list(range(n % 30)) for n in range(20_000)],
        [np.arange(5)] * 20_000,
    ],
    ids=["paths", "labels", "ints", "floats", "tuples", "dicts", "tokens", "one array again"],
)
def test_less_memory_than_the_list_and_nothing_pickled(items: list[Any]) -> None:
    seen: dict[int, int] = {}

    def measure(value: Any) -> None:
        if id(value) not in seen:
            seen[id(value)] = sys.getsizeof(value)
            if isinstance(value, dict):
                for part in (*value, *value.values()):
                    measure(part)
            elif isinstance(value, (list, tuple)):
                for part in value:
                    measure(part)

    measure(items)
    packed = PackedList(items)
    assert packed.nbytes < 0.8 * sum(seen.values())
    assert packed.pickled == 0


def test_descriptors_go_with_the_last_container() -> None:
    before = open_files()
    packed = PackedList(range(100_000))
    part = packed[5:10]
    assert open_files() > before
    del packed
    assert part == [5, 6, 7, 8, 9]
    del part
    assert open_files() == before


def test_a_container_that_cannot_be_written_leaves_no_descriptor() -> None:
    before = open_files()
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        PackedList([*map(str, range(100_000)), lambda: None])
    assert open_files() == before


def test_a_part_pickled_alone_does_not_take_the_rest_along() -> None:
    packed = PackedList(range(100_000))
    pickled = pickle.dumps(packed[10:20], 5)
    assert len(pickled) < 2000
    assert pickle.loads(pickled) == list(range(10, 20))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_carries_it(protocol: int) -> None:
    packed = PackedDict({str(n): (n, "x") for n in range(20_000)})
    assert pickle.loads(pickle.dumps(packed, protocol)) == packed


def _tell(packed: Any, answers: Any) -> None:
    shared = "memfd:holdfast-packed" in Path("/proc/self/maps").read_text()
    answers.send((packed[-1], len(packed), shared))


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.slow)]
)
def test_a_new_process_gets_the_memory_and_not_the_bytes(method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    packed = PackedList([f"sample {n}" for n in range(100_000)])
    before = open_files()
    ours, theirs = context.Pipe()
    process = context.Process(target=_tell, args=(packed[10:], theirs))
    process.start()
    try:
        assert ours.poll(60)
        assert ours.recv() == ("sample 99999", 99_990, True)
    finally:
        process.join(30)
    ours.close()
    theirs.close()
    process.close()
    if method == "fork":
        assert open_files() == before


def test_under_a_tight_file_size_limit_it_is_plain_memory() -> None:
    script = textwrap.dedent("""
        import pickle, resource
        from holdfast import PackedList
        items = [f"a rather long string {n}" for n in range(50_000)]
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        packed = PackedList(items)
        assert packed == items
        assert packed._sealed._fd is None
        assert pickle.loads(pickle.dumps(packed)) == items
    """)
    warm.run(["-c", script], env={**os.environ, "PYTHONPATH": "src"}, timeout=60).check_returncode()


def test_nobody_can_write_into_it() -> None:
    packed = PackedList(range(100_000))
    fd = packed._sealed._fd
    assert fd is not None
    with pytest.raises(OSError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(OSError):
        os.ftruncate(fd, 0)
    with pytest.raises(TypeError):
        packed._sealed.view[0] = 1


def test_a_repr_is_short() -> None:
    assert repr(PackedList(range(100_000))) == "PackedList([0, 1, 2, … 99,997 more])"
    assert repr(PackedDict({"a": 1})) == "PackedDict({'a': 1})"
