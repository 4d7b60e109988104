"""A signal to the whole process group is distinguished from one to a single worker, whichever
process handles it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.autopsy.trainers import train
from tests.explain.matrices import note

pytestmark = [pytest.mark.faults, pytest.mark.timeout(90)]


def die_of_signals(worker: int) -> None:
    """As libraries do that set handlers of their own."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


class Victims:
    """Sample 1 sends a signal, once: to all, or to its own worker."""

    def __init__(self, number: int, *, to_all: bool) -> None:
        self.number = number
        self.to_all = to_all

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        if index == 1 and not os.path.exists("struck"):
            Path("struck").touch()
            (os.killpg if self.to_all else os.kill)(
                os.getpgid(0) if self.to_all else os.getpid(), self.number
            )
            signal.pause()
        return index


CASES: list[tuple[str, int, bool, str, str]] = [
    ("SIGTERM to all", signal.SIGTERM, True, "group-sigterm", "high"),
    ("Ctrl-C", signal.SIGINT, True, "ctrl-c-flood", "high"),
    ("SIGTERM to one", signal.SIGTERM, False, "killed-from-outside", "medium"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_signals_to_a_group(case: Any, tmp_path: Path) -> None:
    """The trainer handles it, as one that writes a checkpoint first: it is not pending anywhere."""
    name, number, to_all, cause, confidence = case

    def body() -> Any:
        os.setpgid(0, 0)
        for which in (signal.SIGTERM, signal.SIGINT):
            signal.signal(which, lambda number, frame: None)
        loader = holdfast.DataLoader(
            Victims(number, to_all=to_all), num_workers=1, worker_init_fn=die_of_signals
        )
        with loader:
            assert [int(batch[0]) for batch in loader] == list(range(6))
        return loader

    with (tmp_path / "stderr").open("w") as file:
        trainer = train(tmp_path, file.fileno(), body)
        assert trainer.ended() == 0, (tmp_path / "trouble").read_text()
    (incident,) = trainer.told()
    note(name, cause, incident)
    assert incident["cause"] == cause, incident["because"]
    assert incident["confidence"] == confidence
    assert incident["sample"] == 1
