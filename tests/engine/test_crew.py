"""The order in which the driver carries out what the machine has decided, and what follows."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.engine import vocabulary as v
from holdfast.engine.crew import Crew

FAILED = v.Rehearsed(0, 0, None)


class Scripted(Crew):
    """A crew without workers that writes down what it would do, and what it tells the machine.

    Abandoning leads to an event, as it does, and so does a rehearsal that cannot begin."""

    def __init__(self, decisions: dict[v.Event, Sequence[v.Action]]) -> None:
        self._acting = False
        self._caused = deque()
        self._orders = {}
        self._share: Any = SimpleNamespace(in_flight=0)
        self.log: list[Any] = []
        self.machine: Any = SimpleNamespace(handle=self.decide, held_back=0, in_flight=7)
        self.decisions = decisions

    def decide(self, event: v.Event) -> Sequence[v.Action]:
        assert not self._acting, "the machine hears of it when all has been carried out"
        self.log.append(event)
        return self.decisions.get(event, ())

    def _carry_out(self, action: v.Action) -> None:
        if isinstance(action, v.Kill):
            raise KeyboardInterrupt
        self.log.append(action)
        if isinstance(action, v.Rehearse):
            self.tell(FAILED)


def task_for(worker: int) -> v.Dispatch:
    return v.Dispatch(worker, v.Resumption(1, None))


REHEARSE = v.Rehearse(0, 0, 0, 0, 0, False, frozenset())
GROWN = v.WorkerGrown(0, 0)


def test_the_machine_hears_of_what_actions_cause_when_all_of_them_have_been_carried_out() -> None:
    start = v.Start(1, 3, 0, 0, 0, False)
    crew = Scripted({GROWN: [REHEARSE, start, task_for(1)], FAILED: [v.Stay(0, 0, False)]})
    crew.tell(GROWN)
    assert crew.log == [GROWN, REHEARSE, start, task_for(1), FAILED, v.Stay(0, 0, False)]
    assert crew._share.in_flight == 7


def test_what_was_interrupted_is_not_gone_on_with() -> None:
    stalled = v.WorkerStalled(0, 0, 1.0)
    crew = Scripted({GROWN: [REHEARSE, v.Kill(0, 0), task_for(1)], stalled: [task_for(2)]})
    with pytest.raises(KeyboardInterrupt):
        crew.tell(GROWN)
    crew.tell(stalled)
    assert crew.log == [GROWN, REHEARSE, stalled, task_for(2)]


def test_what_is_told_together_is_decided_when_all_is_known() -> None:
    """As when a nursery is lost with its workers: all have been read before one is replaced."""
    exits = [v.WorkerExited(worker, 0, v.Exit(1.0)) for worker in range(2)]
    crew = Scripted({exits[0]: [task_for(0)], exits[1]: [task_for(1)]})
    with crew._together():
        for one in exits:
            crew.tell(one)
        assert crew.log == []
    assert crew.log == [exits[0], task_for(0), exits[1], task_for(1)]
