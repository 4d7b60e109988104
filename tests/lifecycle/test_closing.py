"""`close()`, garbage collection and several loaders side by side, inside one process."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from holdfast import DataLoader, LoaderClosed
from holdfast.engine import background
from tests.lifecycle.samples import Numbers
from tests.support.fake_driver import Consumer, FakeDriver
from tests.support.processes import children, eventually, kill

pytestmark = [
    pytest.mark.timeout(60, method="thread"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


class Gated(Numbers):
    """Samples from 4 on wait until the gate, a pipe, is opened; a worker that waits there says so in `arrivals`."""

    def __init__(self, size: int = 100) -> None:
        super().__init__(size)
        self.gate, self.opener = os.pipe()
        self.arrivals, self.arrive = os.pipe()

    def __getitem__(self, index: int) -> int:
        if index >= 4:
            os.write(self.arrive, b".")
            os.read(self.gate, 1)
        return index

    def wait_for_arrivals(self, number: int) -> None:
        while number:
            number -= len(os.read(self.arrivals, number))

    def close(self) -> None:
        for fd in (self.gate, self.opener, self.arrivals, self.arrive):
            os.close(fd)


@pytest.fixture
def gated() -> Any:
    dataset = Gated()
    yield dataset
    dataset.close()


def values(loader: Any) -> list[int]:
    return [batch.item() for batch in loader]


@pytest.mark.parametrize("persistent", [False, True])
def test_next_after_close_says_that_the_loader_was_closed(persistent: bool) -> None:
    loader = DataLoader(Numbers(100), num_workers=2, persistent_workers=persistent)
    iterator = iter(loader)
    next(iterator)
    loader.close()
    for _ in range(2):
        with pytest.raises(LoaderClosed, match="iter"):
            next(iterator)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_closed_loader_can_be_iterated_again(persistent: bool) -> None:
    loader = DataLoader(Numbers(10), num_workers=2, persistent_workers=persistent)
    for _ in range(3):
        next(iter(loader))
        loader.close()
        assert not children()
        assert values(loader) == list(range(10))
    loader.close()
    assert not children()


def test_closing_twice_or_before_the_first_use_does_nothing() -> None:
    loader = DataLoader(Numbers(10), num_workers=2)
    loader.close()
    iterator = iter(loader)
    next(iterator)
    loader.close()
    loader.close()
    with loader:
        loader.close()
    assert not children()
    without_workers = DataLoader(Numbers(3), num_workers=0)
    without_workers.close()
    assert values(without_workers) == [0, 1, 2]
    without_workers.close()


@pytest.mark.parametrize(
    "persistent",
    [False, True],
)
def test_next_after_the_end_of_the_epoch_is_the_end_again(persistent: bool) -> None:
    """As every Python iterator, and torch's."""
    with DataLoader(Numbers(4), num_workers=2, persistent_workers=persistent) as loader:
        iterator = iter(loader)
        assert values(iterator) == [0, 1, 2, 3]
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(iterator)
        assert list(iterator) == []


def test_the_wait_for_what_does_not_close_is_over_before_two_seconds_are() -> None:
    deadlines: list[float] = []

    class Never(background.BackgroundThread):
        def wait_closed(self, deadline: float) -> None:
            deadlines.append(deadline)

    with Consumer(FakeDriver()) as consumer:
        never = [Never(consumer.pool, lambda: None) for _ in range(2)]
        background.close_all(never, clock=lambda: 0.0)
        assert all(one.stage is background.CLOSING for one in never)
        for one in never:
            one.close_now()
    assert len(deadlines) == 2
    assert max(deadlines) <= 1.95  # the rest is for waking up and returning
    assert background.END_WITHIN + background.KILL_WITHIN < background.CLOSE_WITHIN


def test_closing_from_another_thread_wakes_a_waiting_next(gated: Gated) -> None:
    loader = DataLoader(gated, num_workers=2)
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    gated.wait_for_arrivals(2)  # so next() has nothing to wait for but close()
    took: list[float] = []

    def close() -> None:
        began = time.monotonic()
        loader.close()
        took.append(time.monotonic() - began)

    closer = threading.Timer(0.2, close)
    closer.start()
    with pytest.raises(LoaderClosed):
        next(iterator)
    closer.join()
    assert took[0] < 2.0
    assert not children()


