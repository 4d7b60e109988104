"""A process beside the workers finds out which line leaks: what it loads, and when it gives up."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.processes.protocol import Probe, order
from holdfast.samples.substitute import NOTHING
from holdfast.worker import leak_probe
from holdfast.worker.leak_tracer import Findings, TracingFailed

pytestmark = pytest.mark.usefixtures("few_modules")
kept: list[bytes] = []


class Prober:
    """A process whose batches leave something behind: of a map-style dataset, or of streams of these lengths."""

    def __init__(self, streams: Iterator[int] | None = None, room: int = 1000) -> None:
        self.blueprint: Any = SimpleNamespace(iterable=streams is not None, batch_index=[None])
        self.dataset: Any = None
        self.keeper: Any = SimpleNamespace(may_continue=lambda now: len(self.asked) < room)
        self.fetcher: Any = SimpleNamespace(fetch=self.fetch)
        self.asked: list[Any] = []
        self._streams = streams
        self._left = 0
        if streams is not None:
            self.make_fetcher()

    def make_fetcher(self) -> None:
        assert self._streams is not None
        self._left = next(self._streams)

    def fetch(self, number: int, *asked: Any) -> Any:
        if self.blueprint.iterable:
            if not self._left:
                raise StopIteration
            self._left -= 1
        self.asked.append(asked)
        kept.append(bytes(50_000))  # this line leaks
        if len(self.asked) % 4 == 0:
            raise ValueError("a bad sample")


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Iterator[None]:
    yield
    kept.clear()


def find(prober: Prober, probe: Probe) -> Findings | TracingFailed | None:
    replica: Any = prober
    return leak_probe.find(replica, prober.keeper, probe)


def names_the_line(found: Findings | TracingFailed | None) -> bool:
    assert isinstance(found, Findings)
    return any("test_leak_probe" in one.name for one in found.lines)


@pytest.fixture(autouse=True)
def tracing_ends_with_the_search() -> Iterator[None]:
    yield
    assert not tracemalloc.is_tracing()


def test_it_makes_what_workers_were_asked_for_again_and_again() -> None:
    prober = Prober()
    several: list[Any] = [("resume", 0, 5), ("task", 9, [4]), ("briefed", 10, ([5], NOTHING))]
    orders = (
        order("task", 7, [1, 2], []),
        order("released", 0, None, [64]),
        order("briefed", 8, ([3], NOTHING), []),
        order("several", 0, several, []),
    )
    assert names_the_line(find(prober, Probe(orders, 3)))
    expected = itertools.cycle([([1, 2],), ([3], NOTHING), ([4],), ([5], NOTHING)])
    assert prober.asked == list(itertools.islice(expected, leak_probe.ROUNDS * 3))


def test_without_anything_to_make_it_says_nothing() -> None:
    assert find(Prober(), Probe((order("resume", 0, 5, []),), 3)) is None


def test_a_stream_is_begun_anew_when_it_has_ended() -> None:
    assert names_the_line(find(prober := Prober(itertools.repeat(4)), Probe((), 2)))
    assert len(prober.asked) == leak_probe.ROUNDS * 2


def test_an_empty_stream_says_nothing() -> None:
    assert find(Prober(itertools.chain([3], itertools.repeat(0))), Probe((), 2)) is None


@pytest.mark.parametrize(("room", "says"), [(1, False), (3, False), (4, True)])
def test_if_it_has_become_too_large_it_says_what_it_has_seen(room: int, says: bool) -> None:
    prober = Prober(room=room)
    found = find(prober, Probe((order("task", 0, [0], []),), 1))
    assert len(prober.asked) == room
    assert names_the_line(found) if says else found is None


@pytest.mark.parametrize("bound", ["LONGEST", "CPU"])
def test_it_gives_up_after_a_time(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leak_probe, bound, 0.0)
    prober = Prober()
    assert find(prober, Probe((order("task", 0, [0], []),), 1)) is None
    assert len(prober.asked) == 1
