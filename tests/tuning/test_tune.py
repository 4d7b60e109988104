"""`holdfast tune` as it is typed, on datasets whose best setting is known by how they are made.

Other programs run on the machine meanwhile, so nothing here is about absolute times.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from holdfast import kernel
from holdfast.autopsy.readers import procfs
from holdfast.cli import main
from holdfast.run_report import logged_run
from holdfast.scan import dataset_source
from holdfast.tuning.measurement import Setting
from holdfast.tuning.trial_process import Job
from holdfast.tuning.trial_runner import run
from holdfast.verbs import tune as tune_verb
from tests.support.groups import NoGroup, memory_group
from tests.support.processes import descendants, eventually
from tests.tuning import datasets

pytestmark = pytest.mark.timeout(300)  # on a busy machine, and some of them tune twice
HERE = "tests.tuning.datasets:"


def tune(name: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["tune", HERE + name, *arguments])


def tuned(name: str, *arguments: str, before: str = "") -> dict[str, Any]:
    """In a process of its own, after the code `before`. Skips the test if the command itself says
    that the machine was too busy for a recommendation: it must not be sure and wrong."""
    code = f"{before}\nfrom holdfast.cli import main\nif __name__ == '__main__': main()"
    command = [sys.executable, "-c", code, "tune", HERE + name, "--batch-size", "4", "--json"]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=250, check=False,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    # Processes that were killed are given some seconds to be gone.
    assert found["seconds"] <= float(arguments[arguments.index("--seconds") + 1]) + 20
    if "low" in (found["confidence"], found["limit"]["confidence"]):
        pytest.skip(f"other programs take the processors: {found['notes']}")
    return found


def rate(found: dict[str, Any], kind: str, workers: int) -> float:
    return max(
        one.get("batches_per_second", 0.0)
        for one in found["tried"]
        if (one["kind"], one["workers"]) == (kind, workers)
    )


# -- quick ones ----------------------------------------------------------------------------


@pytest.mark.slow
def test_it_ends_when_nothing_is_to_be_gained_and_the_report_shows_what_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What can only be forked, and one worker at most: there is little to try."""
    monkeypatch.setattr("holdfast.verbs.tune.TRIALS", 200)  # short ones
    done = tune(
        "Unpicklable",
        "--batch-size",
        "2",
        "--max-workers",
        "1",
        "--seconds",
        "40",
        "--logbook",
        str(tmp_path),
    )
    assert done.exit_code == 0, done.output
    line = "DataLoader(dataset, batch_size=2, num_workers="
    assert f"from holdfast import DataLoader\nloader = {line}" in done.output
    assert "What limits now: waiting" in done.output
    assert "dataset.transform" in done.output
    (record,) = logged_run.read(tmp_path).tuning
    assert record["target"] == "tests.tuning.datasets:Unpicklable"
    assert [one["kind"] for one in record["tried"]][:2] == ["processes", "main"]
    page = CliRunner().invoke(main, ["report", str(tmp_path), "-o", "-"])
    assert page.exit_code == 0, page.output
    assert line in page.output


def test_a_dataset_that_raises_is_told_with_its_error() -> None:
    done = tune("Raising", "--seconds", "10")
    assert done.exit_code == 3, done.output
    assert "No batch of tests.tuning.datasets:Raising could be loaded" in done.stderr
    assert "ValueError: broken file" in done.stderr


def test_a_crash_in_a_trial_is_a_finding() -> None:
    job = Job(datasets.CrashingInThreads(), batch_size=2, window=0.1)
    trial = run(job, Setting.threads(1), 0, time.monotonic() + 20)
    assert trial is not None
    assert trial.trouble is not None
    assert (trial.trouble.kind, trial.trouble.words) == (
        "died",
        "its process was killed by SIGKILL",
    )


