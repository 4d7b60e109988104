"""The loader starts, and its workers may die and hang, wherever torch's loader starts.

Each test runs `trial.py`: an undisturbed epoch, and one with a worker that is killed and another
that hangs, in processes where something is refused.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.kernel import trial
from tests.kernel.rows import (
    ALL_DELETED,
    ALL_FILTERED,
    EVERYTHING,
    NO_PROC,
    SINGLE,
    Refusal,
    _filtered,
)

NOTHING = Refusal("nothing", stock=False)  # torch's own loader would take the free numbers


@functools.cache
def streams() -> list[list[str]]:
    """What torch's own loader gives, with nothing refused."""
    return trial.stock()


def tried(
    refusal: Refusal, folder: Path, *methods: str, closed: str = ""
) -> tuple[dict[str, Any], str]:
    """What came, and what was written to standard error."""
    ended = refusal.run(
        "trial.py", str(folder), closed, "stock" if refusal.stock else "", *methods, seconds=100
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found, ended.stderr


def check(refusal: Refusal, folder: Path, method: str) -> None:
    found, words = tried(refusal, folder, method)
    assert found["stock"] == (streams() if refusal.stock else None)
    came = found[method]
    assert [came["plain"], came["broken"]] == streams()
    assert came["iterator"] == "WorkerIterator"
    assert found["warnings"] == []
    assert "Traceback" not in words
    killed, stalled = came["incidents"]
    assert killed["kind"] == "killed"
    assert killed["cause"] in ("killed-from-outside", "killed-unexplained")
    assert killed["because"][0].startswith("SIGKILL that holdfast did not send")
    assert stalled["kind"] == "stalled"
    assert "in __getitem__" in stalled["stack"]


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("refusal", [ALL_FILTERED, ALL_DELETED, NO_PROC], ids=lambda one: one.name)
def test_streams_and_verdicts_are_right_under_fork_where(refusal: Refusal, tmp_path: Path) -> None:
    check(refusal, tmp_path, "fork")


@pytest.mark.slow
@pytest.mark.faults
def test_streams_are_right_under_spawn_with_everything_refused_and_no_standard_input(
    tmp_path: Path,
) -> None:
    found, _ = tried(EVERYTHING, tmp_path, "spawn", closed="0")
    came = found["spawn"]
    assert [came["plain"], came["broken"]] == streams()
    assert [one["kind"] for one in came["incidents"]] == ["killed", "stalled"]
    assert found["warnings"] == []


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_streams_and_verdicts_are_right_with_everything_refused_at_once(
    method: str, tmp_path: Path
) -> None:
    check(EVERYTHING, tmp_path, method)


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("refusal", SINGLE, ids=lambda one: one.name)
def test_streams_and_verdicts_are_right_where(
    refusal: Refusal, method: str, tmp_path: Path
) -> None:
    check(refusal, tmp_path, method)


@pytest.mark.faults
def test_where_nothing_serves_workers_are_torchs_and_one_warning_says_why(tmp_path: Path) -> None:
    refusal = _filtered("socketpair", "EPERM", "socketpair")
    found, words = tried(refusal, tmp_path, "fork", "fork")
    came = found["fork"]
    assert [came["plain"], came["broken"]] == streams() == found["stock"]
    assert came["iterator"] == "_MultiProcessingDataLoaderIter"
    (warning,) = found["warnings"]
    assert "passing descriptors" in warning
    assert "Linux" in warning
    assert "not replaced when they die" in warning
    assert "Traceback" not in words


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("closed", ["0", "012"])
def test_no_descriptor_of_ours_is_a_standard_stream_under_fork(closed: str, tmp_path: Path) -> None:
    found, _ = tried(NOTHING, tmp_path, "fork", closed=closed)
    came = found["fork"]
    assert [came["plain"], came["broken"]] == streams()
    assert {str(fd) for fd in came["low"]} == set("012") - set(closed)


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.parametrize("closed", ["0", "2", "012"])
def test_no_descriptor_of_ours_is_a_standard_stream_under_spawn(
    closed: str, tmp_path: Path
) -> None:
    found, _ = tried(NOTHING, tmp_path, "spawn", closed=closed)
    came = found["spawn"]
    assert [came["plain"], came["broken"]] == streams()
