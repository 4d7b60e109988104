"""A worker of a stream is replaced for its size only if its stream can be continued exactly.

Whether it can is tried by a process of its own while the worker goes on, so a short epoch would be
over before: here the consumer waits in the middle of it.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

from holdfast import DataLoader
from holdfast.engine.warden import _Told
from tests.streams.datasets import SIZE, ByTime, Honest, Kept, OmitsItsBuffer
from tests.streams.test_taking_up import stock
from tests.support.processes import eventually

MIB = 1 << 20
_leaked: list[Any] = []


class Leaks:
    """When it is sent, and not when its batch is merely made again."""

    def __reduce__(self) -> Any:
        # Mapped anew, and not from the heap: of what tests before have freed there, much may be
        # left, and none of it counts towards what a process may allocate.
        block = mmap.mmap(-1, 8 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        np.frombuffer(block, np.uint8)[:] = 1
        _leaked.append(block)
        return int, (0,)


def and_leak(samples: list[Any]) -> Any:
    return torch.utils.data.default_collate(samples), Leaks()


OPTIONS: dict[str, Any] = {"batch_size": 2, "num_workers": 2, "collate_fn": and_leak}
LIMIT: dict[str, Any] = {"worker_memory_limit": "40MiB"}
WAIT_AT = 16  # of 24 batches


@pytest.fixture(autouse=True)
def nobody_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.engine.warden._told", _Told(leak=True))


def rows(loader: Any, epochs: int, wait_for: Callable[[int], bool]) -> list[Any]:
    torch.manual_seed(3)
    found: list[Any] = []
    for epoch in range(epochs):
        found.append([])
        for number, (batch, _) in enumerate(loader):
            found[-1].append(batch.tolist())
            if number == WAIT_AT:
                assert eventually(lambda epoch=epoch: wait_for(epoch))
    loader.close()
    return found


@pytest.mark.parametrize(
    ("make", "persistent"), [(Honest, False), (OmitsItsBuffer, False), (Kept, True)]
)
def test_a_stream_goes_on_as_it_was_in_smaller_workers(make: Any, persistent: bool) -> None:
    options = {**OPTIONS, "persistent_workers": persistent}
    plain = {**options, "collate_fn": None}
    expected = stock(make(), 2, **plain)
    loader = DataLoader(make(), **options, **LIMIT)
    found = rows(loader, 2, lambda epoch: loader.stats()["recycled"] > epoch)
    assert found == expected
    assert loader.stats()["restarts"] == 0
    assert loader.incidents == []


def test_one_that_does_not_repeat_itself_stays_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader = DataLoader(ByTime(), **OPTIONS, **LIMIT)
    with caplog.at_level(logging.WARNING, "holdfast"):
        found = rows(loader, 2, lambda epoch: "is not replaced" in caplog.text)
    for stream in found:
        assert sorted(row[0] for batch in stream for row in batch) == list(range(SIZE))
    assert loader.stats()["recycled"] == 0
    assert loader.incidents == []
    (told,) = (one for one in caplog.messages if "is not replaced" in one)
    assert "this stream is not deterministic" in told
    assert "holdfast explain stream-not-repeatable" in told


def test_where_the_user_wants_no_stream_continued_nobody_is_replaced_for_its_size(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader = DataLoader(Honest(), **OPTIONS, **LIMIT, iterable_recovery="raise")
    expected = stock(Honest(), batch_size=2, num_workers=2)
    assert rows(loader, 1, lambda epoch: "is not replaced" in caplog.text) == expected
    assert loader.stats()["recycled"] == 0
    (told,) = (one for one in caplog.messages if "is not replaced" in one)
    assert 'iterable_recovery="auto"' in told


class NeedsMuch(Honest):
    """Sample 20 asks for so much at once that it fails where others have used up what there is."""

    def __iter__(self) -> Iterator[Any]:
        for one in super().__iter__():
            if int(one[0]) == 20:
                one[1] = np.ones(100 * MIB, np.uint8)[0]
            yield one


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_sample_that_lacks_what_others_have_used_up_is_made_again_in_a_fresh_process(
    policy: Any,
) -> None:
    """Below its limit a worker does not ask; then it does, and waits to be told."""
    expected = stock(NeedsMuch(), batch_size=2, num_workers=2)
    loader = DataLoader(NeedsMuch(), **OPTIONS, worker_memory_limit="64MiB", on_bad_sample=policy)
    assert rows(loader, 1, lambda epoch: True) == expected
    assert loader.incidents == loader.bad_samples == []
    assert loader.stats()["recycled"] >= 1
