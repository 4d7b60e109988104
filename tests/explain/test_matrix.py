"""Causes are injected, verdicts compared: the confusion matrix.

At least 95 % right, and nothing wrong with high confidence; printed at the end of the run. In `make
test` under fork; `make test-all` does it under every start method. What needs a control group, a
small /dev/shm or the like has rows of its own, from `test_places.py` and `test_group.py`.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.autopsy.injected import DEATHS, ERRORS, STALL_TIMEOUT, Minefield
from tests.explain.matrices import MATRICES, Row, matrix, note
from tests.faults.causes import GRANDCHILDREN, end_child_left_behind
from tests.faults.outside import frozen, pids
from tests.support import silent_files, warm
from tests.support.explained import explain
from tests.support.processes import eventually

pytestmark = [pytest.mark.faults, pytest.mark.timeout(200)]


def check(rows: list[Row], title: str) -> None:
    told = matrix(rows, title)
    MATRICES.append(told)
    assert sum(row.right for row in rows) >= 0.95 * len(rows), told
    assert not [row for row in rows if not row.right and row.confidence == "high"], told


def walk(causes: list[str], folder: Path, method: str) -> tuple[Any, dict[int, str]]:
    """Load the whole minefield; the loader, and what was raised at which sample."""
    folder.mkdir()
    context = None if method == "fork" else method
    loader = holdfast.DataLoader(
        Minefield(causes, str(folder)),
        batch_size=1,
        num_workers=2,
        stall_timeout=STALL_TIMEOUT,
        max_restarts=None,
        multiprocessing_context=context,
    )
    raised: dict[int, str] = {}
    delivered: list[int] = []
    with loader:
        iterator = iter(loader)
        for index in range(len(loader)):
            try:
                delivered.append(int(next(iterator)[0]))
            except Exception as error:
                raised[index] = "".join(traceback.format_exception(error))
    assert delivered == [index for index in range(len(loader)) if index not in raised]
    return loader, raised


def play(folder: Path, method: str) -> list[Row]:
    rows = []
    (folder / "children").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(GRANDCHILDREN, str(folder / "children"))
        try:
            loader, raised = walk(list(DEATHS), folder / "deaths", method)
        finally:
            for file in (folder / "children").iterdir():
                end_child_left_behind(int(file.name), file.read_text())
    assert not raised
    by_sample = {
        one.sample if one.sample is not None else one.batch: one for one in loader.incidents
    }
    for number, (name, wanted) in enumerate(DEATHS.items()):
        sample = 2 * number + 1
        incident = by_sample[sample]
        if name != "all descriptors closed":  # which shows only when the batch is sent
            assert (incident.sample, incident.position) == (sample, 0), f"{name}: {incident}"
        why = "; ".join(incident.because)[:90]
        rows.append(Row(name, wanted, incident.cause, incident.confidence, why))
    assert len(loader.incidents) == len(DEATHS), [str(one) for one in loader.incidents]
    loader, raised = walk(list(ERRORS), folder / "errors", method)
    assert loader.incidents == []
    for number, (name, wanted) in enumerate(ERRORS.items()):
        verdicts = explain(raised[2 * number + 1]).verdicts
        found = verdicts[0] if verdicts else None
        rows.append(
            Row(
                name,
                wanted,
                "nothing" if found is None else found.cause,
                "low" if found is None else found.confidence,
                "" if found is None else found.because[0][:90],
            )
        )
    return rows


@pytest.mark.slow
def test_injected_causes_are_named_under_fork(tmp_path: Path) -> None:
    check(play(tmp_path, "fork"), "fork")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_injected_causes_are_named_under_every_start_method(method: str, tmp_path: Path) -> None:
    check(play(tmp_path, method), method)


# -- what needs the machine's help ---------------------------------------------------------


class Slow:
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can freeze")
def test_a_frozen_worker_is_called_frozen() -> None:
    loader = holdfast.DataLoader(Slow(), num_workers=2, stall_timeout=0.5)
    with frozen() as freeze, loader:
        iterator = iter(loader)
        next(iterator)
        assert eventually(lambda: iterator._pool.driver.resources.boxes.note(1).step == "idle")
        freeze(pids(iterator)[1])
        assert len(list(iterator)) == 11
        freeze.thaw()
        (incident,) = loader.incidents
    assert (incident.kind, incident.cause, incident.confidence) == ("unkillable", "stopped", "high")
    note("frozen", "stopped", incident.to_json())


class ReadsOnce:
    """Sample 3 reads from `path`, at the first attempt."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.path, self.folder = path, folder

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == 3 and not (self.folder / "struck").exists():
            (self.folder / "struck").touch()
            self.path.read_bytes()
        return index


