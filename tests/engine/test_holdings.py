"""What a process forked from the trainer lets go of."""

from __future__ import annotations

import select
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.engine.beside import Beside
from holdfast.engine.channel import pair
from holdfast.engine.holdings import Holdings


def test_a_forked_child_lets_go_of_the_channels_of_processes_beside_without_ending_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holdings: Any = object.__new__(Holdings)
    holdings.places, holdings.channels, holdings.beside = [], {}, {}
    holdings.poll = select.poll()
    holdings.lifeline = SimpleNamespace(let_go=lambda: None)
    holdings.boxes = SimpleNamespace(clear=lambda region: None)
    holdings._nursery = None
    monkeypatch.setattr(Holdings, "nursery", SimpleNamespace(closed=False))
    channel, theirs = pair()
    monkeypatch.setattr(Beside, "_start", lambda self, setup: channel)
    monkeypatch.setattr("holdfast.engine.beside.replace", lambda setup, **_: setup)
    setup: Any = SimpleNamespace(worker=0, generation=0, probe=None)
    assert Beside(holdings, 2, None).begin(setup)
    copy = channel.sock.dup()  # the trainer's own
    holdings.disown()
    assert channel.fileno() == -1
    theirs.send(b"it goes on")
    copy.close()
    theirs.close()
