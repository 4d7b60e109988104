"""A recorded history, played again, gives the same actions: the machine is a function of its events.

The histories are those of real runs with real deaths. What is compared are the actions themselves,
with tasks, exits and results in them; results are the very objects that the workers' answers became.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import holdfast
from holdfast.engine import events as ev
from holdfast.engine import iterator as iterators
from holdfast.engine.machine import Machine
from tests.support.processes import eventually

pytestmark = [
    pytest.mark.timeout(90, method="thread"),
    pytest.mark.filterwarnings("ignore::holdfast.BadSampleWarning"),
]


class Recorded(Machine):
    """A machine that writes down what it is told and what it answers."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.options = options
        self.history: list[tuple[ev.Event, Sequence[ev.Action]]] = []

    def handle(self, event: ev.Event) -> Sequence[ev.Action]:
        actions = super().handle(event)
        self.history.append((event, actions))
        return actions


class Sevens(Dataset[torch.Tensor]):
    """Of which some are bad, in the way the test wants it."""

    def __init__(self, fault: Callable[[], None] | None = None) -> None:
        self.fault = fault

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 17 and self.fault is not None:
            self.fault()
        return torch.full((10,), index)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        return iter(range(info.id, 30, info.num_workers))


def crash() -> None:
    os._exit(3)


def fail() -> None:
    raise ValueError("torn")


def hang() -> None:
    signal.pause()


def just_run(loader: Any) -> None:
    for _ in loader:
        pass


def kill_some(loader: Any) -> None:
    for number, _ in enumerate(iterator := iter(loader)):
        if number in (2, 5):
            os.kill(iterator._workers[number % 2].pid, signal.SIGKILL)


def kill_the_nursery(loader: Any) -> None:
    iterator = iter(loader)
    next(iterator)
    os.kill(iterator._pool.driver.resources.nursery.pid, signal.SIGKILL)
    assert eventually(lambda: loader.incidents)  # else all may be made before it is dead
    for _ in iterator:
        pass


def break_off(loader: Any) -> None:
    for epoch in range(3):
        for number, _ in enumerate(iterator := iter(loader)):
            if number == 3 and epoch == 1:
                os.kill(iterator._workers[0].pid, signal.SIGKILL)
            if number == 4 and epoch < 2:
                break


def retire(loader: Any) -> None:
    for number, _ in enumerate(iterator := iter(loader)):
        if number == 3:
            with iterator._pool.lock:
                assert iterator._pool.driver.urge(0, "retire")


CASES: dict[str, tuple[dict[str, Any], Callable[[Any], None], set[type]]] = {
    "kills": ({"dataset": Sevens()}, kill_some, {ev.WorkerExited}),
    "kills, as it comes": ({"dataset": Sevens(), "in_order": False}, kill_some, {ev.WorkerExited}),
    "a nursery": ({"dataset": Sevens()}, kill_the_nursery, {ev.WorkerExited}),
    "a crash": ({"dataset": Sevens(crash), "on_bad_sample": "skip"}, just_run, {ev.WorkerExited}),
    "an exception": (
        {"dataset": Sevens(fail), "on_bad_sample": "replace"},
        just_run,
        {ev.Unpacked},
    ),
    "a stall": (
        {"dataset": Sevens(hang), "on_bad_sample": "skip", "stall_timeout": 0.2},
        just_run,
        {ev.WorkerStalled, ev.WorkerExited},
    ),
    "a budget": (
        {"dataset": Sevens(), "memory_budget": 900, "prefetch_factor": 4},
        kill_some,
        {ev.RoomChanged, ev.WorkerExited},
    ),
    "epochs": (
        {"dataset": Sevens(), "persistent_workers": True},
        break_off,
        {ev.EpochBegan, ev.Resumed, ev.WorkerExited},
    ),
    "a stream": ({"dataset": Stream()}, kill_some, {ev.ReplicaEnded, ev.WorkerExited}),
    "a size": ({"dataset": Sevens()}, retire, {ev.WorkerRetired, ev.WorkerExited}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_recorded_history_played_again_gives_the_same_actions(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines: list[Recorded] = []

    def record(**options: Any) -> Machine:
        machines.append(Recorded(**options))
        return machines[-1]

    monkeypatch.setattr(iterators, "Machine", record)
    options, play, special = CASES[case]
    with holdfast.DataLoader(**{"batch_size": 2, "num_workers": 2, **options}) as loader:
        play(loader)
    (recorded,) = machines
    told = {type(event) for event, _ in recorded.history}
    assert {
        ev.Began,
        ev.Drawn,
        ev.Asked,
        ev.WorkerReady,
        ev.BatchReady,
        ev.Stopped,
    } | special <= told
    again = Machine(**recorded.options)
    answers = [again.handle(event) for event, _ in recorded.history]
    assert answers == [actions for _, actions in recorded.history]
