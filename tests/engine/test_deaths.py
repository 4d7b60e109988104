"""Examinations of deaths: beside the run, not in its way."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

import holdfast
from holdfast import jsonl
from holdfast.autopsy.investigator import Investigator
from holdfast.autopsy.readers import kernel_log
from tests.faults.outside import kill_and_see_it_dead
from tests.support.processes import eventually

pytestmark = pytest.mark.timeout(90, method="thread")

DEADLINE = 30.0


def test_batches_come_while_a_death_is_being_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    examining, go_on = threading.Event(), threading.Event()
    waited: list[bool] = []

    def slow(*_: Any, **__: Any) -> None:
        examining.set()
        waited.append(go_on.wait(DEADLINE))

    monkeypatch.setattr(kernel_log, "read", slow)
    with holdfast.DataLoader(range(200), num_workers=2) as loader:
        iterator = iter(loader)
        seen = next(iterator).tolist()
        kill_and_see_it_dead(iterator._workers[0].pid)
        assert examining.wait(DEADLINE)
        while len(seen) < 199:
            seen += next(iterator).tolist()
        assert waited == []
        assert not loader._runtime.incidents
        go_on.set()
        assert [one.signal for one in loader.incidents] == ["SIGKILL"]  # it waits for the rest
        seen += next(iterator).tolist()
    assert seen == list(range(200))
    assert waited == [True]


class Waits:
    """Its first sample waits for a file ``go``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        assert index == 1 or eventually((self.folder / "go").exists, DEADLINE)
        return index


def test_a_death_is_told_while_the_consumer_waits_in_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threading.Event()

    def listen(record: logging.LogRecord) -> bool:
        if "worker 1" in record.getMessage():
            told.set()
        return True

    monkeypatch.setenv("HOLDFAST_FAULTS", "before-fetch:SIGKILL@task=1")
    monkeypatch.setattr(logging.getLogger("holdfast"), "filters", [listen])
    early: list[bool] = []

    def look() -> None:
        early.append(told.wait(3))  # seconds
        (tmp_path / "go").touch()

    with holdfast.DataLoader(Waits(tmp_path), num_workers=2) as loader:
        other = threading.Thread(target=look)
        iterator = iter(loader)
        other.start()
        assert next(iterator).tolist() == [0]
        assert early == [True]
        assert next(iterator).tolist() == [1]
        other.join()


@pytest.mark.parametrize("step", ["gather", "examine"])
def test_a_death_that_cannot_be_examined_is_listed_all_the_same(
    step: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise LookupError("nothing is where it should be")

    monkeypatch.setattr(Investigator, step, fails)
    with holdfast.DataLoader(range(40), num_workers=2) as loader:
        iterator = iter(loader)
        seen = next(iterator).tolist()
        kill_and_see_it_dead(iterator._workers[0].pid)
        seen += [int(batch) for batch in iterator]
    assert seen == list(range(40))
    assert [(one.kind, one.cause) for one in loader.incidents] == [("killed", "unknown")]
    assert eventually(lambda: "nothing is where it should be" in caplog.text)


def test_an_examination_without_end_delays_neither_the_next_death_nor_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A log handler that hangs, a disk that is gone: the workers end all the same."""
    examining, go_on = threading.Event(), threading.Event()

    def hangs(*_: Any, **__: Any) -> None:
        examining.set()
        assert go_on.wait(DEADLINE)

    monkeypatch.setattr(kernel_log, "read", hangs)
    loader = holdfast.DataLoader(range(40), num_workers=2)
    iterator = iter(loader)
    first = iterator._workers[0].pid
    kill_and_see_it_dead(first)
    assert examining.wait(DEADLINE)
    kill_and_see_it_dead(iterator._workers[1].pid)
    assert eventually(lambda: iterator._workers[1].is_alive(), DEADLINE)  # no thread is in next()
    pids = [worker.pid for worker in iterator._workers]
    loader.close()
    try:
        assert eventually(lambda: not any(map(psutil.pid_exists, pids)), DEADLINE)
        assert not go_on.is_set()
    finally:
        go_on.set()


def test_a_logbook_that_cannot_be_written_keeps_no_batch_waiting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    writing, go_on = threading.Event(), threading.Event()

    def hangs(*_: Any, **__: Any) -> None:
        writing.set()
        assert go_on.wait(DEADLINE)

    monkeypatch.setattr(jsonl, "append", hangs)
    with holdfast.DataLoader(range(60), num_workers=2, logbook=tmp_path) as loader:
        iterator = iter(loader)
        seen = next(iterator).tolist()
        iterator._pool.driver.investigator._next_look = 0.0  # as if five seconds had passed
        kill_and_see_it_dead(iterator._workers[0].pid)
        assert writing.wait(DEADLINE)
        seen += [int(batch) for batch in iterator]
        assert not go_on.is_set()
        go_on.set()
    assert seen == list(range(60))


@pytest.mark.parametrize(
    ("task", "batch", "words"),
    [
        (0, 1, "before it began batch 1; replaced; its batch is made again"),
        (1, None, "while it had nothing to do; replaced"),
    ],
)
def test_a_batch_that_has_arrived_is_not_said_to_be_in_the_making(
    task: int, batch: int | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may be killed when its answer is on its way, and before it has noted that."""
    monkeypatch.setenv("HOLDFAST_FAULTS", f"after-send:SIGKILL@task={task}")
    with holdfast.DataLoader(range(8), num_workers=1, prefetch_factor=2) as loader:
        iterator = iter(loader)
        assert eventually(lambda: len(loader.incidents) == 1)
        (incident,) = loader.incidents
        assert (incident.step, incident.batch) == ("idle", batch)
        assert str(incident).endswith(words)
        assert [int(one) for one in iterator] == list(range(8))


def test_the_beginning_of_an_epoch_is_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_FAULTS", "after-resume:SIGKILL@")
    with holdfast.DataLoader(range(4), num_workers=1, persistent_workers=True) as loader:
        assert len(list(loader)) == 4
        assert [int(one) for one in loader] == list(range(4))
        (incident,) = loader.incidents
        assert "sending" not in str(incident)
