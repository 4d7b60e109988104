"""While the consumer waits in next(), or does not come to next() at all, the others go on."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import DataLoader
from tests.support.parts import identity
from tests.support.processes import eventually

pytestmark = pytest.mark.timeout(60)
PATIENCE = 30.0


class Held:
    """Its samples are made only when there is a file ``go``; with `once`, only the first attempt
    waits for it."""

    def __init__(self, folder: Path, *, once: bool = False) -> None:
        self.folder = folder
        self.once = once

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        attempts = len(list(self.folder.glob("begun-*")))
        (self.folder / f"begun-{os.getpid()}").touch()
        if not (self.once and attempts):
            assert eventually((self.folder / "go").exists, PATIENCE)
        return index


def answer_of(question: Callable[[], Any]) -> Any:
    """What it says, asked by another thread; it must say it within a deadline."""
    answers: list[Any] = []
    asker = threading.Thread(target=lambda: answers.append(question()), daemon=True)
    asker.start()
    asker.join(PATIENCE / 2)
    assert answers, "no answer while next() waits"
    return answers[0]


@pytest.fixture
def waiting(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Any, list[Any]]]:
    """An iterator in whose next() a thread waits for a sample, and what that thread gets."""
    loader = DataLoader(Held(tmp_path, **request.param), num_workers=1, collate_fn=identity)
    iterator: Any = iter(loader)
    got: list[Any] = []
    consumer = threading.Thread(target=lambda: got.append(next(iterator)))
    consumer.start()
    try:
        assert eventually(lambda: any(tmp_path.glob("begun-*")))
        yield iterator, got
    finally:
        (tmp_path / "go").touch()
        consumer.join(PATIENCE)
        loader.close()
    assert not consumer.is_alive()
    assert got == [[0]]


@pytest.mark.parametrize("waiting", [{}], indirect=True)
def test_a_handle_answers_while_next_waits(waiting: tuple[Any, list[Any]], tmp_path: Path) -> None:
    iterator, got = waiting
    begun = next(tmp_path.glob("begun-*")).name
    worker = iterator._workers[0]
    assert f"begun-{answer_of(lambda: worker.pid)}" == begun
    assert answer_of(worker.is_alive) is True
    assert answer_of(lambda: worker.exitcode or "none") == "none"
    assert "exitcode=None" in answer_of(lambda: repr(worker))
    assert not got, "the answers came while the sample was being made"


@pytest.mark.parametrize("waiting", [{"once": True}], indirect=True)
def test_a_worker_is_terminated_while_next_waits(
    waiting: tuple[Any, list[Any]], tmp_path: Path
) -> None:
    iterator, got = waiting
    worker = iterator._workers[0]
    before = answer_of(lambda: worker.pid)
    answer_of(lambda: worker.terminate() or "sent")
    assert eventually(lambda: got == [[0]]), "its replacement makes the sample"
    assert f"begun-{before}" in {path.name for path in tmp_path.glob("begun-*")}
    assert len(list(tmp_path.glob("begun-*"))) == 2


class Arrived:
    """Leaves a file for each order that has reached it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 1 << 30

    def __getitems__(self, indices: list[int]) -> list[int]:
        (self.folder / f"arrived-{indices[0]}").touch()
        return [len(indices)]


def test_an_order_larger_than_the_socket_reaches_its_worker_without_the_consumer(
    tmp_path: Path,
) -> None:
    """Several megabytes of indices, and a consumer that is busy elsewhere all the time."""
    size = 1 << 20
    batches = [list(range(at, at + size)) for at in range(0, 3 * size, size)]
    loader = DataLoader(Arrived(tmp_path), batch_sampler=batches, num_workers=1, prefetch_factor=1)
    with loader:
        iterator = iter(loader)
        assert eventually((tmp_path / "arrived-0").exists), "the first order"
        assert int(next(iterator)[0]) == size
        assert eventually((tmp_path / f"arrived-{size}").exists), "one given out by next()"
        assert [int(batch[0]) for batch in iterator] == [size, size]


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("an error without words")


class Fails:
    def __init__(self, at: int) -> None:
        self.at = at

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.at:
            raise Unspeakable(index)
        return torch.tensor(index)


@pytest.mark.parametrize("limit", [None, "4GiB"])
def test_an_error_without_words_arrives(limit: str | None) -> None:
    loader = DataLoader(Fails(2), num_workers=1, worker_memory_limit=limit, max_restarts=0)
    with loader:
        iterator = iter(loader)
        assert [int(next(iterator)) for _ in range(2)] == [0, 1]
        with pytest.raises(Unspeakable) as caught:
            next(iterator)
        assert caught.value.holdfast_sample.index == 2  # type: ignore[attr-defined]
        assert int(next(iterator)) == 3
    assert not loader.incidents


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_that_failed_is_not_counted_as_one(num_workers: int) -> None:
    loader = DataLoader(Fails(2), num_workers=num_workers)
    iterator = iter(loader)
    delivered = 0
    for _ in range(4):
        try:
            next(iterator)
            delivered += 1
        except Unspeakable:
            pass
    assert delivered == loader.stats()["batches"] == 3


# -- what is awaited ----------------------------------------------------------------------


@pytest.mark.parametrize("in_order", [True, False])
def test_the_error_of_a_timeout_says_which_workers_are_awaited_and_what_they_do(
    tmp_path: Path, in_order: bool
) -> None:
    held = Pair(tmp_path)
    with DataLoader(held, num_workers=2, timeout=PATIENCE, in_order=in_order) as loader:
        iterator: Any = iter(loader)
        assert eventually(lambda: len(list(tmp_path.glob("begun-*"))) == 2)
        iterator._timeout = 0.1
        with pytest.raises(RuntimeError) as error:
            next(iterator)
        pids = [worker.pid for worker in iterator._workers]
        driver = iterator._pool.driver
        driver._slots[0].pid = None
        assert driver.place(0) == "its process has not started yet"
        (tmp_path / "go").touch()
    said = str(error.value).replace("\n", " ")
    first, second = (
        rf"worker {worker} \(pid {pid}\): fetch batch {worker} sample 0, \d+\.\d s"
        for worker, pid in enumerate(pids)
    )
    awaited = first if in_order else f"any of {first}; {second}"
    assert re.search(rf"no batch came within timeout=0\.1; awaited is {awaited}$", said), said


class Pair(Held):
    def __len__(self) -> int:
        return 2