def test_many_threads_may_close_at_the_same_time(gated: Gated) -> None:
    loader = DataLoader(gated, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    barrier = threading.Barrier(4)

    def close() -> None:
        barrier.wait()
        loader.close()
        left.append(children())

    left: list[set[int]] = []
    threads = [threading.Thread(target=close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # A caller of close() may rely on it.
    assert left == [set()] * 4


def test_closing_one_loader_does_not_disturb_the_others() -> None:
    loaders = [DataLoader(Numbers(200), num_workers=2) for _ in range(3)]
    iterators = [iter(loader) for loader in loaders]
    pids = [[worker.pid for worker in iterator._workers] for iterator in iterators]
    streams: list[list[int]] = [[], [], []]
    for step in range(200):
        for number, iterator in enumerate(iterators):
            if number == 1 and step >= 50:
                continue
            streams[number].append(next(iterator).item())
        if step == 49:
            loaders[1].close()
    assert streams == [list(range(200)), list(range(50)), list(range(200))]
    assert loaders[0].incidents == loaders[2].incidents == []
    assert [worker.pid for worker in iterators[2]._workers] == pids[2]
    for loader in loaders:
        loader.close()


def test_several_iterators_of_one_loader_end_apart_and_are_all_closed_by_close() -> None:
    loader = DataLoader(Numbers(20), num_workers=1)
    one, two, three = iter(loader), iter(loader), iter(loader)
    next(one), next(two), next(three)
    del one
    assert values(two) == list(range(1, 20))
    assert next(three).item() == 1
    loader.close()
    with pytest.raises(LoaderClosed):
        next(three)
    assert not children()


@pytest.mark.parametrize("persistent", [False, True])
def test_an_iterator_in_a_reference_cycle_is_collected_in_no_time(persistent: bool) -> None:
    """torch joins its workers for five seconds each then, in whatever line the collector happened to run."""
    loader = DataLoader(Numbers(100), num_workers=4, persistent_workers=persistent)
    iterator = iter(loader)
    next(iterator)
    cycle: list[Any] = [iterator]
    cycle.append(cycle)
    del iterator, loader
    assert len(children()) == 1  # only the collector ends them
    del cycle
    began = time.monotonic()
    gc.collect()
    assert time.monotonic() - began < 2.0
    assert eventually(lambda: not children(), 2.0)


def test_an_iterator_held_by_a_traceback_is_collected_with_hanging_workers_within_two_seconds(
    gated: Gated,
) -> None:
    def train() -> None:
        iterator = iter(DataLoader(gated, num_workers=4))
        for _ in range(4):
            next(iterator)
        gated.wait_for_arrivals(4)
        raise ZeroDivisionError

    try:
        train()
    except ZeroDivisionError as error:
        held = [error]
        held.append(held)  # type: ignore[arg-type]
        del error
    assert children()
    del held
    began = time.monotonic()
    gc.collect()
    assert time.monotonic() - began < 2.0
    assert eventually(lambda: not children(), 2.0)


def test_an_iterator_collected_in_another_thread_ends_its_workers() -> None:
    iterator = iter(DataLoader(Numbers(100), num_workers=2))
    next(iterator)
    box = [iterator]
    del iterator
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert eventually(lambda: not children(), 2.0)


def test_a_loader_works_in_a_thread_that_is_not_the_main_one() -> None:
    loader = DataLoader(Numbers(50), num_workers=2)
    streams: list[list[int]] = []
    threads = [threading.Thread(target=lambda: streams.append(values(loader))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert streams == [list(range(50))] * 3
    assert not children()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_two_threads_may_share_one_iterator() -> None:
    with DataLoader(Numbers(200), num_workers=2) as loader:
        iterator = iter(loader)
        seen: list[int] = []

        def consume() -> None:
            for batch in iterator:
                seen.append(batch.item())

        threads = [threading.Thread(target=consume) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(seen) == list(range(200))


def test_a_worker_killed_while_its_loader_closes_does_no_harm() -> None:
    for _ in range(5):
        loader = DataLoader(Numbers(100), num_workers=2)
        iterator = iter(loader)
        next(iterator)
        pid = iterator._workers[1].pid
        killer = threading.Thread(target=kill, args=(pid,))
        killer.start()
        loader.close()
        killer.join()
    assert not children()


def test_no_thread_of_a_closed_loader_stays() -> None:
    before = threading.active_count()
    loaders = [DataLoader(Numbers(10), num_workers=1) for _ in range(5)]
    iterators = [iter(loader) for loader in loaders]
    for iterator in iterators:
        next(iterator)
    for loader in loaders:
        loader.close()
    assert eventually(lambda: threading.active_count() == before, 5.0), threading.enumerate()


def test_a_batch_that_outlives_everything_does_not_keep_a_process_alive() -> None:
    iterator = iter(DataLoader(Numbers(10), num_workers=2, collate_fn=big))
    batch = next(iterator)
    del iterator
    assert eventually(lambda: not children(), 2.0)
    assert int(batch.sum()) == 0


def big(samples: list[int]) -> torch.Tensor:
    return torch.full((100_000,), samples[0])


def test_closing_in_a_later_epoch_is_not_the_end_of_that_epoch() -> None:
    loader = DataLoader(Numbers(10), num_workers=1, persistent_workers=True)
    assert values(loader) == list(range(10))
    iterator = iter(loader)
    next(iterator)
    loader.close()
    with pytest.raises(LoaderClosed):
        next(iterator)


class FailingSampler:
    def __iter__(self) -> Iterator[int]:
        yield 0
        raise ValueError("no more")


def test_a_sampler_that_failed_keeps_nothing_alive() -> None:
    loader = DataLoader(Numbers(10), num_workers=1, sampler=FailingSampler())
    with contextlib.suppress(ValueError):
        list(loader)
    del loader
    gc.collect()
    assert eventually(lambda: not children(), 5.0)