@pytest.mark.parametrize("setting", [Setting.main(), Setting(1)], ids=lambda one: one.words)
def test_what_a_dataset_has_started_ends_with_its_trial(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the logbook and the quarantine of the user's runs are left alone."""
    monkeypatch.setenv("HOLDFAST_LOGBOOK", str(tmp_path / "logbook"))
    monkeypatch.setenv("HOLDFAST_QUARANTINE", str(tmp_path / "bad.jsonl"))
    job = Job(datasets.Starting(str(tmp_path / "pid")), batch_size=1, window=0.05)
    found = run(job, setting, 0, time.monotonic() + 60)
    assert found is not None
    assert found.trouble is None
    started = int((tmp_path / "pid").read_text())
    assert eventually(lambda: procfs.is_dead(started))
    assert [one.name for one in tmp_path.iterdir()] == ["pid"]


def test_a_loader_whose_workers_are_elsewhere_is_not_taken_for_one_with_processes() -> None:
    found = dataset_source.any_dataset(HERE + "of_ray", {})
    plan = tune_verb._plan(found, None, None, None, None, 60.0, None, None, None)
    assert plan.conditions.now is None
    assert plan.request.untried == "ray"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["Nothing"], "has no 'Nothing'"),
        (["Sleeping", "--memory", "much"], "--memory: 'much' is not an amount of memory"),
        (["Sleeping", "--collate", HERE + "Sleeping.seconds"], "expected a function"),
        (["Sleeping", "--seconds", "1"], "is not in the range x>=3"),
    ],
)
def test_wrong_usage_is_told_before_anything_is_tried(arguments: list[str], words: str) -> None:
    done = tune(*arguments)
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())


# -- best settings that are known ----------------------------------------------------------


@pytest.mark.slow
def test_a_processor_for_each_worker_if_samples_are_computed_in_python() -> None:
    found = tuned("Computing", "--seconds", "80")
    cores = kernel.cores()
    assert found["recommended"]["num_workers"] == cores, json.dumps(found)
    assert found["method"] == "processes"
    assert found["limit"]["kind"] == "cpu"
    if cores > 1:  # Python's lock
        assert rate(found, "threads", cores) < 0.8 * rate(found, "processes", cores)
        assert "Python's lock" in found["choices"][-1][2]


@pytest.mark.slow
def test_one_worker_on_one_processor() -> None:
    before = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    found = tuned("Computing", "--seconds", "80", before=before)
    assert (found["cores_per_rank"], found["recommended"]["num_workers"]) == (1, 1), json.dumps(
        found
    )
    assert found["limit"]["kind"] == "cpu"


@pytest.mark.slow
def test_a_quota_counts_like_processors() -> None:
    place = Path("/sys/fs/cgroup/cpu") / f"holdfast-test-{os.getpid()}"
    try:
        place.mkdir()
    except OSError as why:
        pytest.skip(f"no control group for processors can be made here: {why}")
    try:
        (place / "cpu.cfs_quota_us").write_text("100000")
        (place / "cpu.cfs_period_us").write_text("100000")
        before = f"import os; open({str(place / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))"
        found = tuned("Computing", "--seconds", "80", before=before)
    finally:
        assert eventually(lambda: not (place / "cgroup.procs").read_text().split())
        place.rmdir()
    assert (found["cores_per_rank"], found["recommended"]["num_workers"]) == (1, 1), json.dumps(
        found
    )
    assert found["limit"]["kind"] == "cpu"


@pytest.mark.slow
@pytest.mark.skipif(kernel.cores() < 2, reason="needs two processors")
def test_ranks_share_the_processors() -> None:
    ranks = kernel.cores()
    found = tuned("Computing", "--seconds", "80", "--ranks", str(ranks))
    assert (found["ranks"], found["recommended"]["num_workers"]) == (ranks, 1), json.dumps(found)
    assert "memory_budget" in found["recommended"]  # no launcher has told "auto" of the ranks


@pytest.mark.slow
def test_native_code_runs_as_well_in_threads() -> None:
    found = tuned("Hashing", "--seconds", "80")
    assert found["recommended"]["num_workers"] == kernel.cores(), json.dumps(found)
    assert found["limit"]["kind"] == "cpu"
    assert "Python's lock" not in found["choices"][-1][2]


@pytest.mark.slow
def test_many_workers_if_samples_wait_and_threads_are_as_good() -> None:
    found = tuned("Sleeping", "--seconds", "60", "--max-workers", "16")
    assert found["recommended"]["num_workers"] >= 8, json.dumps(found)
    assert found["limit"]["kind"] == "waiting"
    workers = max(one["workers"] for one in found["tried"] if one["kind"] == "threads")
    assert rate(found, "threads", workers) > 0.7 * rate(found, "processes", workers)


@pytest.mark.slow
def test_fewer_workers_if_memory_is_short() -> None:
    found = tuned("Hoarding", "--seconds", "40", "--memory", "400MiB", "--max-workers", "16")
    assert 3 <= found["recommended"]["num_workers"] <= 6, json.dumps(found)
    assert found["limit"]["kind"] == "memory"
    assert found["recommended"]["memory_budget"].endswith("MiB")


