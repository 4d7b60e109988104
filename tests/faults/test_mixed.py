"""Deaths among other things: errors, breaks, later epochs, slow samples, large indices, nesting."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import holdfast
from holdfast.processes.channel import Channel, _packets
from tests.faults.checker import (
    Batch,
    History,
    check_conduct,
    check_stream,
    play,
    recorded_batch,
    seeded,
)
from tests.faults.datasets import Recipe
from tests.faults.outside import kill_all, kill_and_see_it_dead, pids
from tests.faults.scenario import (
    arguments,
    golden,
    surroundings,
    wait_until_idle,
    wait_until_started,
)
from tests.faults.table import Case
from tests.support.processes import alive, descendants, eventually, kill

pytestmark = [pytest.mark.faults, pytest.mark.timeout(90, method="thread")]

KINDS = ["map", "iterable", "iterable, state", "iterable, state in iterator"]


def both(
    make: Callable[[Any], Any],
    *,
    epochs: int = 1,
    interfere: Any = None,
) -> tuple[History, History]:
    """holdfast's history under interference, and torch's without; `make` is given the class."""

    def ours() -> Any:
        seeded()
        return make(holdfast.DataLoader)

    def theirs() -> Any:
        seeded()
        return make(torch.utils.data.DataLoader)

    history = play(ours, epochs=epochs, interfere=interfere)
    check_conduct(history, innocent=set(), intensity=None)
    return history, play(theirs, epochs=epochs, stock=True)


# -- later epochs -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_death_in_a_later_epoch_is_redone_from_that_epoch(kind: str, tmp_path: Path) -> None:
    case = Case("SIGKILL", "working", kind=kind, persistent=True)

    def interfere(iterator: Any, epoch: int, number: int) -> None:
        if epoch == 1 and number in (2, 6):
            wait_until_started(iterator)
            kill_all(iterator)

    history, expected = both(
        lambda loader: loader(**arguments(case)), epochs=3, interfere=interfere
    )
    check_stream(history, expected)
    assert len(history.incidents) >= 2


class Counting(IterableDataset[Any]):
    """Gives other samples in every epoch, as a dataset that shuffles itself does."""

    def __init__(self, size: int) -> None:
        self.recipe = Recipe(size)
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        info = get_worker_info()
        assert info is not None
        numbers = list(range(info.id, self.recipe.size, info.num_workers))
        random.Random(self.epoch).shuffle(numbers)
        for number in numbers:
            yield self.recipe.sample(number)


class CountingWithState(Counting):
    """The same, but it can say where it is: epoch and place."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.place = 0
        self.loaded = False

    def __iter__(self) -> Iterator[Any]:
        if not self.loaded:
            self.epoch += 1
            self.place = 0
        self.loaded = False
        info = get_worker_info()
        assert info is not None
        numbers = list(range(info.id, self.recipe.size, info.num_workers))
        random.Random(self.epoch).shuffle(numbers)
        while self.place < len(numbers):
            self.place += 1
            yield self.recipe.sample(numbers[self.place - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]
        self.loaded = True


class CountingItsIterators(IterableDataset[Any]):
    """Counts in iter() itself; where it is in an epoch, its iterator knows."""

    def __init__(self, size: int) -> None:
        self.recipe = Recipe(size)
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        return _Counted(self)


class _Counted:
    def __init__(self, dataset: CountingItsIterators) -> None:
        info = get_worker_info()
        assert info is not None
        self.recipe = dataset.recipe
        self.numbers = list(range(info.id, self.recipe.size, info.num_workers))
        random.Random(dataset.epoch).shuffle(self.numbers)
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.place == len(self.numbers):
            raise StopIteration
        self.place += 1
        return self.recipe.sample(self.numbers[self.place - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


MOMENTS = {
    "before its first batch": (0, -1),
    "at its first batch": (1, 0),
    "in its middle": (1, 3),
    "at its end": (1, -1),
}
# Each moment, and each way of counting at a beginning and later.
_QUICK = {
    (Counting, "before its first batch"), (Counting, "in its middle"),
    (CountingWithState, "at its first batch"), (CountingWithState, "at its end"),
    (CountingItsIterators, "before its first batch"), (CountingItsIterators, "in its middle"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "at"),
    [
        pytest.param(
            dataset,
            at,
            id=f"{dataset.__name__}-{name}",
            marks=() if (dataset, name) in _QUICK else pytest.mark.slow,
        )
        for dataset in (Counting, CountingWithState, CountingItsIterators)
        for name, at in MOMENTS.items()
    ],
)
def test_a_dataset_that_counts_its_epochs_is_in_the_right_one_after_a_death(
    dataset: Any, at: tuple[int, int]
) -> None:
    def interfere(iterator: Any, epoch: int, number: int) -> None:
        if (epoch, number) == at:
            wait_until_started(iterator)
            kill_and_see_it_dead(pids(iterator)[1])

    history, expected = both(
        lambda loader: loader(dataset(30), 3, num_workers=2, persistent_workers=True),
        epochs=3,
        interfere=interfere,
    )
    check_stream(history, expected)
    assert len(history.incidents) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "when"),
    [
        pytest.param(kind, when, marks=() if when == "at both" else pytest.mark.slow)
        for kind in KINDS
        for when in ("before the break", "after the break", "at both")
    ],
)
def test_a_death_around_a_break_leaves_the_next_epoch_as_it_is_with_torch(
    kind: str, when: str
) -> None:
    """What was handed out before the break is still done, by the workers that live then."""
    case = Case("SIGKILL", "working", kind=kind, persistent=True)

    def run(loader: Any, strike: Callable[[Any], None]) -> list[Batch]:
        seen = []
        for epoch in range(2):
            iterator = iter(loader)
            for number in range(100):
                if epoch == 0 and number == 2 and when != "after the break":
                    strike(iterator)
                if epoch == 0 and number == 3:
                    if when != "before the break":
                        strike(iterator)
                    break
                batch = next(iterator, None)
                if batch is None:
                    break
                seen.append(recorded_batch(batch))
        iterator._shutdown_workers()
        return seen

    def strike(iterator: Any) -> None:
        wait_until_idle(iterator)
        kill_all(iterator)

    seeded()
    with holdfast.DataLoader(**arguments(case), max_restarts=None) as loader:
        ours = run(loader, strike)
    seeded()
    assert ours == run(torch.utils.data.DataLoader(**arguments(case)), lambda iterator: None)


# -- errors and deaths in one worker ------------------------------------------------------


class Faulty(IterableDataset[Any]):
    """Raises at some samples, and goes on after them: each replay meets the same errors."""

    def __init__(self, size: int, error: type[BaseException], bad: frozenset[int]) -> None:
        self.recipe = Recipe(size)
        self.error = error
        self.bad = bad

    def __iter__(self) -> Iterator[Any]:
        return _FaultyIterator(self)


class _FaultyIterator:
    def __init__(self, dataset: Faulty) -> None:
        info = get_worker_info()
        assert info is not None
        self.numbers = iter(range(info.id, dataset.recipe.size, info.num_workers))
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        number = next(self.numbers)
        if number in self.dataset.bad:
            raise self.dataset.error(f"sample {number}")
        return self.dataset.recipe.sample(number)


class FaultyMap(Dataset[Any]):
    def __init__(self, size: int, error: type[BaseException], bad: frozenset[int]) -> None:
        self.recipe = Recipe(size)
        self.error = error
        self.bad = bad

    def __len__(self) -> int:
        return self.recipe.size

    def __getitem__(self, number: int) -> Any:
        torch.rand(1)
        if number in self.bad:
            raise self.error(f"sample {number}")
        return self.recipe.sample(number)


@pytest.mark.parametrize(
    ("dataset", "error"),
    [
        (FaultyMap, ValueError),
        (FaultyMap, KeyboardInterrupt),
        (FaultyMap, SystemExit),
        (Faulty, ValueError),
        (Faulty, KeyboardInterrupt),
        (Faulty, SystemExit),
    ],
)
def test_errors_before_and_after_a_death_are_raised_once_each(
    dataset: Any, error: type[BaseException]
) -> None:
    bad = frozenset({1, 9, 21})

    def interfere(iterator: Any, epoch: int, number: int) -> None:
        if number == 4:
            wait_until_started(iterator)
            kill_all(iterator)

    seeded()
    history = play(
        lambda: _seeded(holdfast.DataLoader, dataset(30, error, bad)), interfere=interfere
    )
    # torch cannot bear every kind of error; a ValueError at the same places is the same stream.
    expected = play(
        lambda: _seeded(torch.utils.data.DataLoader, dataset(30, ValueError, bad)), stock=True
    )
    check_stream(history, expected)
    assert len(history.errors) == 3
    kind = ValueError if error is ValueError else holdfast.UnusualExit
    assert {one.kind for one in history.errors} == {kind}


def _seeded(loader: Any, dataset: Any) -> Any:
    seeded()
    return loader(dataset, 3, num_workers=2)


# -- slow samples -------------------------------------------------------------------------


class Slow(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            time.sleep(1.5)
        return index


@pytest.mark.slow
def test_a_slow_sample_is_given_twice_the_time_at_its_second_try() -> None:
    with holdfast.DataLoader(Slow(), 2, num_workers=2, stall_timeout=1.0) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]
        (incident,) = loader.incidents
    assert (incident.kind, incident.sample) == ("stalled", 5)
    assert "sleep" in incident.stack or "__getitem__" in incident.stack


def test_a_worker_that_waits_for_the_consumer_does_not_stall() -> None:
    """Its batches are ready and they are not taken: that is no lack of progress."""
    case = Case("SIGKILL", "working", kind="iterable, state", payload=200_000)
    seeded()
    with holdfast.DataLoader(**arguments(case), stall_timeout=0.3) as loader:
        iterator = iter(loader)
        got = [recorded_batch(next(iterator))]
        time.sleep(1)  # a long training step; nothing is to happen in it
        assert loader.incidents == []
        got += [recorded_batch(batch) for batch in iterator]
        assert loader.incidents == []
    assert got == golden(case).epochs[0]


def test_a_worker_that_sends_a_large_state_slowly_does_not_stall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each part of its message that arrives is progress, also if the whole takes longer than
    `stall_timeout` to send. A worker that hangs between two parts is in the table (mid-send)."""
    case = Case("SIGKILL", "working", kind="iterable, state", payload=200_000, workers=1)

    def send(self: Channel, message: Any, between: object = None) -> None:
        packets = _packets(message)
        for packet in packets:
            self.sock.sendmsg(packet)
            if len(packets) > 1:
                time.sleep(0.2)

    monkeypatch.setattr(Channel, "send", send)  # in workers, which are forked
    seeded()
    with holdfast.DataLoader(**arguments(case), stall_timeout=0.5) as loader:
        got = [recorded_batch(batch) for batch in loader]
        assert loader.incidents == []
    assert got == golden(case).epochs[0]


# -- other shapes of use ------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_without_order_every_sample_is_delivered_once(kind: str) -> None:
    case = Case("SIGKILL", "working", kind=kind)
    with holdfast.DataLoader(**arguments(case), in_order=False, max_restarts=None) as loader:
        iterator = iter(loader)
        numbers: list[int] = []
        for number, batch in enumerate(iterator):
            numbers += batch["number"].tolist()
            if number in (1, 3, 5):
                wait_until_started(iterator)
                kill_all(iterator)
    assert sorted(numbers) == list(range(case.size))


class Sums(Dataset[Any]):
    def __len__(self) -> int:
        return 1 << 20

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [torch.tensor(sum(indices)) + torch.rand(())]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_batches_of_very_many_indices_survive_a_death(number: int) -> None:
    """The order to the worker is larger than the socket takes at once."""
    batches = [list(range(start, start + 100_000)) for start in range(12)]

    def run(loader: Any, **options: Any) -> list[float]:
        seeded()
        made = loader(Sums(), batch_sampler=batches, num_workers=2, **options)
        got = []
        iterator = iter(made)
        for place in range(len(batches)):
            if place == 2 and options:
                wait_until_started(iterator)
                kill(pids(iterator)[1], number=number)
            got.append(float(next(iterator)))
        assert next(iterator, None) is None
        if options:
            assert len(made.incidents) == 1
        return got

    ours = run(holdfast.DataLoader, stall_timeout=1.0)
    assert ours == run(torch.utils.data.DataLoader)


class Nested(Dataset[Any]):
    """Every sample is read through a loader of its own, inside the worker."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.loader: Any = None

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        if self.loader is None:
            self.loader = holdfast.DataLoader(
                list(range(1000)), num_workers=1, persistent_workers=True
            )
            self.iterator = iter(self.loader)
            Path(self.folder, str(os.getpid())).touch()
        return index + 0 * next(self.iterator)


def test_the_workers_of_a_killed_worker_end_with_it(tmp_path: Path) -> None:
    with holdfast.DataLoader(Nested(str(tmp_path)), 2, num_workers=2) as loader:
        iterator = iter(loader)
        got = [next(iterator) for _ in range(4)]
        victim = pids(iterator)[0]
        assert (tmp_path / str(victim)).exists()
        nested = descendants(victim)
        assert nested
        kill(victim)
        got += list(iterator)
        assert eventually(lambda: not any(alive(pid) for pid in nested))
    assert [int(n) for batch in got for n in batch.flatten()] == list(range(40))


# -- the trainer's own signal handlers ----------------------------------------------------


@pytest.mark.parametrize("handler", ["ignored", "raising"])
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_what_the_trainer_does_with_sigchld_does_not_matter(method: str, handler: str) -> None:
    """The nursery is forked with the trainer's handlers, and reaps its workers all the same."""
    case = Case("SIGKILL", "working", method)

    def refuse(number: int, frame: Any) -> None:
        if os.getpid() != me:
            raise RuntimeError("the trainer's handler runs in another process")

    me = os.getpid()
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN if handler == "ignored" else refuse)
    try:

        def interfere(iterator: Any, epoch: int, number: int) -> None:
            if number == 3:
                wait_until_started(iterator)
                kill(pids(iterator)[1])

        def make() -> Any:
            seeded()
            context = None if method == "fork" else method
            return holdfast.DataLoader(**arguments(case), multiprocessing_context=context)

        history = play(make, interfere=interfere)
    finally:
        signal.signal(signal.SIGCHLD, before)
    check_stream(history, golden(case))
    check_conduct(history, innocent={0}, intensity=None)
    (incident,) = history.incidents
    assert (incident.signal, incident.exitcode) == ("SIGKILL", -9)


