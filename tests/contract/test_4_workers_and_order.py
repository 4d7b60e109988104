"""contract.md section 4: which worker makes which batch, in what order they come, how far ahead."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.datasets import (
    Counting,
    Meeting,
    Numbers,
    Pids,
    QuietStream,
    SlowInOneWorker,
    StreamMeeting,
)
from tests.support.loaders import Loader
from tests.support.parts import identity
from tests.support.processes import eventually

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:.*excessive worker creation"),
]


def makers(loader: Any) -> list[tuple[int, int]]:
    """(first index, worker) of each batch."""
    return [(batch[0][0], batch[0][2]) for batch in loader]


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("prefetch_factor", [1, 2, 4])
def test_batch_i_is_made_by_worker_i_modulo_n(
    loader_class: Loader, num_workers: int, prefetch_factor: int
) -> None:
    loader = loader_class(
        Pids(22),
        batch_size=2,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        collate_fn=identity,
    )
    assert makers(loader) == [(2 * i, i % num_workers) for i in range(11)]


@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_worker_keeps_its_own_batches(loader_class: Loader, slow: int) -> None:
    loader = loader_class(
        SlowInOneWorker(10, slow, 0.05), batch_size=1, num_workers=2, collate_fn=identity
    )
    assert makers(loader) == [(i, i % 2) for i in range(10)]


@pytest.mark.parametrize(
    ("persistent_workers", "leave_after"),
    [
        (True, 0), (True, 1), (True, 3), (True, None), (False, 1),
        # New workers have nothing to remember.
        *(pytest.param(False, after, marks=pytest.mark.slow) for after in (0, 3, None)),
    ],
)  # fmt: skip
def test_every_epoch_begins_with_worker_0_again(
    loader_class: Loader, persistent_workers: bool, leave_after: int | None
) -> None:
    loader = loader_class(
        Pids(5), num_workers=2, persistent_workers=persistent_workers, collate_fn=identity
    )
    for _ in range(3):
        assert makers(loader) == [(i, i % 2) for i in range(5)]
        for number, _ in enumerate(loader):
            if number == leave_after:
                break


def test_persistent_workers_are_the_same_processes_in_every_epoch(loader_class: Loader) -> None:
    def pids(loader: Any) -> list[int]:
        return [batch[0][1] for batch in loader]

    kept = loader_class(Pids(4), num_workers=2, persistent_workers=True, collate_fn=identity)
    assert pids(kept) == pids(kept) == pids(kept)
    fresh = loader_class(Pids(4), num_workers=2, collate_fn=identity)
    assert set(pids(fresh)).isdisjoint(pids(fresh))


class Ranges(QuietStream):
    """Worker 0 yields 0 to 4, worker 1 yields 5 to 9 and on."""

    def indices(self) -> range:
        import torch

        info = torch.utils.data.get_worker_info()
        assert info is not None
        return range(5 * info.id, 5 * info.id + 5 + self.size * info.id)


def test_streams_of_an_iterable_are_interleaved_one_batch_each(loader_class: Loader) -> None:
    loader = loader_class(Ranges(0), batch_size=None, num_workers=2)
    assert [int(sample[0]) for sample in loader] == [0, 5, 1, 6, 2, 7, 3, 8, 4, 9]


def test_an_ended_worker_drops_out_of_the_turn(loader_class: Loader) -> None:
    loader = loader_class(Ranges(3), batch_size=None, num_workers=2)
    assert [int(sample[0]) for sample in loader] == [0, 5, 1, 6, 2, 7, 3, 8, 4, 9, 10, 11, 12]
    loader = loader_class(QuietStream(6, "uneven"), batch_size=None, num_workers=3)
    turns = [(sample[0].item(), sample[1].item()) for sample in loader]
    assert turns == [(i, w) for i in range(6) for w in range(3) if i < 6 - 2 * w]


class StuckUntilLetGo(Numbers):
    """Worker 0 does not answer before it is let go."""

    def __init__(self, size: int, let_go: Any) -> None:
        super().__init__(size)
        self.let_go = let_go

    def __getitem__(self, index: int) -> tuple[int, int]:
        import torch

        info = torch.utils.data.get_worker_info()
        assert info is not None
        if info.id == 0:
            assert self.let_go.wait(30)
        return index, info.id


def test_out_of_order_a_stuck_workers_own_batches_come_last(loader_class: Loader) -> None:
    """Each worker has prefetch_factor tasks of its own from the start: those of worker 0 wait,
    and no other worker takes them over."""
    # The consumer lets go, and only when it has all the others: batches of two workers that are
    # both there when it looks may come in any order.
    let_go = multiprocessing.Event()
    loader = loader_class(
        StuckUntilLetGo(10, let_go),
        batch_size=None,
        num_workers=2,
        in_order=False,
        prefetch_factor=2,
    )
    iterator = iter(loader)
    assert [tuple(next(iterator)) for _ in range(8)] == [(i, 1) for i in (1, 3, 4, 5, 6, 7, 8, 9)]
    let_go.set()
    assert [tuple(batch) for batch in iterator] == [(0, 0), (2, 0)]


def test_out_of_order_has_no_say_without_workers(loader_class: Loader) -> None:
    assert list(loader_class(Numbers(4), batch_size=None, in_order=False)) == [0, 1, 2, 3]


@pytest.mark.parametrize("prefetch_factor", [1, 2, 5])
def test_prefetch_starts_at_iter_and_goes_no_further_than_asked(
    loader_class: Loader, prefetch_factor: int
) -> None:
    counter = multiprocessing.Value("i", 0)
    loader = loader_class(
        Counting(40, counter), batch_size=2, num_workers=2, prefetch_factor=prefetch_factor
    )
    iterator = iter(loader)
    ahead = 2 * 2 * prefetch_factor
    assert eventually(lambda: counter.value == ahead), counter.value
    next(iterator)
    assert eventually(lambda: counter.value == ahead + 2), counter.value
    time.sleep(0.3)
    assert counter.value == ahead + 2


class Watched:
    """A sampler that counts how far it was advanced, and how often it was started."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.given = 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        for index in range(self.size):
            self.given += 1
            yield index


