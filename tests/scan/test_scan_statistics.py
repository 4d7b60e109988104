"""The statistics and the progress of a scan: parts added up equal the whole, also through a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from holdfast.introspection.data_size import weigh
from holdfast.samples.bad_sample import BadSample
from holdfast.samples.batch_outlier import form
from holdfast.scan.sample_contents import digest
from holdfast.scan.scan_progress import Ranges, ScanProgress
from holdfast.scan.scan_statistics import (
    MOST_CAUSES,
    MOST_FORMS,
    Causes,
    Forms,
    SampleReading,
    Tally,
)

SECONDS = st.floats(0, 1000, allow_nan=False)


def tally_of(values: list[float], first: int = 0) -> Tally:
    return Tally.of(
        SampleReading(
            index, value, int(value), form(torch.zeros(1 + index % 3)), index % 2 == 0, True
        )
        for index, value in enumerate(values, first)
    )


@given(st.lists(SECONDS, min_size=1, max_size=60), st.integers(0, 60))
def test_parts_added_up_are_the_whole(values: list[float], cut: int) -> None:
    whole = tally_of(values)
    parts = Tally()
    for first, part in ((0, values[:cut]), (len(values[:cut]), values[cut:])):
        parts.add(tally_of(part, first), [])
    assert parts == whole
    assert Tally.from_json(json.loads(json.dumps(parts.to_json()))) == whole


@given(st.lists(SECONDS, min_size=1, max_size=200), st.sampled_from([0.5, 0.95, 1.0]))
def test_quantiles_are_right_to_a_hundredth(values: list[float], part: float) -> None:
    spread = tally_of(values).seconds
    exact = float(np.quantile(values, part, method="inverted_cdf"))
    assert spread.quantile(part) == pytest.approx(exact, rel=0.0101, abs=1e-300)
    assert [value for value, _ in spread.top] == sorted(values, reverse=True)[:10]


def test_of_equals_the_first_are_shown() -> None:
    assert [index for _, index in tally_of([1.0] * 30).seconds.top] == list(range(10))


def test_any_number_of_forms_and_causes_takes_bounded_room() -> None:
    forms, causes = Forms(), Causes()
    for index in range(2000):
        forms.include(("tensor", "float32", (index,)), index)
        causes.include(BadSample(index, "raised", f"Error{index}", traceback="long" * 100))
    assert len(forms.by_form) == MOST_FORMS
    assert forms.beyond.count == 2000 - MOST_FORMS
    assert len(causes.groups) <= MOST_CAUSES + 1
    assert sum(count for count, _ in causes.ranked()) == 2000


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=12))
def test_gaps_are_what_was_never_added(pieces: list[tuple[int, int]]) -> None:
    ranges, done = Ranges(), set()
    for start, length in pieces:
        ranges.add(start, start + length)
        done.update(range(start, start + length))
    left = {at for start, stop in ranges.gaps(50) for at in range(start, stop)}
    assert left == set(range(50)) - done
    assert len(ranges) == len(done)
    edges = [edge for one in ranges.to_json() for edge in one]
    assert edges == sorted(set(edges))  # apart, and none empty


def test_progress_comes_back_as_it_was(tmp_path: Path) -> None:
    path = str(tmp_path / "progress")
    about = {"dataset": "a", "size": 3}
    assert ScanProgress.load(path, about) is None
    progress = ScanProgress(about, seconds=1.5)
    progress.done.add(2, 5)
    progress.tally.add(tally_of([1.0, 2.0]), [BadSample(2, "none")])
    progress.save(path)
    back = ScanProgress.load(path, about)
    assert back is not None
    assert (back.tally, back.seconds) == (progress.tally, 1.5)
    assert back.done.to_json() == [(2, 5)]


class Thing:
    def __init__(self, *parts: Any) -> None:
        self.parts = parts


SAMPLES: list[tuple[Any, int]] = [
    (torch.zeros(2, 3), 24),
    (torch.zeros(0), 0),
    (torch.tensor(True), 1),
    (torch.zeros(6, dtype=torch.bfloat16)[::2], 6),
    (np.zeros((2, 3), np.uint8), 6),
    (np.float64(1), 8),
    ({"a": torch.zeros(4), "b": ["xyz", b"xy", 1.5, None]}, 16 + 3 + 2 + 8 + 8),
    ({1, 2}, 16),
    (Thing(torch.zeros(5), 1), 28),
    (Image.new("RGB", (4, 5)), 60),
]


@pytest.mark.parametrize(("sample", "size"), SAMPLES, ids=lambda one: type(one).__name__)
def test_what_a_sample_weighs(sample: Any, size: int) -> None:
    assert weigh(sample) == size
    assert digest(sample) is not None
    assert [digest(sample) == digest(other) for other, _ in SAMPLES].count(True) == 1


def test_what_cannot_be_compared_is_said_to_be_so() -> None:
    assert digest(one for one in [1]) is None
    circle: list[Any] = []
    circle.append(circle)
    assert digest(circle) is None
    assert weigh(circle) > 0
    assert digest(float("nan")) == digest(float("nan"))
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
