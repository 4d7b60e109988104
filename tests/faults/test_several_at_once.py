"""Deaths that do not come alone: all workers, the nursery, one after the other, and the frozen."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.faults.checker import (
    Batch,
    History,
    Interfere,
    check_conduct,
    check_stream,
    play,
    seeded,
)
from tests.faults.outside import frozen, kill_and_see_it_dead, nursery, pids
from tests.faults.scenario import (
    arguments,
    budget,
    check_budget,
    epochs,
    golden,
    surroundings,
    wait_until_started,
    witness_of,
)
from tests.faults.table import Case
from tests.support.processes import alive, eventually, kill

pytestmark = [pytest.mark.faults, pytest.mark.timeout(90, method="thread")]

MAP = Case("SIGKILL", "working")
large = pytest.param("map, large", marks=pytest.mark.slow)
spawned = pytest.param("spawn", marks=pytest.mark.slow)


def run(case: Case, folder: Path, interfere: Interfere, **options: Any) -> History:
    witness = witness_of(case, folder)

    def make() -> Any:
        seeded()
        context = None if case.method == "fork" else case.method
        return holdfast.DataLoader(
            **arguments(case, witness=witness),
            multiprocessing_context=context,
            memory_budget=budget(case),
            **options,
        )

    with surroundings(case, folder):
        return play(
            make, epochs=epochs(case), thread=case.thread, interfere=interfere, witness=witness
        )


def check(case: Case, history: History, deaths: int | None = None) -> None:
    check_stream(history, golden(case))
    check_conduct(history, innocent=set(), intensity=None)
    check_budget(case, history)
    if deaths is not None:
        assert len(history.incidents) == deaths, [str(one) for one in history.incidents]


@pytest.mark.parametrize("kind", ["map", large, "iterable", "iterable, state"])
@pytest.mark.parametrize("method", ["fork", spawned])
def test_all_workers_may_be_killed_at_once(method: str, kind: str, tmp_path: Path) -> None:
    case = replace(MAP, method=method, kind=kind)

    def interfere(iterator: Any, epoch: int, number: int) -> None:
        if number == 3:
            kill(*pids(iterator))

    history = run(case, tmp_path, interfere)
    check(case, history, deaths=2)
    assert {one.worker_id for one in history.incidents} == {0, 1}
    assert [one.pid for one in sorted(history.incidents, key=lambda one: one.worker_id)] == (
        history.first_pids
    )


def test_all_workers_may_be_killed_again_and_again(tmp_path: Path) -> None:
    """Before every next(), as long as there is something to be done."""

    def interfere(iterator: Any, epoch: int, number: int) -> None:
        if 0 < number < 6:
            kill_and_see_it_dead(*(pid for pid in pids(iterator) if alive(pid)))

    check(MAP, run(MAP, tmp_path, interfere, max_restarts=None))


def test_all_workers_may_be_killed_between_epochs(tmp_path: Path) -> None:
    case = replace(MAP, persistent=True)

    def interfere(iterator: Any, epoch: int, number: int) -> None:
        if (epoch, number) == (0, -1):
            kill(*pids(iterator))

    check(case, run(case, tmp_path, interfere), deaths=2)


def test_all_workers_may_be_killed_after_the_last_batch(tmp_path: Path) -> None:
    """They are not needed any more: it is at most noted."""
    case = replace(MAP, persistent=True)

    def interfere(iterator: Any, epoch: int, number: int) -> None:
        if (epoch, number) == (1, -1):
            kill(*pids(iterator))

    check(case, run(case, tmp_path, interfere))


@pytest.mark.parametrize("kind", ["map", "iterable", "iterable, state in iterator", large])
@pytest.mark.parametrize("method", ["fork", spawned])
def test_the_run_goes_on_when_the_nursery_is_killed(method: str, kind: str, tmp_path: Path) -> None:
    case = replace(MAP, method=method, kind=kind)

    def interfere(iterator: Any, epoch: int, number: int) -> None:
        if number == 3:
            kill_and_see_it_dead(nursery(iterator))

    history = run(case, tmp_path, interfere)
    check(case, history)
    assert {one.worker_id for one in history.incidents} <= {0, 1}
    assert history.incidents


def test_the_run_goes_on_when_the_nursery_is_killed_between_epochs(tmp_path: Path) -> None:
    case = replace(MAP, persistent=True, kind="iterable")

    def interfere(iterator: Any, epoch: int, number: int) -> None:
        if (epoch, number) == (0, -1):
            kill_and_see_it_dead(nursery(iterator))

    check(case, run(case, tmp_path, interfere))


def test_the_run_goes_on_when_the_nursery_is_killed_again_and_again(tmp_path: Path) -> None:
    def interfere(iterator: Any, epoch: int, number: int) -> None:
        if 0 < number < 7:
            found = nursery(iterator)
            wait_until_started(iterator)
            kill_and_see_it_dead(found)

    check(MAP, run(MAP, tmp_path, interfere, max_restarts=None))


class Attempts:
    """Sample 4 comes at its third attempt only; each leaves a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 4:
            attempt = len(list(self.folder.iterdir()))
            (self.folder / str(attempt)).touch()
            if attempt < 2:
                time.sleep(60)
        return index