def test_the_sampler_is_advanced_just_as_far_as_the_prefetch(loader_class: Loader) -> None:
    sampler = Watched(30)
    iterator = iter(
        loader_class(
            Numbers(30), batch_size=None, sampler=sampler, num_workers=2, prefetch_factor=3
        )
    )
    assert sampler.given == 6
    for taken in range(1, 10):
        next(iterator)
        assert sampler.given == 6 + taken
    without = Watched(30)
    iterator = iter(loader_class(Numbers(30), batch_size=None, sampler=without))
    assert without.given == 0
    next(iterator)
    assert without.given == 1


@pytest.mark.parametrize("num_workers", [2, 4])
@pytest.mark.parametrize("persistent_workers", [False, True])
def test_all_workers_are_up_at_the_same_time(
    loader_class: Loader, num_workers: int, persistent_workers: bool
) -> None:
    """Code that waits in the dataset until every worker has come must not wait for ever."""
    barrier = multiprocessing.Barrier(num_workers)
    loader = loader_class(
        Meeting(3 * num_workers, barrier),
        batch_size=None,
        num_workers=num_workers,
        persistent_workers=persistent_workers,
    )
    for _ in range(2):
        assert list(loader) == list(range(3 * num_workers))


def test_all_workers_of_an_iterable_are_up_at_the_same_time(loader_class: Loader) -> None:
    loader = loader_class(
        StreamMeeting(2, multiprocessing.Barrier(3)), batch_size=None, num_workers=3
    )
    assert list(loader) == [0, 0, 0, 1, 1, 1]


class MeetingInInit:
    def __init__(self, barrier: Any) -> None:
        self.barrier = barrier

    def __call__(self, worker_id: int) -> None:
        self.barrier.wait(timeout=30)


def test_all_workers_run_worker_init_fn_at_the_same_time(loader_class: Loader) -> None:
    meeting = MeetingInInit(multiprocessing.Barrier(3))
    loader = loader_class(Numbers(4), batch_size=None, num_workers=3, worker_init_fn=meeting)
    assert list(loader) == [0, 1, 2, 3]


def test_workers_start_even_when_there_is_nothing_for_them_to_do(loader_class: Loader) -> None:
    """torch starts all of them at iter(), whatever the number of batches."""
    meeting = MeetingInInit(multiprocessing.Barrier(3))
    assert list(
        loader_class(Numbers(1), batch_size=None, num_workers=3, worker_init_fn=meeting)
    ) == [0]
