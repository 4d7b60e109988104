"""What the warden decides is told to workers that can hear it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.engine import machine as m
from holdfast.engine import vocabulary as v
from holdfast.engine.relief import Relief
from holdfast.engine.silence import Pulse
from holdfast.engine.warden import Warden
from holdfast.memory import gauge
from holdfast.memory.budget import Budget, Share

MIB = 1 << 20


def test_a_worker_that_is_still_starting_is_not_chosen_to_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {70: 60 * MIB, 71: 90 * MIB}
    monkeypatch.setattr(gauge, "read", lambda roots: gauge.Reading(1 << 30, 10 * MIB))
    monkeypatch.setattr(gauge, "private", lambda pid, roots: sizes[pid])
    told: list[int] = []
    places = [
        SimpleNamespace(channel=object(), window=window(), pulse=Pulse(0.0), tidied=True)
        for _ in sizes
    ]
    boxes = SimpleNamespace(ring=told.append)
    holdings: Any = SimpleNamespace(places=places, boxes=boxes, post=lambda *_: None)
    share = Share(Budget(None, auto=True))
    machine = m.Machine(workers=2, prefetch=2, restarts=v.RestartPolicy(intensity=None, period=1.0))
    machine.handle(v.Began())
    machine.handle(v.WorkerReady(0, 0))
    relief = Relief(machine, holdings, Warden(share, "auto", 2), None)
    relief.look(1.0, {0: 70, 1: 71})
    assert told == [0], "the larger one would not hear it"
    machine.handle(v.WorkerReady(1, 0))
    relief.look(1.5, {0: 70, 1: 71})
    assert told == [0, 1]


def window() -> Any:
    return SimpleNamespace(released=[], take_released=list)
