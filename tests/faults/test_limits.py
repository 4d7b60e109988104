"""When replacing is over: poisoned samples, `max_restarts`, workers that cannot start."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import holdfast
from holdfast.worker.faults import POINTS
from tests.faults import table
from tests.faults.checker import Batch, play, seeded
from tests.faults.outside import kill_and_see_it_dead, nursery, pids
from tests.faults.scenario import (
    arguments,
    check,
    golden,
    perform,
    surroundings,
    wait_until_nothing_is_owed,
    wait_until_started,
)
from tests.faults.table import PHASES, ROWS, Case
from tests.support.processes import alive, eventually, kill

pytestmark = [pytest.mark.faults, pytest.mark.timeout(90, method="thread")]


def test_every_fault_point_is_in_the_table() -> None:
    struck = {case.phase for case, outcome in ROWS if outcome == table.REDONE}
    assert set(POINTS) - struck == {"before-stop"}  # where a death costs nothing
    assert {name for name, phase in PHASES.items() if phase.by == table.POINT} == set(POINTS)


# -- poison -------------------------------------------------------------------------------


class Poisoned(Dataset[Any]):
    """Some samples end every worker that loads them."""

    def __init__(self, size: int, poison: set[int], how: Callable[[], None] | None = None) -> None:
        self.size = size
        self.poison = poison
        self.how = how

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if index in self.poison:
            if self.how is not None:
                self.how()
            os.kill(os.getpid(), signal.SIGSEGV)
            time.sleep(60)
        return index


def gather(loader: Any) -> tuple[list[list[int]], list[Any]]:
    """Batches, and the samples that errors name, in their order."""
    batches, named = [], []
    iterator = iter(loader)
    while True:
        try:
            batches.append(next(iterator).tolist())
        except holdfast.PoisonSample as error:
            named.append(error.sample)
        except StopIteration:
            return batches, named


@pytest.mark.parametrize(("poison", "workers"), [({0}, 2), ({11}, 2), ({4}, 1), ({0, 11}, 1)])
def test_a_poisoned_sample_is_named_wherever_it_stands(poison: set[int], workers: int) -> None:
    with holdfast.DataLoader(Poisoned(12, poison), 3, num_workers=workers) as loader:
        batches, named = gather(loader)
    assert named == sorted(poison)
    spoiled = {sample // 3 for sample in poison}
    assert batches == [
        [3 * task, 3 * task + 1, 3 * task + 2] for task in range(4) if task not in spoiled
    ]


def test_two_poisoned_samples_in_one_batch_are_one_error_that_names_the_first() -> None:
    with holdfast.DataLoader(Poisoned(12, {4, 5}), 3, num_workers=2) as loader:
        batches, named = gather(loader)
    assert named == [4]
    assert [batch[0] for batch in batches] == [0, 6, 9]


def test_a_poisoned_sample_without_batches_is_named() -> None:
    with holdfast.DataLoader(Poisoned(5, {3}), batch_size=None, num_workers=1) as loader:
        iterator = iter(loader)
        got = [next(iterator) for _ in range(3)]
        with pytest.raises(holdfast.PoisonSample, match=r"sample 3 "):
            next(iterator)
        got += list(iterator)
    assert got == [0, 1, 2, 4]


def test_a_sample_that_kills_once_in_every_epoch_is_no_poison(tmp_path: Path) -> None:
    """It is tried alone, and lives; a batch that arrived clears all suspicion."""

    class Sometimes(Poisoned):
        def __getitem__(self, index: int) -> Any:
            if index == 4:
                count = len(list(tmp_path.iterdir()))
                (tmp_path / str(count)).touch()
                if count % 3 == 0:  # then comes the trial, then the batch again
                    os.kill(os.getpid(), signal.SIGSEGV)
                    time.sleep(60)
            return index

    loader = holdfast.DataLoader(Sometimes(12, set()), 3, num_workers=2, persistent_workers=True)
    with loader:
        for _ in range(3):
            assert [batch.tolist()[0] for batch in loader] == [0, 3, 6, 9]
        assert len(loader.incidents) == 3


class Whole(Poisoned):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def test_a_poisoned_sample_of_getitems_names_its_batch() -> None:
    """Which of its samples it was cannot be told from outside the dataset."""
    with holdfast.DataLoader(Whole(12, {4}), 3, num_workers=2) as loader:
        iterator = iter(loader)
        assert next(iterator).tolist() == [0, 1, 2]
        with pytest.raises(holdfast.PoisonSample, match="batch 1"):
            next(iterator)
        assert [batch.tolist() for batch in iterator] == [[6, 7, 8], [9, 10, 11]]


@pytest.mark.slow
def test_a_sample_that_hangs_every_worker_is_named(tmp_path: Path) -> None:
    case = Case("hang", "sample", always=True)
    history = perform(case, tmp_path, stall_timeout=0.7)
    check(case, history)
    assert "sleep_for_ever" in history.errors[0].text


def test_too_many_poisoned_samples_exceed_the_limit() -> None:
    poison = set(range(6, 60))
    with holdfast.DataLoader(Poisoned(60, poison), 3, num_workers=2, max_restarts=7) as loader:
        iterator = iter(loader)
        got = []

        def go_on() -> None:
            while True:
                try:
                    got.append(next(iterator).tolist())
                except holdfast.PoisonSample:
                    pass

        with pytest.raises(holdfast.RestartLimitExceeded):
            go_on()
        assert got == [[0, 1, 2], [3, 4, 5]]
        assert loader.stats()["restarts"] == 7


# -- max_restarts -------------------------------------------------------------------------


def test_the_story_leaves_out_deaths_that_did_not_count() -> None:
    """A sample that kills is tried and left out between two deaths from outside."""
    data = Poisoned(30, {12})
    with holdfast.DataLoader(
        data, num_workers=1, on_bad_sample="skip", max_restarts=1, prefetch_factor=1
    ) as loader:
        iterator = iter(loader)
        killed = []

        def train() -> None:
            for batch in iterator:
                if batch.tolist() in ([5], [20]):
                    killed.append(iterator._workers[0].pid)
                    kill_and_see_it_dead(killed[-1])

        with pytest.raises(holdfast.RestartLimitExceeded) as caught:
            train()
    of_the_sample = [one.pid for one in loader.incidents if one.signal == "SIGSEGV"]
    assert len(of_the_sample) == 2
    first_line = str(caught.value).splitlines()[0]
    assert f"(pid(s) {killed[0]}, {killed[1]})" in first_line
    assert "SIGSEGV" not in str(caught.value)


@pytest.mark.parametrize(("limit", "allowed"), [(0, 0), (1, 1), ((3, 60), 3)])
def test_max_restarts_tells_the_story_when_it_is_exceeded(limit: Any, allowed: int) -> None:
    """Deaths from outside, one at a time, each of a worker that has done what it was asked for: two
    at one sample would be a reason to try that alone."""
    seeded()
    case = Case("SIGKILL", "working", workers=1)
    with holdfast.DataLoader(**arguments(case), max_restarts=limit) as loader:
        iterator = iter(loader)
        killed = []
        for death in range(allowed + 1):
            (pid,) = pids(iterator)
            wait_until_nothing_is_owed(iterator)
            kill(pid)
            killed.append(pid)
            assert eventually(lambda death=death: len(loader.incidents) > death)
        with pytest.raises(holdfast.RestartLimitExceeded) as caught:
            for _ in iterator:
                pass
        text = str(caught.value)
        assert all(str(pid) in text for pid in killed)
        assert "max_restarts" in text
        assert "SIGKILL" in text
        assert [one.pid for one in loader.incidents] == killed
        *replaced, last = loader.incidents
        assert len(replaced) == allowed
        assert {(one.batch, one.action) for one in replaced} <= {(None, "replaced")}
        assert (last.batch, last.action) == (None, "gave up")
        assert loader.stats()["restarts"] == allowed
        with pytest.raises(holdfast.LoaderClosed):
            next(iterator)
        # It can be used again, and has its full measure of restarts.
        seeded()
        numbers = [n for batch in loader for n in batch["number"].tolist()]
    assert numbers == [n for e in golden(case).epochs[0] if isinstance(e, Batch) for n in e.numbers]


# -- start-up -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cause", "phase"),
    [("SIGSEGV", "before-ready"), ("os._exit(3)", "before-ready")],
)
def test_a_worker_that_never_starts_is_not_started_for_ever(
    cause: str, phase: str, tmp_path: Path
) -> None:
    case = Case(cause, phase, always=True)
    # Who is killed from outside is started for as long as the user wants: `test_starts.py`.
    check(case, perform(case, tmp_path, max_restarts=None))


@pytest.mark.slow
@pytest.mark.parametrize("cause", ["SIGKILL", "os._exit(3)", "segfault"])
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_dataset_that_kills_whoever_loads_it(method: str, cause: str, tmp_path: Path) -> None:
    case = Case(cause, "load", method, always=True)
    check(case, perform(case, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["before-setup", "init"])
def test_a_start_that_always_hangs_is_given_up(phase: str, tmp_path: Path) -> None:
    case = Case("hang", phase, always=True)
    check(case, perform(case, tmp_path, stall_timeout=0.7))


@pytest.mark.slow
def test_a_machine_that_cannot_fork_is_named() -> None:
    """The nursery may have no more processes: the error says what fork said, and nothing hangs."""
    case = Case("SIGKILL", "working")
    group = Path("/sys/fs/cgroup/pids") / f"holdfast-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no pids cgroup can be made here: {error}")
    try:
        with holdfast.DataLoader(**arguments(case)) as loader:
            iterator = iter(loader)
            next(iterator)
            wait_until_started(iterator)
            (group / "pids.max").write_text("1")
            (group / "cgroup.procs").write_text(str(nursery(iterator)))
            kill(pids(iterator)[1])
            with pytest.raises(holdfast.WorkerError, match="Resource temporarily unavailable"):
                list(iterator)
            assert loader.incidents[-1].action == "gave up"
            assert loader.incidents[-1].cause == "task-limit"
    finally:
        assert eventually(lambda: not (group / "cgroup.procs").read_text().strip())
        group.rmdir()


def test_closing_wins_over_a_start_that_hangs(tmp_path: Path) -> None:
    case = Case("hang", "before-setup", always=True)
    with surroundings(case, tmp_path):
        loader = holdfast.DataLoader(**arguments(case))
        iterator = iter(loader)
        workers = pids(iterator)
        began = time.monotonic()
        loader.close()
        assert time.monotonic() - began < 4
    assert eventually(lambda: not any(alive(pid) for pid in workers))


class Explodes:
    def __call__(self, worker: int) -> None:
        raise ConnectionRefusedError(111, f"no database for worker {worker}")


def test_what_worker_init_fn_raises_arrives_as_its_own_type() -> None:
    """It is an error of the user's, not a death: nothing is started again."""
    with holdfast.DataLoader(list(range(6)), num_workers=2, worker_init_fn=Explodes()) as loader:
        with pytest.raises(ConnectionRefusedError, match="no database for worker 0") as caught:
            next(iter(loader))
        assert caught.value.errno == 111
        assert loader.incidents == []


