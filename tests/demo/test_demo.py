"""The demo does what it shows, and says so in at most 80 columns."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.support import warm

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LOSS = re.compile(r"^ (\w+) +(0x1\.[0-9a-f]{13}p[-+]\d+)", re.MULTILINE)

pytestmark = pytest.mark.timeout(120)


@pytest.mark.slow
def test_the_training_of_the_demo_learns_to_tell_the_shapes_apart(tmp_path: Path) -> None:
    """What the demo runs several times, undisturbed."""
    program = f"""
import io, runpy, sys
sys.path.insert(0, {str(EXAMPLES)!r})
sys.argv = ["demo_training.py", "holdfast", {str(tmp_path)!r}]
sys.stdin = io.StringIO("train\\n")
runpy.run_path({str(EXAMPLES / "demo_training.py")!r}, run_name="__main__")
"""
    path = os.pathsep.join(path for path in sys.path if path)
    ended = warm.run(["-c", program], env={**os.environ, "PYTHONPATH": path}, timeout=100)
    assert ended.returncode == 0, ended.stderr
    last = [json.loads(line) for line in ended.stdout.splitlines()[-2:]]
    assert [event["event"] for event in last] == ["end", "bye"]
    assert last[0]["accuracy"] > 0.9


@pytest.mark.slow
@pytest.mark.faults
def test_torch_dies_and_holdfast_arrives_at_the_undisturbed_loss() -> None:
    """The whole of it, as `make demo` runs it, in a pipe."""
    path = os.pathsep.join(path for path in sys.path if path)
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo.py")],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd="/",  # it may be called from anywhere
    )
    out = ended.stdout
    assert ended.returncode == 0, out + ended.stderr
    assert ended.stderr == ""
    assert "\x1b" not in out
    losses = dict(LOSS.findall(out))
    assert losses["undisturbed"] == losses["holdfast"]
    assert "torch" not in losses
    assert re.search(r"torch +died at batch \d+ of \d+: RuntimeError: DataLoader worker", out)
    table = out[out.index(" what      worker") : out.index(" All of this took")].splitlines()
    assert max(len(line) for line in table) <= 80
    whats = [line.split()[0] for line in table[1 : table.index("")]]
    assert whats.count("segfault") == whats.count("hang") == 1
    assert whats.count("SIGKILL") == 6
    assert "never" not in out
    assert int(re.search(r"worker_memory_limit='64MiB': (\d+) replaced", out)[1]) > 0
    assert re.search(r"torch +died after \d+ batches: ValueError", out)
    assert "959 of 960 samples; pictures/0417-" in out
    page = Path("/", re.search(r"^ (\S+report\.html)$", out, re.MULTILINE)[1])
    assert "<!doctype html>" in page.read_text().lower()


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import demo

    return demo


def trained(demo: Any, name: str, losses: list[float], **more: Any) -> Any:
    run = demo.Run(name, name, **more)
    for worker in range(3):
        run.handle({"event": "worker", "worker": worker, "pid": 100 + worker})
    for number, loss in enumerate(losses):
        run.handle(batch(number))
        run.handle({"event": "loss", "loss": loss.hex(), "time": 1.0})
    return run


def batch(number: int, **more: Any) -> dict[str, Any]:
    event = {"event": "batch", "batch": number, "arrived": 1.0, "time": 1.0}
    return {**event, "size": 24, "recycled": 0, **more}


def story(demo: Any, *, last_loss: float = 0.25, lost: int = 1) -> Any:
    """The runs of a demo in which everything has gone as promised, but perhaps for the loss."""
    losses = [0.5] * demo.TOTAL
    reference = trained(demo, "undisturbed", losses)
    torch = trained(demo, "torch", losses[:60])
    torch.struck("SIGKILL", 1, 2.0)
    torch.end(1, "RuntimeError: DataLoader worker (pid 101) is killed by signal: Killed.", 3.0)
    again = trained(demo, "torch again", losses[:7])
    again.end(1, "ValueError: Failed to read all data", 3.0)
    holdfast = trained(demo, "holdfast", losses[1:], total=demo.TOTAL + demo.BATCHES)
    for worker, kind in enumerate(("SIGKILL", "segfault", "hang")):
        holdfast.struck(kind, worker, 2.0)
        holdfast.handle(incident(worker))
    holdfast.handle(batch(7, arrived=2.125, recycled=2))
    holdfast.handle({"event": "loss", "loss": losses[0].hex(), "time": 1.0})
    holdfast.leak(3.0)
    for run, loss in ((reference, 0.25), (holdfast, last_loss)):
        run.measured(0, 80 << 20)
        run.handle({"event": "end", "loss": loss.hex(), "accuracy": 1.0, "time": 4.0})
    for number in range(demo.BATCHES):
        size = demo.BATCH_SIZE - (lost if number == 5 else 0)
        holdfast.handle(batch(number, size=size, recycled=2))
    bad = {"event": "bad", "name": "pictures/0417-disc.npy", "action": "skipped"}
    holdfast.handle({**bad, "words": "ValueError: Failed to read all data", "time": 5.0})
    for run in (reference, holdfast):
        run.handle({"event": "bye", "time": 5.0})
        run.end(0, "", 5.0)
    return demo.Runs(reference, torch, again, holdfast)


def conclude(demo: Any, runs: Any) -> int:
    return int(demo.conclude(runs, demo.surprises(runs)))


def incident(worker: int) -> dict[str, Any]:
    return {
        "event": "incident",
        "end": "killed",
        "worker": worker,
        "pid": 100 + worker,
        "batch": 7,
        "sample": 1199,
        "step": "fetch",
        "action": "replaced; its batch is made again",
        "stack": "",
        "noticed": 2.0,
        "time": 2.1,
        "words": "worker died",
    }


def test_equal_losses_are_a_success(demo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert conclude(demo, story(demo)) == 0
    out = capsys.readouterr().out
    assert "after 125 ms" in out
    assert "2 replaced" in out
    assert max(len(line) for line in out.splitlines()) <= 80


def test_a_loss_that_differs_in_the_last_bit_is_a_failure(
    demo: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert conclude(demo, story(demo, last_loss=0.25 + 2**-54)) == 1
    assert "holdfast's loss is not that of the undisturbed run" in capsys.readouterr().out


def test_a_damaged_file_that_costs_two_samples_is_a_failure(demo: Any) -> None:
    assert conclude(demo, story(demo, lost=2)) == 1


@pytest.mark.parametrize("place", ["torch", "again"])
def test_a_torch_that_survives_is_a_failure(demo: Any, place: str) -> None:
    runs = story(demo)
    assert conclude(demo, replace(runs, **{place: runs.reference})) == 1


@pytest.mark.parametrize("name", ["strikes", "recycled", "bad"])
def test_a_storm_a_leak_or_a_damage_that_did_not_take_place_is_a_failure(
    demo: Any, name: str
) -> None:
    runs = story(demo)
    setattr(runs.holdfast, name, {"strikes": [], "recycled": 0, "bad": None}[name])
    assert conclude(demo, runs) == 1


def test_a_blow_that_holdfast_never_made_up_for_is_a_failure(demo: Any) -> None:
    runs = story(demo)
    runs.holdfast.struck("SIGKILL", 0, 2.0)
    assert conclude(demo, runs) == 1


def test_a_report_that_could_not_be_made_is_a_failure(demo: Any, tmp_path: Path) -> None:
    assert demo.make_report(tmp_path / "nothing", tmp_path / "report.html")


def test_the_picture_of_the_demo_needs_no_font_and_no_network(demo: Any, tmp_path: Path) -> None:
    import demo_picture

    demo_picture.save(story(demo), tmp_path / "demo.svg")
    svg = (tmp_path / "demo.svg").read_text()
    words = " ".join("".join(ElementTree.fromstring(svg).itertext()).replace("\xa0", " ").split())
    assert "the undisturbed one, bit for bit" in words
    assert re.findall(r"https?://[^\"']+|@font-face", svg) == ["http://www.w3.org/2000/svg"]


@pytest.mark.parametrize("size", [(78, 23), (80, 24), (101, 30), (120, 60)])
def test_the_panes_fill_the_terminal_and_no_more(demo: Any, size: tuple[int, int]) -> None:
    import demo_screen

    width, height = size
    waiting = demo.Runs(*(demo.Run(name, name, "One will be killed. " * 3) for name in "abcd"))
    for runs in (story(demo), waiting):
        lines = [
            "".join(text for _, text in line) for line in demo_screen.frame(runs, width, height)
        ]
        assert len(lines) < height
        assert max(len(line) for line in lines) <= width
        panes = [line for line in lines if line.startswith(("╭", "│", "╰"))]
        assert len(panes) > 16
        assert {len(line) for line in panes} == {width}
