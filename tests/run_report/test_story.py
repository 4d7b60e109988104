"""What a page shows of a run: pure, from records of any origin."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.run_report import page
from holdfast.run_report.bottleneck import find_bottleneck
from holdfast.run_report.curves import POINTS, Grid
from holdfast.run_report.logged_run import LoggedRun, read
from holdfast.run_report.story import tell
from tests.support import logbooks


def told(folder: Path, now: float | None = None, **run: Any) -> dict[str, Any]:
    logbooks.write(folder, **run)
    return tell(read(folder), "a run", time.time() if now is None else now)


def test_the_headline_adds_up_what_ranks_and_loaders_did(tmp_path: Path) -> None:
    story = told(tmp_path, hours=0.1, ranks=2, loaders=("train", "val"), incidents=3, bad=2)
    last = [one for one in read(tmp_path).progress if one["ended"]]
    assert len(last) == 4
    found = story["headline"]
    assert found["batches"] == sum(one["batches"] for one in last)
    assert found["samples"] == sum(one["samples"] for one in last)
    assert found["waited"] == pytest.approx(sum(one["wait_seconds"] for one in last))
    assert (found["deaths"], found["lost"]) == (12, 8)
    assert story["several"] == {"ranks": [0, 1], "loaders": ["train", "val"]}
    assert [(one["rank"], one["loader"]) for one in story["flows"]] == [
        (0, "train"), (0, "val"), (1, "train"), (1, "val")
    ]  # fmt: skip


def test_curves_hold_what_the_records_hold(tmp_path: Path) -> None:
    story = told(tmp_path, hours=1.0)
    (flow,) = story["flows"]
    gained = sum(rate * story["width"] for rate in flow["samples"] if rate is not None)
    assert gained == pytest.approx(story["headline"]["samples"], rel=0.01)
    waited = sum(share * story["width"] for share in flow["waiting"] if share is not None)
    assert waited == pytest.approx(story["headline"]["waited"], rel=0.01)
    names = [one["name"] for one in story["memory"][0]["curves"]]
    assert names == [
        "limit",
        "in use",
        "trainer",
        "shared memory",
        *(f"worker {n}" for n in range(4)),
    ]
    limits = {one for one in story["memory"][0]["curves"][0]["values"] if one is not None}
    assert list(limits) == [pytest.approx(12 << 30, rel=0.001)]
    for parts in zip(*flow["steps"].values(), strict=True):
        assert sum(parts) == pytest.approx(1, abs=0.01)


def test_a_run_of_days_with_many_ranks_is_a_small_page(tmp_path: Path) -> None:
    story = told(
        tmp_path, hours=72, every=600, ranks=2, workers=4, incidents=100, bad=600,
        loaders=("train", "val"),
    )  # fmt: skip
    size = len(page.render(story).encode())
    assert size < 5_000_000
    assert len(story["times"]) <= POINTS
    assert story["headline"]["deaths"] == 100 * 4
    assert len(story["incidents"]) + story["left_out"] == 100 * 4
    assert len(story["bad"]) + story["bad_left_out"] == 600 * 4
    assert any(story["memory"][0]["curves"][-1]["values"][:4]), "it begins at the beginning"


@pytest.mark.parametrize(
    ("ended", "later", "state"),
    [(True, 3600.0, "ended"), (False, 5.0, "running"), (False, 3600.0, "cut")],
)
def test_the_state_of_a_run(tmp_path: Path, ended: bool, later: float, state: str) -> None:
    now = logbooks.BEGAN + 0.1 * 3600 + later
    assert told(tmp_path, now, hours=0.1, ended=ended)["state"] == state


def test_a_logbook_that_was_cut_off_in_a_line(tmp_path: Path) -> None:
    logbooks.write(tmp_path, hours=0.1, ended=False)
    for kind in ("progress", "incidents"):
        path = tmp_path / f"{kind}.jsonl"
        path.write_bytes(path.read_bytes()[:-40] + b"\0" * 30)  # as a file system may leave it
    story = tell(read(tmp_path), "a run", time.time())
    assert (story["damaged"], story["state"]) == (2, "cut")
    assert story["headline"]["batches"] > 0


def test_an_older_logbook_without_progress(tmp_path: Path) -> None:
    logbooks.write(tmp_path, hours=0.1)
    for name in ("progress.jsonl", "loaders.jsonl"):
        (tmp_path / name).unlink()
    story = tell(read(tmp_path), "a run", time.time())
    assert story["state"] == "unknown"
    assert not story["headline"]["recorded"]
    assert "worker 3" in [one["name"] for one in story["memory"][0]["curves"]]
    page.render(story)


def test_nothing_but_run_json(tmp_path: Path) -> None:
    logbooks.write(tmp_path, hours=0.1)
    for path in tmp_path.glob("*.jsonl"):
        path.unlink()
    story = tell(read(tmp_path), "a run", time.time())
    assert story["loaders"][0]["host"] == "node-7"
    page.render(story)


STRANGE = ("text", None, -1, 1e308, float("nan"), float("inf"), [], {"a": []}, True, "x" * 10**6)


def test_values_of_any_type_make_a_page(tmp_path: Path) -> None:
    """Someone else may have written the file: only the shapes that `read` checks are certain."""
    logbooks.write(tmp_path, hours=0.01, incidents=2, bad=2)
    run = read(tmp_path)
    sure = {"time", "rank", "series", "batches", "samples", "elapsed", "workers", "seconds",
            "wait_seconds", "cause", "event", "versions", "because", "remedies"}  # fmt: skip
    for strange in STRANGE:
        changed = {
            kind: [
                {name: value if name in sure else strange for name, value in one.items()}
                for one in getattr(run, kind)
            ]
            for kind in ("progress", "incidents", "bad_samples", "memory", "loaders")
        }
        changed["memory"] = [one | {"workers": None} for one in changed["memory"]]
        story = tell(dataclasses.replace(run, **changed), "a run", time.time())
        size = len(page.render(story))
        assert size < 1_000_000
        json.loads(page.as_json(story), parse_constant=pytest.fail)


def test_texts_without_end_make_no_large_page(tmp_path: Path) -> None:
    logbooks.write(tmp_path, hours=0.01, incidents=1, bad=1)
    run = read(tmp_path)
    long = "x" * 100_000
    incident = run.incidents[0] | dict.fromkeys(("text", "action", "stack", "cause", "kind"), long)
    incident |= {"because": [long] * 50, "evidence": dict.fromkeys(map(str, range(99)), long)}
    bad = run.bad_samples[0] | dict.fromkeys(("name", "message", "traceback", "error"), long)
    many = dataclasses.replace(run, incidents=[incident] * 500, bad_samples=[bad] * 5000)
    size = len(page.render(tell(many, "a run", time.time())))
    assert size < 7_000_000


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -5.0, 0, 1e300])
def test_a_record_of_no_time_is_left_out(tmp_path: Path, wrong: float) -> None:
    logbooks.write(tmp_path, hours=0.01)
    run = read(tmp_path)
    run.progress.append(run.progress[0] | {"time": wrong})
    story = tell(run, "a run", time.time())
    assert story["damaged"] == 1
    assert len(story["times"]) < 100


def test_an_empty_run_makes_a_page() -> None:
    page.render(tell(LoggedRun(), "nothing", time.time()))


# -- parts ---------------------------------------------------------------------------------


def test_what_is_counted_between_two_records_is_spread_over_the_time_between() -> None:
    grid = Grid([0.0, 60.0], curves=1)
    gained = grid.gained([10.0, 20.0, 40.0], [0.0, 100.0, 300.0])
    assert gained.sum() == pytest.approx(300)
    assert gained[10:20] == pytest.approx([10.0] * 10)
    assert gained[20:40] == pytest.approx([10.0] * 20)
    assert gained[45] == 0


def test_of_what_is_measured_the_highest_is_kept() -> None:
    grid = Grid([0.0, 100_000.0], curves=1)
    values = grid.highest([(50.0, 1.0), (51.0, 9.0), (52.0, 2.0), (100_000.0, 4.0), (3.0, None)])
    assert len(values) == POINTS
    assert (values[0], values[1], values[-1]) == (9.0, None, 4.0)


def test_a_count_that_goes_back_is_not_negative() -> None:
    assert (Grid([0.0, 9.0], curves=1).gained([0.0, 3.0, 9.0], [0.0, 50.0, 20.0]) >= 0).all()


@pytest.mark.parametrize(
    ("waited", "seconds", "where"),
    [
        (2.0, {"fetch": 50.0, "idle": 50.0}, "consumer"),
        (60.0, {"fetch": 90.0, "collate": 5.0, "idle": 5.0}, "fetch"),
        (60.0, {"fetch": 10.0, "collate": 80.0, "idle": 5.0}, "collate"),
        (60.0, {"fetch": 10.0, "send": 80.0, "idle": 5.0}, "send"),
        (60.0, {"fetch": 10.0, "start": 80.0, "idle": 5.0}, "start"),
        (30.0, {"fetch": 20.0, "idle": 80.0}, "held"),
        (30.0, {}, "unknown"),
    ],
)
def test_the_bottleneck(waited: float, seconds: dict[str, float], where: str) -> None:
    assert find_bottleneck(100.0, waited, 1000, seconds).where == where


def test_without_workers_it_is_the_training_step_or_loading() -> None:
    assert find_bottleneck(100.0, 2.0, 1000, {}, workers=False).where == "consumer"
    found = find_bottleneck(100.0, 60.0, 1000, {}, workers=False)
    assert found.where == "fetch"
    assert "60% of the time" in found.words


def test_of_a_short_run_no_bottleneck_is_claimed() -> None:
    assert find_bottleneck(1.0, 0.9, 1000, {"fetch": 1.0}).where == "unknown"
    assert find_bottleneck(100.0, 90.0, 2, {"fetch": 1.0}).where == "unknown"


def test_what_was_tuned_is_shown_whatever_the_record_contains() -> None:
    good = {"kind": "threads", "workers": 2, "batches_per_second": 10.0, "error": 0.01, "visits": 2}
    record = {
        "time": 1_750_000_000.0, "rank": 0, "target": "data:train", "batch_size": 64, "tried": [good],
        "code": "DataLoader(dataset)", "limit": {"kind": "cpu", "words": "w" * 10_000},
        "choices": [["num_workers", "2", "why"]], "notes": ["n"],
    }  # fmt: skip
    odd = record | {"tried": [3, {"workers": {}, "batches_per_second": "x"}, good], "limit": 7}
    odd |= {"choices": [1, ["a"]], "notes": {"a": 1}, "batch_size": None, "code": None}
    story = tell(LoggedRun(tuning=[record, odd] * 4), "a run", 1_750_000_100.0)
    page.render(story)
    assert len(story["tuning"]) == 5
    odd_one, shown = story["tuning"][-1], story["tuning"][-2]
    assert (shown["unit"], shown["tried"][0]["rate"]) == ("samples", 640.0)
    assert len(shown["limit"]["words"]) < 2100
    assert (odd_one["limit"], odd_one["choices"], odd_one["notes"]) == (None, [], [])
    assert [one["rate"] for one in odd_one["tried"]] == [0.0, 10.0]
