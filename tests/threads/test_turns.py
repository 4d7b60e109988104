"""Worker threads that take turns: when they do, and that nothing else changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.utils.data

from holdfast import DataLoader
from holdfast.engine.bells import Bell
from holdfast.threads import turns
from holdfast.threads.turns import ROUND, SOON, TRIAL, Choice, Inbox, Turns
from tests.threads import test_same_batches, test_worker_threads
from tests.threads.datasets import Gate, Plain

# -- which way is quicker -------------------------------------------------------------------


def play(choice: Choice, rounds: int, seconds: Callable[[bool], float]) -> list[bool]:
    """What it chose, in rounds that take so long with and without turns."""
    chosen = []
    for _ in range(rounds):
        chosen.append(choice.turns)
        choice.round_took(seconds(choice.turns))
    return chosen


def test_turns_are_taken_where_that_is_quicker() -> None:
    chosen = play(Choice(), 1000, lambda turns: 80e-6 if turns else 190e-6)
    assert chosen[:TRIAL] == [False] * TRIAL
    assert sum(chosen) > 980 - TRIAL


def test_turns_are_not_taken_where_that_is_slower_or_makes_no_difference() -> None:
    for part in (0.97, 1.0, 1.2, 50.0):
        choice = Choice()
        chosen = play(choice, 1000, lambda turns, part=part: 100e-6 * (part if turns else 1.0))
        assert sum(chosen) < 30


def test_a_trial_that_is_hopeless_ends_after_a_round() -> None:
    chosen = play(Choice(), SOON, lambda turns: 1.0 if turns else 100e-6)
    assert sum(chosen) == 1


def test_slow_batches_are_left_alone() -> None:
    assert not any(play(Choice(), 5000, lambda turns: 1e-6 if turns else 0.01))


def test_it_follows_work_that_changes() -> None:
    choice = Choice()
    play(choice, 100, lambda turns: 80e-6 if turns else 190e-6)
    assert choice.turns
    play(choice, 300, lambda turns: 300e-6 if turns else 190e-6)
    assert not choice.turns
    chosen = play(choice, 3000, lambda turns: 80e-6 if turns else 190e-6)
    assert sum(chosen[-1000:]) > 900


def test_single_long_rounds_do_not_mislead_it() -> None:
    choice = Choice()
    count = iter(range(10**6))

    def seconds(turns: bool) -> float:
        return (80e-6 if turns else 190e-6) + (0.05 if next(count) % 3 == 0 else 0.0)

    chosen = play(choice, 2000, seconds)
    assert sum(chosen[1000:]) > 900


def test_trials_become_rare() -> None:
    chosen = play(Choice(), 20_000, lambda turns: 200e-6 if turns else 190e-6)
    assert sum(chosen) < 20 * TRIAL


def test_a_trial_that_stops_everything_ends_with_the_first_batch() -> None:
    together = Turns(Bell())
    now, came = 100.0, 0
    while not together.choice.turns:
        now += 1e-4
        together.batch_came(now)
    while together.choice.turns:
        now += 0.1
        came += 1
        together.batch_came(now)
    assert came == 1


def test_rests_are_as_long_as_some_rounds(always: None) -> None:
    together = Turns(Bell())
    for pace in (1e-6, 1e-4, 1e-2):
        for count in range(1, 3 * ROUND):
            together.batch_came(count * pace)
        assert together.begin(None) == pytest.approx(min(max(3 * ROUND * pace, 0.002), 0.03))


# -- waking ---------------------------------------------------------------------------------


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(call()), daemon=True)
    thread.start()
    return thread, got


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def test_an_order_wakes_a_worker_that_sleeps() -> None:
    inbox: Inbox[int] = Inbox()
    thread, got = in_thread(lambda: inbox.get(lambda: 0.0))
    until(lambda: inbox._asleep)
    inbox.put(1)
    thread.join(20)
    assert got == [1]


def test_an_order_wakes_no_worker_that_rests_and_it_looks_itself() -> None:
    inbox: Inbox[int] = Inbox()
    thread, got = in_thread(lambda: inbox.get(lambda: 60.0))
    until(lambda: inbox.resting)
    inbox.put(1)
    assert inbox.full
    assert inbox.resting
    assert not got
    inbox.wake()
    thread.join(20)
    assert got == [1]
    inbox.put(2)
    thread, got = in_thread(lambda: inbox.get(lambda: 0.001))  # no thread wakes it
    thread.join(20)
    assert got == [2]


def test_no_order_is_lost_between_two_threads() -> None:
    inbox: Inbox[int] = Inbox()
    rests = iter([0.0, 0.001, 0.0] * 10_000)
    got: list[int] = []

    def work() -> None:
        while len(got) < 5000:
            got.append(inbox.get(lambda: next(rests)))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    for number in range(5000):
        inbox.put(number)
        if not number % 7:
            time.sleep(0)
    thread.join(60)
    assert got == list(range(5000))


def test_the_consumer_wakes_the_worker_it_awaits_and_the_last_worker_the_consumer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "SHORTEST_REST", 60.0)
    bell = Bell()
    together = Turns(bell)
    together.choice.turns = True
    order: list[Any] = []
    inboxes: list[Inbox[Any]] = [Inbox() for _ in range(3)]

    def work(worker: int) -> None:
        while (found := inboxes[worker].get(lambda: together.end(worker))) is not None:
            order.append((worker, found))

    threads = [threading.Thread(target=work, args=(one,), daemon=True) for one in range(3)]
    for one, (inbox, thread) in enumerate(zip(inboxes, threads, strict=True)):
        together.join(one, inbox)
        thread.start()

    def done(lap: int) -> bool:
        return len(order) == 4 * lap + 4

    for lap in range(3):
        until(lambda: all(inbox.resting for inbox in inboxes))
        for worker in (0, 2):
            inboxes[worker].put(("first", lap))
            inboxes[worker].put(("second", lap))
        time.sleep(0.01)
        assert len(order) == 4 * lap  # an order wakes none
        assert together.begin(2)
        bell.wait(20, partial(done, lap), patience=20)
        expected = [(w, (what, lap)) for w in (2, 0) for what in ("first", "second")]
        assert order[4 * lap :] == expected
    for inbox in inboxes:
        inbox.put(None)
        inbox.wake()
    for thread in threads:
        thread.join(20)


def test_workers_that_have_ended_do_not_keep_others_from_being_woken() -> None:
    together = Turns(Bell())
    together.choice.turns = True
    inbox: Inbox[int] = Inbox()
    together.join(5, Inbox())
    together.join(2, inbox)  # and none has the numbers 0, 1, 3 and 4
    thread, got = in_thread(lambda: inbox.get(lambda: 60.0))
    until(lambda: inbox.resting)
    inbox.put(1)
    together.end(5)
    thread.join(20)
    assert got == [1]


# -- a loader whose threads always take turns ------------------------------------------------


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "Choice", Always)


class Always(Choice):
    turns = True
    hopeless = None

    def __init__(self) -> None:
        pass

    def round_took(self, seconds: float) -> None:
        pass


def _also_with_turns(*modules: ModuleType) -> dict[str, Any]:
    """The tests of these modules, each in turns too. Scripts of their own would not be."""
    found: dict[str, Any] = {}
    for module in modules:
        for name, value in vars(module).items():
            if name.startswith("test_") and "script" not in name and "linux" not in name:
                found[f"{name}_also_in_turns"] = value
    return found


class TestInTurns:
    pass


for _name, _test in _also_with_turns(test_same_batches, test_worker_threads).items():
    setattr(TestInTurns, _name, staticmethod(_test))
TestInTurns = pytest.mark.slow(pytest.mark.usefixtures("always")(TestInTurns))  # type: ignore[misc]


class Meeting(torch.utils.data.Dataset[int]):
    """Each batch waits until the other worker is in one too."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        self.barrier.wait(60)
        return index


