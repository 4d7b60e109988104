"""Records: the same in a file as in memory, and no file can do harm."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Subset

from holdfast import BadSample
from holdfast.samples.bad_sample import digest_of, error_name, name_of
from holdfast.samples.sample_keys import description_of, key_of

INDICES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.binary()
    | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=5,
)


@given(index=INDICES, message=st.text(), attempts=st.integers(0, 9), name=st.none() | st.text())
def test_a_record_comes_back_from_json_as_it_was(
    index: Any, message: str, attempts: int, name: str | None
) -> None:
    bad = BadSample(index, "raised", "ValueError", message, name, 3, 8, None, 0, attempts=attempts)
    assert BadSample.from_json(json.loads(json.dumps(bad.to_json()))) == bad


@given(one=INDICES, other=INDICES)
def test_indices_have_one_key_exactly_if_they_are_the_same(one: Any, other: Any) -> None:
    same = repr(one) == repr(other)
    assert (key_of(one) == key_of(other)) == same


def test_numbers_of_other_libraries_are_the_numbers_they_are() -> None:
    assert key_of(np.int64(7)) == key_of(torch.tensor(7)) == key_of(7)


class Key:
    """Equal to itself alone; its description is `text`."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text or object.__repr__(self)


def read_back(index: Any) -> Any:
    return BadSample.from_json(json.loads(json.dumps(BadSample(index, "raised").to_json()))).index


@pytest.mark.parametrize("wrapped", [lambda one: one, lambda one: (3, one), lambda one: [one]])
def test_an_object_is_known_in_a_file_by_its_description(wrapped: Any) -> None:
    index = wrapped(Key("Key(7)"))
    assert description_of(index) == description_of(read_back(index)) is not None
    assert description_of(wrapped(Key("Key(8)"))) != description_of(index)
    assert key_of(index) == key_of(index)
    assert key_of(wrapped(Key("Key(7)"))) != key_of(index)  # it does not say that it is equal


@pytest.mark.parametrize("text", ["", "<Key 1, 2, ..., 9>", "<Key at 0x7f00aa>"])
@pytest.mark.parametrize("wrapped", [lambda one: one, lambda one: (3, one), lambda one: [one]])
def test_an_object_whose_description_says_nothing_is_not_known_in_a_file(
    wrapped: Any, text: str
) -> None:
    index = wrapped(Key(text))
    assert description_of(index) is None
    assert description_of(read_back(index)) is None
    assert " at 0x" not in repr(read_back(index))
    assert key_of(index) == key_of(index) != key_of(wrapped(Key(text)))


def test_an_address_in_a_description_is_seen_however_it_is_written() -> None:
    key = Key("")
    for text in (f"<Key {id(key):#x}>", f"<Key {id(key):X}>", f"Key#{id(key)}"):
        key.text = text
        assert description_of(key) is None


@dataclass(frozen=True)
class Value:
    number: int


@dataclass(frozen=True)
class Holder:
    numbers: list[int]


def test_objects_that_are_equal_are_the_same_sample() -> None:
    assert key_of(Value(3)) == key_of(Value(3)) != key_of(Value(4))
    assert key_of({"a": 1}) == key_of({"a": 1}) != key_of({"a": 2})
    holder = Holder([1])  # says that it has a hash, and has none
    assert key_of(holder) == key_of(holder) != key_of(Holder([1]))


def test_bytes_are_what_they_are() -> None:
    assert read_back((b"a\xff", "a")) == (b"a\xff", "a")
    assert key_of(b"a") == key_of(read_back(b"a"))
    assert key_of(b"a") != key_of("a")


@pytest.mark.parametrize(
    "fields",
    [
        [],
        "text",
        {},
        {"index": 1},
        {"kind": "raised"},
        {"index": 1, "kind": "eaten"},
        {"index": 1, "kind": "raised", "message": 5},
        {"index": 1, "kind": "raised", "attempts": "many"},
        {"index": 1, "kind": "raised", "attempts": True},
        {"index": 1, "kind": "raised", "verdict": "innocent"},
        {"index": {"pickle": "gASV"}, "kind": "raised"},
        {"index": {"bytes": "no hex"}, "kind": "raised"},
        {"index": {"repr": 5}, "kind": "raised"},
        {"index": {}, "kind": "raised"},
    ],
)
def test_what_is_no_record_is_refused_with_a_reason(fields: Any) -> None:
    with pytest.raises(ValueError, match="it"):
        BadSample.from_json(fields)


def test_fields_of_a_later_version_are_passed_over() -> None:
    assert BadSample.from_json({"index": 1, "kind": "none", "mood": "sad"}).index == 1


class Named:
    def sample_name(self, index: int) -> str:
        return f"cat-{index}.jpg"


def test_the_dataset_names_its_samples_also_through_a_subset() -> None:
    assert name_of(Named(), 4) == "cat-4.jpg"
    assert name_of(Subset(Named(), [7, 8]), 1) == "cat-8.jpg"  # type: ignore[arg-type]
    assert name_of(object(), 4) is None


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (FileNotFoundError(2, "No such file or directory", "/data/a b.png"), "/data/a b.png"),
        (OSError("cannot identify image file '/data/x.jpg'"), "/data/x.jpg"),
        (ValueError("bad header in /data/train/0001.npy, give up"), "/data/train/0001.npy"),
        (OSError("cannot identify image file 'train/2.jpg'"), "train/2.jpg"),
        (ValueError("expected 'image/jpeg'"), None),
        (ValueError("3/4 of the data"), None),
        (FileNotFoundError(2, "gone", Path("/data/p")), "/data/p"),
    ],
)
def test_a_path_in_the_error_names_the_sample(error: Exception, name: str | None) -> None:
    assert name_of(object(), 0, error) == name


def caught(message: str, *, elsewhere: bool = False) -> BaseException:
    try:
        if elsewhere:
            raise ValueError(message)
        raise ValueError(message)
    except ValueError as error:
        return error


def test_the_digest_is_of_the_place_and_not_of_the_message() -> None:
    one, same, other = caught("a"), caught("b"), caught("a", elsewhere=True)
    assert digest_of(one, one.__traceback__) == digest_of(same, same.__traceback__)
    assert digest_of(one, one.__traceback__) != digest_of(other, other.__traceback__)


def test_errors_are_called_as_one_would_import_them() -> None:
    assert error_name(ValueError()) == "ValueError"
    assert error_name(json.JSONDecodeError("m", "d", 0)) == "json.decoder.JSONDecodeError"


def test_one_line_tells_it() -> None:
    bad = BadSample(
        17, "raised", "OSError", "truncated\nmore", "cat.jpg", attempts=3, action="skipped"
    )
    assert str(bad) == "sample 17 (cat.jpg) raised OSError: truncated (3 times); skipped"
    stream = BadSample(None, "none", position=2, batch=5, worker_id=1)
    assert str(stream) == "sample 2 of batch 5 of worker 1 was None"
