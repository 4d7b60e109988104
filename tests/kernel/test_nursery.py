"""A nursery that raises is not reported as killed, and one without pidfds ends with its trainer."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from holdfast import DataLoader
from holdfast.errors import WorkerStartError
from holdfast.worker.faults import VARIABLE
from tests.kernel.rows import ALL_FILTERED, HERE
from tests.support import warm
from tests.support.processes import alive, eventually, in_session, signal_if


@pytest.mark.faults
def test_the_traceback_of_a_nursery_that_raised_is_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "fork:raise@worker=1,generation=0")
    loader = DataLoader(range(8), batch_size=2, num_workers=2)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    incidents = loader.incidents
    assert {one.worker_id for one in incidents} == {0, 1}
    for one in incidents:
        assert (one.cause, one.confidence) == ("nursery-failed", "high")
        assert "RuntimeError: a fault on demand" in one.because[0]
        assert "in _start_worker" in one.because[0]
        assert "killed" not in one.report()


@pytest.mark.faults
def test_the_error_of_a_nursery_that_raises_again_and_again_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, "fork:raise@generation=any")
    with pytest.raises(WorkerStartError) as caught:
        list(DataLoader(range(8), num_workers=1))
    words = str(caught.value)
    assert "RuntimeError: a fault on demand" in words
    assert "was killed" not in words
    assert "by hand" not in words
    assert "Traceback" not in capfd.readouterr().err  # it is in the error


@pytest.mark.faults
def test_a_fresh_python_that_cannot_import_torch_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch is being replaced')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(WorkerStartError, match="ImportError: libtorch is being replaced"):
        list(DataLoader(range(8), num_workers=1, multiprocessing_context="spawn"))


@pytest.mark.slow
@pytest.mark.faults
def test_nobody_outlives_a_trainer_without_pidfds_whoever_holds_the_end_of_its_pipe(
    tmp_path: Path,
) -> None:
    """No pidfd, no signal at the end of the pipe, and a child of the trainer's that holds the end."""
    ALL_FILTERED.skip_unless_possible()
    with (tmp_path / "out").open("w") as out:
        process = warm.with_torch().start(
            [str(HERE / "killed.py"), str(tmp_path / "pids")],
            out=out.fileno(),
            err=out.fileno(),
            env=ALL_FILTERED.environment(),
        )
        assert process.ended(60)
    assert process.code() == -signal.SIGKILL, (tmp_path / "out").read_text()
    pids = json.loads((tmp_path / "pids").read_text())
    try:
        assert eventually(lambda: not any(map(alive, pids["ours"])))
        assert alive(pids["holder"])
    finally:
        signal_if(pids["holder"], in_session(process.pid))
