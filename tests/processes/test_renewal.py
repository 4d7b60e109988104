"""Another nursery in place of one in which a lock is held: nothing that happened before is forgotten."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset

import holdfast
from holdfast.autopsy.incident import Incident
from holdfast.autopsy.investigator import Investigator
from holdfast.engine import events as ev
from holdfast.engine.continuation import ResumptionResult
from holdfast.engine.deaths import REMEMBERED, Deaths
from holdfast.engine.loader_records import LoaderRecords
from holdfast.processes.process_driver import ProcessDriver
from tests.faults.outside import kill_and_see_it_dead
from tests.support.fake_driver import FakeDriver
from tests.support.processes import eventually

pytestmark = pytest.mark.timeout(90, method="thread")

SIZE = 60


class ByTheProcess(IterableDataset[int]):
    """In each process another stream, of the same length."""

    def __iter__(self) -> Iterator[int]:
        return (os.getpid() for _ in range(SIZE))


def freeze(iterator: Any) -> None:
    """Stop all workers when they have started: none makes progress any more."""
    driver, workers = iterator._pool.driver, iterator._workers
    for number, worker in enumerate(workers):
        assert eventually(lambda number=number: driver.progress(number).note.step != "boot")
        os.kill(worker.pid, signal.SIGSTOP)


def test_a_worker_that_was_killed_just_before_has_died_of_that() -> None:
    with holdfast.DataLoader(range(SIZE), num_workers=3) as loader:
        iterator = iter(loader)
        seen = next(iterator).tolist()
        pids = [worker.pid for worker in iterator._workers]
        pool = iterator._pool
        with pool.lock:  # so that its death is reported, and not yet heard of
            kill_and_see_it_dead(pids[2])
            pool.supervisor.carry_out([ev.RenewNursery()])
        seen += [int(batch) for batch in iterator]
        incidents = loader.incidents
    assert seen == list(range(SIZE))
    assert [(one.worker_id, one.pid, one.signal) for one in incidents] == [(2, pids[2], "SIGKILL")]


def test_of_two_deaths_reported_together_the_second_is_told_though_the_first_renews(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second worker stalled in the nursery that is gone: it is no reason for a third one."""
    monkeypatch.setattr(Investigator, "stalled_on_inherited_lock", lambda *_: True)
    renewals = []
    renew = ProcessDriver.renew

    def counted(crew: ProcessDriver) -> None:
        renewals.append(crew)
        renew(crew)

    monkeypatch.setattr(ProcessDriver, "renew", counted)
    with holdfast.DataLoader(range(SIZE), num_workers=4) as loader:
        iterator = iter(loader)
        pids = [worker.pid for worker in iterator._workers]
        pool = iterator._pool
        with pool.lock:
            freeze(iterator)
            for worker, pid in enumerate(pids):
                assert isinstance(pid, int)
                pool.supervisor.tell(ev.WorkerStalled(worker, 0, 0.0))
                kill_and_see_it_dead(pid)
        seen = [int(batch) for batch in iterator]
        incidents = loader.incidents
    assert seen == list(range(SIZE))
    assert sorted((one.worker_id, one.kind) for one in incidents) == [
        (worker, "stalled") for worker in range(4)
    ]
    assert len(renewals) == 1


def test_one_that_has_nothing_left_to_do_is_dead_afterwards_and_says_so() -> None:
    with holdfast.DataLoader(range(2), num_workers=2) as loader:
        iterator = iter(loader)
        next(iterator)
        pool = iterator._pool
        worker = iterator._workers[0]
        pid = worker.pid
        assert worker.is_alive()
        with pool.lock:
            pool.supervisor.carry_out([ev.RenewNursery()])
        assert (worker.pid, worker.exitcode) == (pid, -signal.SIGKILL)
        assert not worker.is_alive()
        assert [int(batch) for batch in iterator] == [1]
    assert loader.incidents == []


def test_a_nursery_that_is_lost_with_stalled_workers_is_replaced_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Investigator, "stalled_on_inherited_lock", lambda *_: True)
    with holdfast.DataLoader(range(SIZE), num_workers=3) as loader:
        iterator = iter(loader)
        seen = next(iterator).tolist()
        pool: Any = iterator._pool
        with pool.lock:
            freeze(iterator)
            # Or it would report the first of these deaths before it is killed itself.
            os.kill(pool.driver.resources.nursery.pid, signal.SIGSTOP)
            for worker in range(3):
                pool.supervisor.tell(ev.WorkerStalled(worker, 0, 0.0))
            os.kill(pool.driver.resources.nursery.pid, signal.SIGKILL)
            assert eventually(pool.driver.resources.nursery.gone)
            pool.driver._exits.hear_nursery()
        seen += [int(batch) for batch in iterator]
        incidents = loader.incidents
    assert seen == list(range(SIZE))
    assert [one.worker_id for one in incidents] == [0, 1, 2]


def test_a_stream_that_is_another_afterwards_is_told_with_its_true_reason() -> None:
    with holdfast.DataLoader(ByTheProcess(), num_workers=2, batch_size=2) as loader:
        iterator = iter(loader)
        batches = [next(iterator), next(iterator)]
        pool = iterator._pool
        with pool.lock:
            pool.supervisor.carry_out([ev.RenewNursery()])
        batches += iterator
        incidents = loader.incidents
        assert loader.stats()["recycled"] == 0
    assert len(batches) == SIZE
    assert sorted((one.worker_id, one.kind, one.exact) for one in incidents) == [
        (0, "renewed", False),
        (1, "renewed", False),
    ]


def test_a_death_is_told_what_came_of_it_though_a_hundred_others_came_between() -> None:
    told: list[tuple[Incident, Incident]] = []
    incidents: list[Incident] = []
    nothing: Any = None
    records = LoaderRecords(
        on_incident=incidents.append, on_amended=lambda old, new, text: told.append((old, new))
    )
    deaths = Deaths(FakeDriver(), nothing, records)

    def die(worker: int, action: str) -> None:
        incident = Incident(
            "killed", worker, 1, "SIGKILL", -9, None, None, None, "idle", "", action, 0.0
        )
        deaths._publish(ev.Exit(0.0), incident, None)

    die(0, "replaced; its stream is being taken up")
    for _ in range(REMEMBERED + 1):
        die(1, "replaced; its stream is being taken up")
    found = ResumptionResult("replay", exact=False, delivered=3, differs=0, different=1)
    deaths.taken_up(0, 2, found, "died")
    deaths.examine_pending()
    ((old, new),) = told
    assert old is incidents[0]
    assert (new.kind, new.exact) == ("killed", False)
    assert len(incidents) == REMEMBERED + 2, "it is no other incident"
