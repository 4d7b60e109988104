"""A process beside the workers finds out which line leaks: what it loads, and when it gives up."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import Dataset, IterableDataset

from holdfast.limits.worker_limit import Allowance
from holdfast.processes.protocol import Probe, order
from holdfast.samples.policy import Policy
from holdfast.samples.substitute import NOTHING
from holdfast.worker import leak_probe
from holdfast.worker.housekeeping import Housekeeper
from holdfast.worker.leak_tracer import Findings, TracingFailed
from tests.support.here import worker_here

pytestmark = pytest.mark.usefixtures("few_modules")
kept: list[bytes] = []


class Leaking(Dataset[bytes]):
    """Each batch leaves something behind, and every fourth is bad."""

    def __init__(self, *, bad: bool = True) -> None:
        self.bad = bad
        self.asked: list[list[Any]] = []

    def __getitems__(self, indices: list[Any]) -> list[bytes]:
        self.asked.append(indices)
        kept.append(bytes(50_000))  # this line leaks
        if self.bad and len(self.asked) % 4 == 0:
            raise ValueError("a bad sample")
        return [b""] * len(indices)


class LeakingStreams(IterableDataset[bytes]):
    """The same in streams of these lengths."""

    def __init__(self, lengths: Iterator[int]) -> None:
        self.lengths = lengths
        self.left = 0
        self.leaking = Leaking()

    @property
    def asked(self) -> list[list[Any]]:
        return self.leaking.asked

    def __iter__(self) -> Iterator[bytes]:
        self.left = next(self.lengths)
        return self

    def __next__(self) -> bytes:
        if not self.left:
            raise StopIteration
        self.left -= 1
        return self.leaking.__getitems__([self.left])[0]


class Keeper(Housekeeper):
    """Of a process that may grow during so many batches."""

    def __init__(self, batches: int) -> None:
        super().__init__(Allowance(None))
        self.left = batches

    def may_continue(self, now: float) -> bool:
        self.left -= 1
        return super().may_continue(now) and self.left > 0


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Iterator[None]:
    yield
    kept.clear()


def find(
    dataset: Leaking | LeakingStreams,
    probe: Probe,
    room: int = 1000,
    policy: Policy | None = None,
) -> Findings | TracingFailed | None:
    keeper = Keeper(room)
    try:
        with worker_here(dataset, policy) as worker:
            worker.replica.make_fetcher()
            return leak_probe.find(worker.replica, keeper, probe)
    finally:
        keeper.close()


def names_the_line(found: Findings | TracingFailed | None) -> bool:
    assert isinstance(found, Findings)
    return any("test_leak_probe" in one.name for one in found.lines)


@pytest.fixture(autouse=True)
def tracing_ends_with_the_search() -> Iterator[None]:
    yield
    assert not tracemalloc.is_tracing()


@pytest.mark.slow
@pytest.mark.parametrize("policy", [None, Policy("skip")])
def test_it_makes_what_workers_were_asked_for_again_and_again(policy: Policy | None) -> None:
    """With a policy for bad samples, orders come with hints."""

    def task(number: int, index: list[int]) -> tuple[str, int, Any]:
        return ("task", number, index) if policy is None else ("hinted", number, (index, NOTHING))

    several: list[Any] = [("resume", 0, 5), task(9, [4]), task(10, [5])]
    orders = (
        order(*task(7, [1, 2]), []),
        order("released", 0, None, [64]),
        order(*task(8, [3]), []),
        order("several", 0, several, []),
    )
    dataset = Leaking(bad=policy is None)
    assert names_the_line(find(dataset, Probe(orders, 3), policy=policy))
    expected = itertools.cycle([[1, 2], [3], [4], [5]])
    assert dataset.asked == list(itertools.islice(expected, leak_probe.ROUNDS * 3))


def test_without_anything_to_make_it_says_nothing() -> None:
    assert find(Leaking(), Probe((order("resume", 0, 5, []),), 3)) is None


def test_a_stream_is_begun_anew_when_it_has_ended() -> None:
    streams = LeakingStreams(itertools.repeat(4))
    assert names_the_line(find(streams, Probe((), 2)))
    assert len(streams.asked) == leak_probe.ROUNDS * 2


def test_an_empty_stream_says_nothing() -> None:
    lengths = itertools.chain([3], itertools.repeat(0))
    assert find(LeakingStreams(lengths), Probe((), 2)) is None


@pytest.mark.parametrize(("room", "says"), [(1, False), (3, False), (4, True)])
def test_if_it_has_become_too_large_it_says_what_it_has_seen(room: int, says: bool) -> None:
    dataset = Leaking()
    found = find(dataset, Probe((order("task", 0, [0], []),), 1), room)
    assert len(dataset.asked) == room
    assert names_the_line(found) if says else found is None


@pytest.mark.parametrize("bound", ["LONGEST", "CPU"])
def test_it_gives_up_after_a_time(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leak_probe, bound, 0.0)
    dataset = Leaking()
    assert find(dataset, Probe((order("task", 0, [0], []),), 1)) is None
    assert len(dataset.asked) == 1
