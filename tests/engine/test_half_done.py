"""Nothing that the machine has decided is forgotten, whatever comes in between."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import holdfast
from holdfast.engine import machine as m
from holdfast.engine.crew import Crew
from holdfast.engine.obituaries import Ending
from holdfast.errors import LoaderClosed

pytestmark = pytest.mark.timeout(90, method="thread")


def test_what_comes_with_a_start_that_failed_again_is_carried_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Somebody else has given memory back meanwhile: a task that waited for it is handed out."""
    decided, done = [object()], []
    death = SimpleNamespace(shortage=True)
    crew: Any = object.__new__(Crew)
    crew._places = [SimpleNamespace(pid=None)]
    crew._obituaries = SimpleNamespace(open=lambda *_: SimpleNamespace(death=death))
    crew.machine = SimpleNamespace(
        generation=lambda _: 1, handle=lambda _: decided, failure=None, tries=lambda _: 2
    )
    monkeypatch.setattr(m, "WorkerDied", lambda *_: None)
    monkeypatch.setattr(Crew, "carry_out", lambda _, actions: done.append(actions))
    crew._bury(0, Ending("start-failed", None, None, errno=11))
    assert done == [decided]


class Alarm(Exception):
    """What a signal handler of the user's raises."""


@pytest.mark.parametrize("attribute", ["unpacked", "draw"])
def test_who_is_interrupted_half_way_is_told_so_and_does_not_wait_for_ever(
    attribute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holdfast.DataLoader(range(40), num_workers=2, timeout=30) as loader:
        iterator = iter(loader)
        seen = [int(next(iterator))]
        machine = iterator._pool.machine
        decide = getattr(machine, attribute)

        def struck(*arguments: Any) -> None:
            decide(*arguments)
            monkeypatch.undo()
            raise Alarm

        monkeypatch.setattr(machine, attribute, struck)
        with pytest.raises(Alarm):
            next(iterator)
        with pytest.raises(LoaderClosed, match="Alarm"):
            seen.extend(map(int, iterator))
        assert seen in ([0], [0, 1])  # the batch it already had, and none after it
        assert [int(batch) for batch in loader] == list(range(40))
