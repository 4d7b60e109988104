"""What workers count in their black boxes, and what the trainer reads there."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from holdfast.autopsy import blackbox, tally
from holdfast.autopsy.blackbox import COLLATE, FETCH, IDLE, STEPS, BlackBoxes, CountingRecorder


@pytest.fixture
def boxes() -> Iterator[BlackBoxes]:
    made = BlackBoxes(3)
    yield made
    made.close()


def test_seconds_are_those_of_each_step_and_survive_the_worker(
    boxes: BlackBoxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(blackbox, "monotonic", lambda: now)
    for at in (100.0, 200.0):  # the second is its replacement
        now = at
        recorder = CountingRecorder(boxes.fd, 3, 1)
        for seconds, step in ((1, FETCH), (4, COLLATE), (2, IDLE), (8, FETCH)):
            now += seconds
            recorder.note(0, 0, step)
        boxes.clear(1)
    found = boxes.tally([0, 1], [], now)
    spent = dict(zip(STEPS, found.seconds, strict=True))
    assert {step: spent[step] for step in ("boot", "fetch", "collate", "idle")} == {
        "boot": 2.0,
        "fetch": 8.0,
        "collate": 4.0,
        "idle": 16.0,
    }


def test_the_step_that_a_worker_is_in_counts_while_it_lives(
    boxes: BlackBoxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blackbox, "monotonic", lambda: 100.0)
    CountingRecorder(boxes.fd, 3, 0).note(4, 2, FETCH)
    assert boxes.tally([0], [0], 107.0).seconds[FETCH] == 7.0
    assert boxes.tally([0], [], 107.0).seconds[FETCH] == 0.0


def test_samples_are_counted_and_the_slowest_and_largest_named(boxes: BlackBoxes) -> None:
    for worker in (0, 1):
        watch = CountingRecorder(boxes.fd, 3, worker).watch
        assert watch is not None
        for number in range(20):
            watch.add(100 * worker + number, 0.001 * (number + 1), torch.zeros(number + 1))
    CountingRecorder(boxes.fd, 3, 2)  # of a rehearsal: not one of the workers
    found = boxes.tally([0, 1], [], 0.0)
    assert (int(found.times.sum()), int(found.sizes.sum())) == (40, 40)
    assert found.slowest[:2] == [(0.02, "19"), (0.02, "119")]
    assert found.largest[:2] == [(80.0, "19"), (80.0, "119")]
    assert len(found.slowest) == 8


def test_a_replacement_knows_the_slowest_of_its_predecessor(boxes: BlackBoxes) -> None:
    first = CountingRecorder(boxes.fd, 3, 0).watch
    assert first is not None
    first.add("before", 9.0, None)
    second = CountingRecorder(boxes.fd, 3, 0).watch
    assert second is not None
    second.add("after", 5.0, None)
    second.add("before", 1.0, None)  # again, in another epoch
    assert boxes.tally([0], [], 0.0).slowest == [(9.0, "before"), (5.0, "after")]


@pytest.mark.parametrize("unit", ["seconds", "bytes"])
def test_a_value_is_in_the_bucket_whose_bounds_enclose_it(unit: str) -> None:
    for value in (0.0, 1e-7, 1e-6, 0.02, 1.0, 3.0, 1000.0, 2.0**20):
        bucket = tally._bucket(value, unit)
        assert tally.lower_bound(bucket, unit) <= value
        assert value < tally.lower_bound(bucket + 1, unit) or bucket == tally.BUCKETS - 1


class Silent:
    """Fails the test if it is looked at."""

    def __getattribute__(self, name: str) -> object:
        raise AssertionError(f"code of the user was run: {name}")


def test_bytes_are_those_of_plain_parts() -> None:
    pair = namedtuple("pair", "image label")
    sample = {"pair": pair(torch.zeros(4, dtype=torch.float64), 7), "text": "äb", "more": [b"xyz"]}
    assert tally._plain_bytes(sample, 4) == 32 + 8 + 2 + 3
    assert tally._plain_bytes(np.zeros((3, 5), np.uint16), 4) == 30
    assert tally._plain_bytes([Silent(), 1], 4) is None
    assert tally._plain_bytes(torch.zeros(3).to_sparse(), 4) is None


def test_no_code_of_a_key_is_run() -> None:
    assert tally._text((3, np.int64(4), "x")) == "(3, 4, x)"
    assert tally._text(Silent()) == "a Silent"


def test_a_long_key_is_cut(boxes: BlackBoxes) -> None:
    watch = CountingRecorder(boxes.fd, 3, 0).watch
    assert watch is not None
    watch.add("ä" * 100, 1.0, None)
    assert boxes.tally([0], [], 0.0).slowest == [(1.0, "ä" * 32)]


def test_all_of_it_fits_before_the_random_states() -> None:
    assert tally.START > blackbox._OWN_SIGNAL_AT
    assert tally.END <= blackbox._SLOTS_AT
