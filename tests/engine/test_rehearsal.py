"""Trying to take up a stream while its worker is at it."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.engine.beside import LONGEST, Beside


@pytest.mark.parametrize("stall_timeout", [None, 10_000.0])
def test_one_that_takes_too_long_is_ended_whatever_the_user_has_set(
    stall_timeout: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals: list[tuple[int, int, int]] = []
    nursery = SimpleNamespace(closed=False, signal=lambda *given: signals.append(given))
    note = SimpleNamespace(step="replay")
    boxes = SimpleNamespace(clear=lambda region: None, note=lambda region: note)
    holdings: Any = SimpleNamespace(
        nursery=nursery, boxes=boxes, add_beside=lambda channel, region: None
    )
    monkeypatch.setattr(Beside, "_start", lambda self, setup: None)
    monkeypatch.setattr("holdfast.engine.beside.replace", lambda setup, **_: setup)
    monkeypatch.setattr("holdfast.engine.beside.time.monotonic", lambda: 100.0)
    rehearsals = Beside(holdings, 2, stall_timeout)
    setup: Any = SimpleNamespace(worker=0, generation=0, probe=None)
    assert rehearsals.begin(setup)
    rehearsals.look(100.0 + LONGEST)
    assert signals == []
    rehearsals.look(100.5 + LONGEST)
    assert signals == [(2, -1, signal.SIGKILL)]