class WillNotLoad(Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return index

    def __getstate__(self) -> Any:
        return {"a": 1}

    def __setstate__(self, state: Any) -> None:
        raise LookupError("the file of the dataset is not here")


@pytest.mark.slow
def test_a_dataset_that_does_not_load_in_the_worker_is_quoted() -> None:
    loader = holdfast.DataLoader(WillNotLoad(), num_workers=2, multiprocessing_context="spawn")
    with loader:
        with pytest.raises(holdfast.WorkerStartError) as caught:
            next(iter(loader))
        began = time.monotonic()
    assert time.monotonic() - began < 4
    assert "LookupError: the file of the dataset is not here" in str(caught.value)
    assert "__setstate__" in str(caught.value)
    assert loader.stats()["restarts"] == 0


# -- collate, and messages of several packets ----------------------------------------------


def test_a_large_error_text_survives_a_death_in_the_middle_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Verbose(Dataset[Any]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> Any:
            if index == 7:
                raise ValueError("x" * 3_000_000)
            return index

    monkeypatch.setenv("HOLDFAST_FAULTS", "mid-send:SIGKILL@task=2")
    history = play(
        lambda: Numbered(holdfast.DataLoader(Verbose(), 3, num_workers=2)),
        stock=False,
    )
    assert [error.kind for error in history.errors] == [ValueError]
    assert history.errors[0].text.count("x") >= 3_000_000
    assert [e.numbers for e in history.events if isinstance(e, Batch)] == [
        (0, 1, 2),
        (3, 4, 5),
        (9, 10, 11),
    ]
    (incident,) = history.incidents
    assert (incident.step, incident.batch, incident.signal) == ("send", 2, "SIGKILL")
    assert not history.left


class Numbered:
    """Plain numbers in the form the checker reads."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Any:
        return _NumberedIterator(iter(self._loader))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _NumberedIterator:
    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    @property
    def _workers(self) -> Any:
        return self._iterator._workers

    def __next__(self) -> Any:
        numbers = next(self._iterator)
        return {"number": numbers, "worker": torch.zeros_like(numbers)}


def test_an_incident_says_what_was_done_about_a_poisoned_iterable(tmp_path: Path) -> None:
    """Its replica is over, so no worker is put in its place, and none is said to be."""
    case = Case("SIGSEGV", "sample", kind="iterable", always=True)
    history = perform(case, tmp_path)
    replaced = [one for one in history.incidents if one.action.startswith("replaced")]
    assert history.restarts == len(replaced) == 1


class PoisonedStream(IterableDataset[Any]):
    """Ends the second worker at that sample, in every epoch."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        for number in range(4):
            if (info.id, number) == (1, self.at):
                os.kill(os.getpid(), signal.SIGSEGV)
                time.sleep(60)
            yield 10 * info.id + number


@pytest.mark.parametrize("at", [0, 2])
def test_a_poisoned_iterable_is_no_hindrance_to_the_next_epoch(at: int) -> None:
    """The replacement is sent through earlier epochs: not into what ended its predecessors."""
    loader = holdfast.DataLoader(
        PoisonedStream(at),
        batch_size=None,
        num_workers=2,
        persistent_workers=True,
        max_restarts=None,
    )
    with loader:
        for _ in range(3):
            got, errors = [], 0
            iterator = iter(loader)
            while True:
                try:
                    got.append(next(iterator))
                except holdfast.PoisonSample:
                    errors += 1
                except StopIteration:
                    break
            assert sorted(got) == [0, 1, 2, 3, *range(10, 10 + at)]
            assert errors == 1
        assert len(loader.incidents) == 6


def test_the_text_of_an_incident_reads_like_a_sentence(tmp_path: Path) -> None:
    case = Case("segfault", "sample")
    (incident,) = perform(case, tmp_path).incidents
    number = case.number(table.POSITION)
    assert re.fullmatch(
        rf"\[MapStyle\] worker 1 \(pid \d+\) crashed with a segmentation fault \(SIGSEGV\) while loading "
        rf"sample {number} \(position 1 of batch 5\); replaced; the sample is tried alone",
        str(incident),
    )
