"""The logbook: readable after kill -9 at any moment, bounded, ranks side by side."""

from __future__ import annotations

import io
import itertools
import json
import logging
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from holdfast.autopsy.logbook import Logbook
from holdfast.cli import main
from holdfast.run_report.logged_run import LoggedRun, read
from holdfast.verbs.incidents import print_run

SOURCE = str(Path(__file__).parents[2] / "src")
WRITER = """
import sys
from holdfast.autopsy.logbook import Logbook
book = Logbook(sys.argv[1], limit=int(sys.argv[2]))
print("writing", flush=True)
number = 0
while True:
    book.memory({"writer": sys.argv[3], "number": number, "filling": "x" * (number % 5000)})
    book.flush()
    book.begin({"number": number})
    number += 1
"""


def writer(folder: Path, name: str, limit: int = 8 << 20) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(limit), name],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": SOURCE},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(10)
    assert process.stdout is not None
    process.stdout.close()


def test_a_kill_at_any_moment_leaves_it_readable(tmp_path: Path) -> None:
    """Several processes write side by side and are killed one after the other."""
    chance = random.Random(7)
    writers = [writer(tmp_path, str(number)) for number in range(4)]
    for process in writers:
        time.sleep(chance.random() * 0.1)
        end(process)
    last = Logbook(tmp_path)
    last.memory({"writer": "last", "number": 0})
    last.flush()
    story = read(tmp_path)
    assert story.damaged <= len(writers)
    assert story.memory[-1]["writer"] == "last"
    for name in map(str, range(len(writers))):
        numbers = [record["number"] for record in story.memory if record["writer"] == name]
        assert numbers == list(range(len(numbers))), f"writer {name} lost a record in the middle"
        assert numbers
    assert len(story.runs) == 1


def test_a_torn_line_costs_itself_only(tmp_path: Path) -> None:
    book = Logbook(tmp_path)
    book.incident({"cause": "abort"})
    with (tmp_path / "incidents.jsonl").open("ab") as file:
        file.write(b'{"cause": "oom-kil')
    assert (len(read(tmp_path).incidents), read(tmp_path).damaged) == (1, 1)
    book.incident({"cause": "native-segv"})
    assert [one["cause"] for one in read(tmp_path).incidents] == ["abort", "native-segv"]
    assert read(tmp_path).damaged == 1


def test_its_size_is_bounded_and_the_end_is_kept(tmp_path: Path) -> None:
    limit = 20_000
    book = Logbook(tmp_path, limit=limit)
    for number in range(2000):
        book.event("some", "words", number=number)
        book.flush()
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert sum(sizes) <= 2 * limit + 200
    numbers = [record["number"] for record in read(tmp_path).events]
    assert numbers == list(range(numbers[0], 2000))
    assert len(numbers) > 100


def test_one_enormous_record_is_cut_down(tmp_path: Path) -> None:
    Logbook(tmp_path).incident(
        {"cause": "abort", "stack": "frame\n" * 500_000, "many": list(range(90_000))}
    )
    assert (tmp_path / "incidents.jsonl").stat().st_size < 20_000
    assert read(tmp_path).incidents[0]["cause"] == "abort"


def test_ranks_write_side_by_side(tmp_path: Path) -> None:
    for rank in (2, 0, 1):
        book = Logbook(tmp_path, rank=rank)
        book.begin({"num_workers": 4})
        book.incident({"cause": "abort", "text": f"in rank {rank}"})
    story = read(tmp_path)
    assert [run["rank"] for run in story.runs] == [0, 1, 2]
    assert [one["rank"] for one in story.incidents] == [2, 0, 1]
    assert story.runs[0]["versions"]["python"]


def test_what_json_does_not_know_is_written_as_text(tmp_path: Path) -> None:
    Logbook(tmp_path).incident({"cause": "abort", "sample": ("a", {1, 2}, object()), "b": b"x"})
    found = read(tmp_path).incidents[0]
    assert found["sample"][1] == [1, 2]
    assert "object" in found["sample"][2]


def test_a_disk_that_refuses_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    book = Logbook(tmp_path)
    (tmp_path / "incidents.jsonl").mkdir()
    with caplog.at_level(logging.WARNING, "holdfast"):
        book.incident({"cause": "abort"})
        book.incident({"cause": "abort"})
    assert len(caplog.records) == 1
    assert "cannot be written" in caplog.text


# -- the command ---------------------------------------------------------------------------


def test_the_story_is_told(tmp_path: Path) -> None:
    book = Logbook(tmp_path)
    book.begin({"num_workers": 2})
    book.incident(
        {
            "cause": "oom-killed", "text": "worker 3 was killed", "because": ["oom_kill went up by 1"],
            "remedies": [{"text": "Ask for more", "command": "#SBATCH --mem=6G"}], "stack": "a frame",
        }
    )  # fmt: skip
    book.bad_sample({"index": 7, "error": "OSError", "message": "[x] is broken", "action": "skip"})
    book.memory({"trainer_bytes": 1 << 30, "workers": {"0": 1 << 20}})
    book.flush()
    result = CliRunner().invoke(main, ["incidents", str(tmp_path), "--stacks"])
    assert result.exit_code == 1
    for words in ("worker 3 was killed", "oom_kill went up by 1", "bad sample 7: OSError: [x] is broken; skip", "1 × oom-killed",
                  "#SBATCH --mem=6G", "trainer 1.0 GiB", "a frame"):  # fmt: skip
        assert words in result.output, words
    told = json.loads(CliRunner().invoke(main, ["incidents", str(tmp_path), "--json"]).output)
    assert told["incidents"][0]["cause"] == "oom-killed"
    explained = CliRunner().invoke(main, ["explain", str(tmp_path)])
    assert explained.exit_code == 0
    assert "1 × oom-killed" in explained.output