@pytest.mark.slow
@pytest.mark.skipif(not silent_files.possible(), reason="only root can mount, and needs /dev/fuse")
def test_a_worker_whose_storage_does_not_answer_is_called_so(tmp_path: Path) -> None:
    """Not even SIGKILL ends a process that reads there; the run goes on all the same."""
    mount = tmp_path / "mount"
    mount.mkdir()
    dataset = ReadsOnce(mount / silent_files.NAME, tmp_path)
    with holdfast.DataLoader(dataset, num_workers=2, stall_timeout=0.5) as loader:
        with silent_files.silent_file(mount):
            assert [int(batch) for batch in loader] == list(range(12))
        (incident,) = loader.incidents
    assert (incident.kind, incident.sample) == ("unkillable", 3)
    assert (incident.cause, incident.confidence) == ("storage-stall", "high")
    assert "waiting for storage" in str(incident)
    note("a silent file system", "storage-stall", incident.to_json())


def test_what_does_not_pickle_is_named_before_any_worker_starts() -> None:
    class Local(Slow):
        pass

    loader = holdfast.DataLoader(Local(), num_workers=1, multiprocessing_context="spawn")
    with pytest.warns(UserWarning, match="pickle error"), pytest.raises(Exception) as caught:
        iter(loader)
    verdict = explain("".join(traceback.format_exception(caught.value))).verdicts[0]
    assert (verdict.cause, verdict.confidence) == ("unpicklable-args", "high")


NO_FILE = """
from holdfast import DataLoader
class Squares:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return index * index
if __name__ == "__main__":
    list(DataLoader(Squares(), num_workers=1, multiprocessing_context={method!r}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "method"),
    [
        ("-c", "spawn"),
        pytest.param("stdin", "spawn", marks=pytest.mark.slow),
        pytest.param("stdin", "forkserver", marks=pytest.mark.slow),
        pytest.param("-c", "forkserver", marks=pytest.mark.slow),
    ],
)
def test_a_class_of_a_main_module_without_a_file_is_called_so(how: str, method: str) -> None:
    script = NO_FILE.format(method=method)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if how == "-c":
        done = warm.run(["-c", script], timeout=90, env=environment)
    else:
        done = subprocess.run(
            [sys.executable, "-"],
            input=script,
            capture_output=True,
            text=True,
            timeout=90,
            env=environment,
        )
    assert done.returncode == 1
    assert "more: holdfast explain notebook-main" in done.stderr
    verdict = explain(done.stderr).verdicts[0]
    assert (verdict.cause, verdict.confidence) == ("notebook-main", "high")
    because = {"because": verdict.because, "cause": verdict.cause, "confidence": "high"}
    note(f"main from {how}, {method}", "notebook-main", because)


LOCK = threading.Lock()


class Locked(Slow):
    def __getitem__(self, index: int) -> int:
        with LOCK:
            return index


def test_a_lock_that_a_thread_of_the_trainer_held_at_the_fork_is_called_so_and_got_rid_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In the workers there is no thread that could release it."""
    held, enough = threading.Event(), threading.Event()

    def refresh() -> None:
        with LOCK:
            held.set()
            assert enough.wait(60)

    thread = threading.Thread(target=refresh, name="cache-refresher")
    thread.start()
    try:
        assert held.wait(10)
        with holdfast.DataLoader(Locked(), num_workers=1, stall_timeout=0.3) as loader:
            iterator = iter(loader)
            enough.set()  # free in the trainer from now on, and never in copies made before
            thread.join()
            assert [int(batch) for batch in iterator] == list(range(len(Locked())))
            incidents = loader.incidents
            first = incidents[0]
    finally:
        enough.set()
        thread.join()
    assert (first.cause, first.confidence, first.sample) == ("fork-lock-deadlock", "medium", 0)
    reasons = "\n".join(first.because)
    assert "thread 'cache-refresher'" in reasons
    # The second is that of one from the same nursery; after it there is another.
    assert [one.cause for one in incidents] == ["fork-lock-deadlock"] * 2
    assert incidents[-1].action == "replaced by one forked anew; its batch is made again"
    (said,) = [
        one.message for one in caplog.records if "forked from the trainer again" in one.message
    ]
    assert "forkserver" in said
    note("a lock held at the fork", "fork-lock-deadlock", first.to_json())


def test_errors_of_the_engine_name_the_cause_and_are_found_by_explain() -> None:
    """torch's words stay in them; below stand the reasons and what to do."""
    loader = holdfast.DataLoader(Always(), num_workers=1, batch_size=2)
    with pytest.raises(
        holdfast.PoisonSample, match=r"DataLoader worker \(pid\(s\) .*\) exited unexpectedly"
    ) as caught:
        list(loader)
    told = str(caught.value)
    assert "because: it died of SIGSEGV" in told
    assert told.count("What to do:") == 1
    assert "to do: " not in told.replace("What to do:", ""), "one list"
    assert "- Load dataset[3] by itself in a separate Python process" in told
    assert told.count("dataset[3]") == 2, "said once, with its command"
    assert "\n      python -X faulthandler -c" in told  # on a line of its own, to be copied
    assert re.search(r"\n  worker 0 \(pid \d+\) likewise; .*given up\n", told)
    assert "more: holdfast explain native-segv" in told
    assert explain(told).verdicts[0].cause == "native-segv"


class Always(Slow):
    def __getitem__(self, index: int) -> int:
        if index == 3:
            ctypes.string_at(0)
        return index
