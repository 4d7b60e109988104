"""The order in which the driver carries out what the machine has decided."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.engine import vocabulary as v
from holdfast.engine.crew import Crew


class Idle(Crew):
    """A crew of nobody that writes down what it would do; abandoning leads to more, as it does."""

    def __init__(self) -> None:
        self._todo = deque()
        self._busy = False
        self.done: list[v.Action] = []

    def _carry_out(self, action: v.Action) -> None:
        if isinstance(action, v.Kill):
            raise KeyboardInterrupt
        self.done.append(action)
        if isinstance(action, v.Abandon):
            self.carry_out([task_for(0), task_for(1)])
            assert self.done == [action], "they have to wait"


def task_for(worker: int) -> v.Dispatch:
    return v.Dispatch(worker, v.Resumption(1, None))


def test_no_task_is_sent_to_a_worker_whose_start_was_decided_before_and_is_still_to_come() -> None:
    crew = Idle()
    decided: list[v.Action] = [v.Abandon(0, 0), v.Start(1, 3, 0, 0, 0, False)]
    crew.carry_out(decided)
    assert crew.done == [*decided, task_for(0), task_for(1)]


def test_what_was_interrupted_is_not_gone_on_with() -> None:
    crew = Idle()
    with pytest.raises(KeyboardInterrupt):
        crew.carry_out([task_for(0), v.Kill(0, 0), task_for(1)])
    crew.carry_out([task_for(2)])
    assert crew.done == [task_for(0), task_for(2)]


def test_nobody_is_abandoned_or_killed_who_was_found_dead_meanwhile() -> None:
    """As when a nursery that does not answer is given up, and all its workers with it."""
    crew: Any = object.__new__(Crew)  # with nothing that could be done
    crew.machine = SimpleNamespace(generation=lambda worker: 3, alive=lambda worker: False)
    for action in (v.Abandon(1, 3), v.Kill(1, 3), v.Dump(1, 3)):
        crew._carry_out(action)