def test_the_beginning_of_a_run_stands_in_its_place() -> None:
    console = Console(file=io.StringIO(), width=200)
    runs = [{"rank": 0, "time": 10.0}, {"rank": 1, "time": 30.0}]
    print_run(
        console, LoggedRun(runs, incidents=[{"rank": 0, "time": 20.0, "text": "worker 0 died"}])
    )
    assert isinstance(console.file, io.StringIO)
    told = console.file.getvalue()
    assert told.index("rank 0 began") < told.index("worker 0 died") < told.index("rank 1 began")


def test_a_run_began_when_its_first_loader_did(tmp_path: Path) -> None:
    """run.json is that of the last. Another process has written there before."""
    mine = {"rank": 0, "host": "here", "pid": 7}
    loaders = [{**mine, "pid": 6, "time": 5.0}, {**mine, "time": 10.0}, {**mine, "time": 30.0}]
    died = [{"rank": 0, "time": 20.0, "text": "worker 0 died"}]
    console = Console(file=io.StringIO(), width=200)
    print_run(console, LoggedRun([{**mine, "time": 30.0}], loaders=loaders, incidents=died))
    assert isinstance(console.file, io.StringIO)
    told = console.file.getvalue()
    assert told.index("rank 0 began") < told.index("worker 0 died")
    assert time.strftime("%H:%M:%S", time.localtime(10)) in told


def test_a_run_without_incidents_says_so(tmp_path: Path) -> None:
    Logbook(tmp_path).begin({})
    result = CliRunner().invoke(main, ["incidents", str(tmp_path)])
    assert result.exit_code == 0
    assert "Nothing went wrong" in result.output


def test_what_is_no_incident_is_told_all_the_same(tmp_path: Path) -> None:
    book = Logbook(tmp_path)
    book.begin({})
    for number in range(30):
        book.event("recycled", f"worker {number} had grown", worker=number)
    book.event("pressure", "memory is 82 % full")
    book.flush()
    result = CliRunner().invoke(main, ["incidents", str(tmp_path)])
    assert result.exit_code == 0
    told = result.output
    assert "Nothing went wrong" not in told
    assert "No worker was lost." in told
    assert "worker 2 had grown" in told
    assert "worker 3 had grown" not in told  # a run of days would fill a book
    assert "replaced because they had grown: 30 times (the first 3 are above)." in told
    assert "memory is 82 % full" in told
    assert "fewer batches were kept in flight: once." in told


def test_workers_that_were_not_seen_are_not_said_to_take_nothing(tmp_path: Path) -> None:
    book = Logbook(tmp_path)
    book.begin({})
    book.memory({"trainer_bytes": 1 << 30, "workers": {}})
    book.flush()
    told = CliRunner().invoke(main, ["incidents", str(tmp_path)]).output
    assert "trainer 1.0 GiB, its workers were not running yet" in " ".join(told.split())


def test_what_is_no_logbook_is_told(tmp_path: Path) -> None:
    for place, says in ((tmp_path, "contains no logbook"), (tmp_path / "x", "is not a folder")):
        result = CliRunner().invoke(main, ["incidents", str(place)])
        assert result.exit_code == 2
        assert says in result.output


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": 5}',
        '{"time": 1, "rank": 0}',
        '{"time": 1, "rank": 0, "cause": 5}',
        '{"time": "now", "rank": 0, "cause": "abort"}',
        '{"time": 1, "rank": 0, "cause": "abort", "because": "x"}',
        '{"time": 1, "rank": 0, "cause": "abort", "remedies": {"a": 1}}',
        "[1]",
        "torn",
    ],
)
def test_what_is_no_record_is_counted_and_not_told(tmp_path: Path, line: str) -> None:
    Logbook(tmp_path).begin({})
    for kind in ("incidents", "bad_samples"):
        (tmp_path / f"{kind}.jsonl").write_text(line + "\n")
    result = CliRunner().invoke(main, ["incidents", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "2 damaged lines were left out: incomplete, because" in result.output
    assert "The other lines say that nothing went wrong." in result.output
    assert "incidents," not in result.output


def test_a_folder_of_damaged_lines_only_is_no_logbook(tmp_path: Path) -> None:
    (tmp_path / "incidents.jsonl").write_text('{"kind": 5}\n')
    (tmp_path / "run.json").write_text("[]")
    result = CliRunner().invoke(main, ["incidents", str(tmp_path)])
    assert result.exit_code == 2
    assert "contains no logbook (2 lines in it are not records)" in result.output


def test_curves_reach_back_to_the_beginning_in_bounded_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = Logbook(tmp_path, limit=20_000)
    clock = iter(range(1_700_000_000, 1_800_000_000, 5))
    monkeypatch.setattr("holdfast.autopsy.logbook.time.time", lambda: float(next(clock)))
    for number in range(3000):
        figures = {"series": 1.0, "batches": number, "samples": 0, "wait_seconds": 0.0}
        figures |= {"elapsed": float(number), "workers": {}, "seconds": {}, "ended": number == 5}
        book.progress(lambda figures=figures: figures)
        book.flush()
    story = read(tmp_path)
    numbers = [one["batches"] for one in story.progress]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == 2999
    assert 5 in numbers, "the last record of a series is kept"
    gaps = [after - before for before, after in itertools.pairwise(numbers)]
    assert max(gaps) < 10 * 3000 / len(numbers), "evenly spaced"
    assert numbers[0] < 300, "from the beginning on"
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * 20_000