def test_a_sample_is_not_blamed_for_the_death_of_the_nursery(tmp_path: Path) -> None:
    """A crash of two workers in a row would convict it; here it was only there."""
    with holdfast.DataLoader(Attempts(tmp_path), num_workers=2) as loader:
        iterator = iter(loader)
        got = [int(next(iterator)) for _ in range(4)]
        for attempt in range(2):
            seen = tmp_path / str(attempt)
            assert eventually(seen.exists)
            kill_and_see_it_dead(nursery(iterator))
            assert eventually(lambda attempt=attempt: len(loader.incidents) >= 2 * (attempt + 1))
        got += [int(batch) for batch in iterator]
    assert got == list(range(8))


@pytest.mark.slow
def test_a_nursery_that_does_not_answer_is_replaced(tmp_path: Path) -> None:
    """It is stopped, so no process is told that a worker died; the stall timeout finds out."""

    def interfere(iterator: Any, epoch: int, number: int) -> None:
        if number == 3:
            kill(nursery(iterator), number=signal.SIGSTOP)
            kill(pids(iterator)[1])

    check(MAP, run(MAP, tmp_path, interfere, stall_timeout=1.0))


def test_a_nursery_that_is_stopped_does_not_delay_the_end(tmp_path: Path) -> None:
    case = replace(MAP, persistent=True)

    def interfere(iterator: Any, epoch: int, number: int) -> None:
        if (epoch, number) == (1, -1):
            kill(nursery(iterator), number=signal.SIGSTOP)

    check(case, run(case, tmp_path, interfere), deaths=0)


@pytest.mark.slow
def test_the_run_goes_on_without_a_worker_that_even_sigkill_does_not_end(tmp_path: Path) -> None:
    with frozen() as freeze:

        def interfere(iterator: Any, epoch: int, number: int) -> None:
            if number == 3:
                freeze(pids(iterator)[MAP.worker])
            if number == -1:
                freeze.thaw()

        history = run(MAP, tmp_path, interfere, stall_timeout=0.5)
    check(MAP, history, deaths=1)
    (incident,) = history.incidents
    assert incident.kind == "unkillable"
    assert incident.pid == history.first_pids[MAP.worker]
    assert history.first_pids[1 - MAP.worker] == history.last_pids[1 - MAP.worker]


@pytest.mark.slow
def test_closing_does_not_wait_for_a_frozen_worker(tmp_path: Path) -> None:
    loader = holdfast.DataLoader(list(range(8)), num_workers=2, persistent_workers=True)
    assert len(list(loader)) == 8
    iterator = iter(loader)
    victim, other = pids(iterator)
    with frozen() as freeze:
        freeze(victim)
        loader.close()
        assert eventually(lambda: not alive(other))
    assert eventually(lambda: not alive(victim))


def test_batches_the_user_keeps_stay_valid_when_their_workers_die(tmp_path: Path) -> None:
    """All batches are held until the end, while every worker and the nursery die in between."""
    case = replace(MAP, kind="map, large")
    seeded()
    with holdfast.DataLoader(**arguments(case), max_restarts=None) as loader:
        iterator = iter(loader)
        held = []
        for number in range(case.size // 3):
            held.append(next(iterator))
            if number in (2, 5):
                kill(*pids(iterator))
            if number == 4:
                before = set(pids(iterator))
                kill(nursery(iterator))
                # Until that is noticed, these are the pids of workers that have gone with it.
                assert eventually(lambda before=before: before.isdisjoint(pids(iterator)))
        assert next(iterator, None) is None
    numbers = []
    for batch in held:
        for number, image in zip(batch["number"].tolist(), batch["image"], strict=True):
            assert bool((image == number % 251).all())
            numbers.append(number)
    assert numbers == [n for e in golden(case).epochs[0] if isinstance(e, Batch) for n in e.numbers]