@pytest.mark.slow
def test_a_memory_limit_of_the_control_group_counts() -> None:
    try:
        with memory_group(700 << 20) as group:
            found = tuned(
                "Hoarding", "--seconds", "40", "--max-workers", "16", before=group.joining()
            )
            assert group.kills() == 0
    except NoGroup as why:
        pytest.skip(str(why))
    assert 3 <= found["recommended"]["num_workers"] <= 9, json.dumps(found)
    assert found["limit"]["kind"] == "memory"


@pytest.mark.slow
def test_a_slow_disk_is_named_and_gets_no_more_workers_than_it_needs(tmp_path: Path) -> None:
    """A control group lets it read 40 MB a second, which one worker can do."""
    path = tmp_path / "data"
    with path.open("wb") as file:
        file.write(os.urandom(64 << 20))
        os.fsync(file.fileno())
    device = path.stat().st_dev
    place = Path("/sys/fs/cgroup/blkio") / f"holdfast-test-{os.getpid()}"
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
        place.mkdir()
    except OSError as why:
        pytest.skip(f"no disk can be slowed down here: {why}")
    try:
        limit = f"{os.major(device)}:{os.minor(device)} 40000000"
        try:
            (place / "blkio.throttle.read_bps_device").write_text(limit)
        except OSError as why:
            pytest.skip(f"this disk cannot be slowed down: {why}")
        before = f"import os; open({str(place / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))"
        found = tuned("Reading", "--arg", f"path={path}", "--seconds", "40", before=before)
    finally:
        assert eventually(lambda: not (place / "cgroup.procs").read_text().split())
        place.rmdir()
    assert found["limit"]["kind"] == "disk", json.dumps(found)
    assert found["recommended"]["num_workers"] <= 2


@pytest.mark.slow
def test_as_few_workers_as_keep_up_with_a_slow_consumer() -> None:
    found = tuned("Sleeping", "--seconds", "40", "--step", "25")  # a batch takes 40 ms
    assert found["recommended"]["num_workers"] == 2, json.dumps(found)
    assert found["limit"]["kind"] == "consumer"
    alone = tuned("Sleeping", "--seconds", "20", "--step", "5000")
    assert alone["recommended"] == {"num_workers": 0}


@pytest.mark.slow
def test_a_stream_a_loader_and_a_collate_function() -> None:
    found = tuned("Streaming", "--seconds", "30", "--max-workers", "4", "--collate", HERE + "pad")
    assert found["recommended"]["num_workers"] >= 2
    assert "collate_fn=pad" in found["code"]
    done = tune("loader", "--seconds", "15", "--max-workers", "8")
    assert done.exit_code == 0, done.output
    assert "batch_size 4" in done.output
    assert "The loader as it is (2 threads)" in done.output


@pytest.mark.slow
def test_what_cannot_be_pickled_is_only_forked_and_it_is_said() -> None:
    found = tuned("Unpicklable", "--seconds", "20", "--max-workers", "2")
    assert {one["start_method"] for one in found["tried"]} == {"", "fork"}
    assert "dataset.transform" in found["choices"][3][2]


@pytest.mark.slow
def test_a_dataset_that_crashes_in_threads_gets_processes_and_it_is_said() -> None:
    found = tuned("CrashingInThreads", "--seconds", "20", "--max-workers", "4")
    assert found["method"] == "processes"
    assert "its process was killed by SIGKILL" in found["choices"][-1][2]


@pytest.mark.slow
def test_bad_samples_are_left_out_and_told() -> None:
    found = tuned("SometimesRaising", "--seconds", "15", "--max-workers", "2")
    assert found["recommended"]["on_bad_sample"] == "skip"
    assert any("broken file" in note for note in found["notes"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Hanging", "Empty"])
def test_a_dataset_that_gives_nothing_ends_in_time(name: str) -> None:
    done = tune(name, "--seconds", "12")  # a test has two minutes
    assert done.exit_code == 3, done.output
    said = {"Hanging": "made no progress", "Empty": "gave no batch in a whole epoch"}[name]
    assert said in done.stderr


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_and_shows_what_is_known_so_far() -> None:
    command = [sys.executable, "-m", "holdfast", "tune", HERE + "Sleeping", "--batch-size", "4"]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )  # fmt: skip
    try:
        assert eventually(lambda: len(descendants(running.pid)) >= 4, 60)
        time.sleep(3)
        began = descendants(running.pid)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=30)
    finally:
        running.kill()
    assert running.returncode == 130, err
    assert "Interrupted after" in err
    assert "Traceback" not in err
    assert "DataLoader(dataset" in out or "Samples a second" in out or not out
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in began))