@pytest.mark.parametrize(
    "options", [{}, {"prefetch_factor": 5}, {"persistent_workers": True}], ids=str
)
def test_workers_may_wait_for_each_other(options: dict[str, Any], always: None) -> None:
    loader = DataLoader(Meeting(), batch_size=2, num_workers=2, worker_method="thread", **options)
    assert sorted(int(one) for batch in loader for one in batch) == list(range(40))


def test_a_batch_that_is_ready_comes_although_the_next_one_hangs(always: None) -> None:
    gate = Gate(2)
    dataset = Gated(40, gate)
    loader = DataLoader(dataset, num_workers=1, prefetch_factor=8, worker_method="thread")
    batches = iter(loader)
    assert [int(next(batches)), int(next(batches))] == [0, 1]  # the worker is in sample 2
    gate.open.set()
    assert [int(batch) for batch in batches] == list(range(2, 40))


class Gated(Plain):
    def __init__(self, length: int, gate: Gate) -> None:
        super().__init__(length)
        self.gate = gate

    def __getitem__(self, index: int) -> int:
        self.gate.enter(index)
        return index


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_long_streams_of_small_batches_are_torchs(workers: int, always: None) -> None:
    data = torch.arange(30_000)
    loader = DataLoader(data, batch_size=8, num_workers=workers, worker_method="thread")
    found = torch.cat(list(loader))
    assert torch.equal(found, data)


def test_each_round_of_a_loader_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []
    monkeypatch.setattr(Choice, "round_took", lambda self, seconds: told.append(seconds))
    data = torch.arange(ROUND * 20)
    list(DataLoader(data, batch_size=1, num_workers=2, worker_method="thread"))
    assert len(told) == 19  # the first one is not complete: threads start in it
    assert min(told) > 0
