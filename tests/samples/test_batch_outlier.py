"""Which sample of a batch is unlike the others, and how it differs."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.samples.batch_outlier import difference, form, majority

Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    ("odd", "usual", "words"),
    [
        (
            torch.zeros(1, 4),
            torch.zeros(3, 4),
            "it is a float32 tensor of shape (1, 4), the others had a float32 tensor of shape (3, 4)",
        ),
        (
            np.zeros(2, np.uint8),
            np.zeros(2),
            "it is a uint8 array of shape (2,), the others had a float64 array of shape (2,)",
        ),
        (
            {"image": torch.zeros(3), "label": 1},
            {"image": torch.zeros(4), "label": 1},
            "it at ['image'] is a float32 tensor of shape (3,), the others had a float32 tensor of "
            "shape (4,)",
        ),
        (
            {"image": 1},
            {"image": 1, "label": 1},
            "it is a dict with 1 keys (image), the others had a dict with 2 keys (image, label)",
        ),
        ({"a": 1}, {"b": 1}, "it has the key 'a' where the others had 'b'"),
        (
            (1, [2, 3]),
            (1, [2]),
            "it at [1] is a list of length 2, the others had a list of length 1",
        ),
        (Pair(1, "t"), Pair(1, 2), "it at [1] is a str, the others had an int"),
        (None, 1, "it is None, the others had an int"),
    ],
)
def test_the_difference_is_told_with_what_the_others_had(odd: Any, usual: Any, words: str) -> None:
    assert difference(form(odd), form(usual)) == words


def test_the_majority_has_the_lead_alone() -> None:
    assert majority([(1,), (1,), (2,)]) == (1,)
    assert majority([(1,), (2,)]) is None
    assert majority([(1,), (1,), (2,), (2,), (3,)]) is None
    assert majority([]) is None


def test_values_make_no_difference() -> None:
    assert form({"a": torch.rand(3), "b": "text"}) == form({"a": torch.ones(3), "b": "other"})
    assert form(torch.ones(2)) != form(torch.ones(2, dtype=torch.int64))


def test_what_cannot_be_looked_into_is_known_by_its_type() -> None:
    deep: Any = 1
    for _ in range(50):
        deep = [deep]
    assert form(deep)[0] == "list"
    assert form(object()) == ("object",)