@pytest.mark.parametrize(
    ("number", "method"),
    [
        (signal.SIGTERM, "fork"),
        (signal.SIGINT, "fork"),
        (signal.SIGUSR1, "fork"),
        pytest.param(signal.SIGTERM, "spawn", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, "spawn", marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, "spawn", marks=[pytest.mark.slow]),
    ],
)
def test_a_signal_to_the_whole_process_group_is_for_the_trainer_alone(
    number: int, method: str, tmp_path: Path
) -> None:
    """A scheduler's warning before it takes the machine away: the trainer goes on until it stops.

    All are asked by the file they would leave. Only our own children are signalled here, one by
    one, as the group is that of the test runner.
    """
    case = Case("SIGTERM", "working", method)
    calls = tmp_path / "calls"

    def handler(signum: int, frame: Any) -> None:
        with calls.open("a") as file:
            file.write(f"{os.getpid()}\n")

    before = signal.signal(number, handler)
    try:

        def interfere(iterator: Any, epoch: int, place: int) -> None:
            if place == 3:
                wait_until_started(iterator)
                everybody = descendants()
                assert len(everybody) >= 3
                kill(*everybody, number=number)
                signal.raise_signal(number)

        def make() -> Any:
            seeded()
            context = None if method == "fork" else method
            return holdfast.DataLoader(**arguments(case), multiprocessing_context=context)

        with surroundings(case, tmp_path):
            history = play(make, interfere=interfere)
    finally:
        signal.signal(number, before)
    check_stream(history, golden(case))
    assert history.incidents == []
    assert calls.read_text().split() == [str(os.getpid())]
