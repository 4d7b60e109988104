"""A worker of a stream is replaced for its size only if its stream can be continued exactly.

Whether it can is tried by a process of its own while the worker goes on, so a short epoch would be
over before: here the consumer waits in the middle of it.
"""

from __future__ import annotations

import gc
import logging
import mmap
import multiprocessing
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

from holdfast import DataLoader
from holdfast.engine.memory_control import _Warned
from holdfast.worker.housekeeping import trim
from tests.streams.datasets import SIZE, ByTime, Honest, Kept, OmitsItsBuffer, Plain, mine
from tests.streams.test_taking_up import stock
from tests.support.processes import eventually

MIB = 1 << 20
_leaked: list[Any] = []


def memory(nbytes: int) -> Any:
    """Asked of the kernel, and in use. The allocator would give what lies free in this process, which is more or less
    after more or fewer tests, and then nothing is lacking."""
    try:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(nbytes) from error
    array = np.frombuffer(mapping, np.uint8)
    array[:] = 1
    return array


class Leaks:
    """When it is sent, and not when its batch is merely made again."""

    def __reduce__(self) -> Any:
        _leaked.append(memory(8 * MIB))
        return int, (0,)


def and_leak(samples: list[Any]) -> Any:
    return torch.utils.data.default_collate(samples), Leaks()


OPTIONS: dict[str, Any] = {"batch_size": 2, "num_workers": 2, "collate_fn": and_leak}
LIMIT: dict[str, Any] = {"worker_memory_limit": "40MiB"}
WAIT_AT = 16  # of 24 batches


@pytest.fixture(autouse=True)
def the_heap_ends_where_it_is_used() -> None:
    """What earlier tests have left free at the end of the heap counts as data when a worker sets its
    limit. A worker that gives it back later would have that much more than its limit."""
    gc.collect()
    trim()


@pytest.fixture(autouse=True)
def nobody_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.engine.memory_control._warned", _Warned(leak=True))


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


@pytest.mark.slow
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
    """Sample 24 asks for so much at once that it fails where others have used up what there is.

    A worker may have 128 MiB. Its six batches before this one have left 48 behind: 24 too many, where
    a fresh process has 24 to spare.
    """

    def __iter__(self) -> Iterator[Any]:
        for one in super().__iter__():
            if int(one[0]) == 24:
                one[1] = memory(104 * MIB)[0]
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


class ByProcess(Plain):
    """Numbers that depend on what multiprocessing calls the process."""

    def __iter__(self) -> Iterator[Any]:
        process = multiprocessing.current_process()
        dice = random.Random(f"{process.name} {process._identity}")  # type: ignore[attr-defined]
        for number in mine(self.size):
            yield torch.tensor([number, dice.random()])


def test_a_stream_that_depends_on_the_name_of_its_process_goes_on_in_smaller_workers() -> None:
    expected = stock(ByProcess(), batch_size=2, num_workers=2)
    loader = DataLoader(ByProcess(), **OPTIONS, **LIMIT)
    found = rows(loader, 1, lambda epoch: loader.stats()["recycled"] > 0)
    assert [[row[0] for row in batch] for batch in found[0]] == [
        [row[0] for row in batch] for batch in expected[0]
    ]
    assert loader.incidents == []


class LacksMemory(ByTime):
    """Its fourth sample does."""

    def __iter__(self) -> Iterator[Any]:
        for number, one in enumerate(super().__iter__()):
            if number == 3:
                raise MemoryError("for whatever reason")
            yield one


def test_a_sample_that_lacks_memory_in_a_worker_that_has_to_stay_is_named() -> None:
    """While the worker waits to hear whether it may go, which sample it was is not forgotten."""
    loader = DataLoader(
        LacksMemory(), batch_size=2, num_workers=1, collate_fn=and_leak, worker_memory_limit="64MiB"
    )
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(MemoryError) as caught:
        next(iterator)
    loader.close()
    assert caught.value.holdfast_sample.position == 1  # type: ignore[attr-defined]
