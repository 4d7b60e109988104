"""The demo does what it shows, and says so in at most 80 columns."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LOSS = re.compile(r"^ (\w+) +(0x1\.[0-9a-f]{13}p[-+]\d+)", re.MULTILINE)

pytestmark = pytest.mark.timeout(120)


def test_the_training_of_the_demo_learns_to_tell_the_shapes_apart() -> None:
    """What the demo runs three times, undisturbed."""
    program = f"""
import io, runpy, sys
sys.path.insert(0, {str(EXAMPLES)!r})
sys.argv = ["demo_training.py", "holdfast"]
sys.stdin = io.StringIO("begin\\n")
runpy.run_path({str(EXAMPLES / "demo_training.py")!r}, run_name="__main__")
"""
    path = os.pathsep.join(path for path in sys.path if path)
    ended = warm.run(["-c", program], env={**os.environ, "PYTHONPATH": path}, timeout=100)
    assert ended.returncode == 0, ended.stderr
    last = json.loads(ended.stdout.splitlines()[-1])
    assert last["event"] == "end"
    assert last["accuracy"] > 0.9


@pytest.mark.slow
@pytest.mark.faults
def test_torch_dies_and_holdfast_arrives_at_the_undisturbed_loss() -> None:
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
    losses = dict(LOSS.findall(out))
    assert losses["undisturbed"] == losses["holdfast"]
    assert "torch" not in losses
    assert re.search(r"torch +died at batch \d+ of \d+: RuntimeError: DataLoader worker", out)
    table = out[out.index(" what      worker") :].splitlines()
    assert max(len(line) for line in table) <= 80
    whats = [line.split()[0] for line in table[1 : table.index(" final loss") - 1]]
    assert whats.count("segfault") == whats.count("hang") == 1
    assert whats.count("SIGKILL") == 7
    assert "never" not in out


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import demo

    return demo


def trained(demo: Any, name: str, losses: list[float]) -> Any:
    run = demo.Run(name, name)
    for worker in range(3):
        run.handle({"event": "worker", "worker": worker, "pid": 100 + worker})
    for number, loss in enumerate(losses):
        run.handle({"event": "batch", "batch": number, "arrived": 1.0, "time": 1.0})
        run.handle({"event": "loss", "loss": loss.hex(), "time": 1.0})
    return run


def story(demo: Any, *, last_loss: float = 0.25) -> tuple[Any, Any, Any]:
    """The runs of a demo in which everything has gone as promised, but perhaps for the loss."""
    losses = [0.5] * demo.TOTAL
    reference = trained(demo, "undisturbed", losses)
    torch = trained(demo, "torch", losses[:60])
    torch.struck("SIGKILL", 1, 2.0)
    torch.end(1, "RuntimeError: DataLoader worker (pid 101) is killed by signal: Killed.", 3.0)
    holdfast = trained(demo, "holdfast", losses)
    for worker, kind in enumerate(("SIGKILL", "segfault", "hang")):
        holdfast.struck(kind, worker, 2.0)
        holdfast.handle(incident(worker))
    holdfast.batches = 0
    holdfast.handle({"event": "batch", "batch": 7, "arrived": 2.125, "time": 2.2})
    holdfast.batches = demo.TOTAL
    for run, loss in ((reference, 0.25), (holdfast, last_loss)):
        run.handle({"event": "end", "loss": loss.hex(), "accuracy": 1.0, "time": 4.0})
        run.end(0, "", 5.0)
    return reference, torch, holdfast


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
    assert demo.conclude(*story(demo)) == 0
    assert "after 125 ms" in capsys.readouterr().out


def test_a_loss_that_differs_in_the_last_bit_is_a_failure(
    demo: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.conclude(*story(demo, last_loss=0.25 + 2**-54)) == 1
    assert "holdfast's final loss is not that of the undisturbed run" in capsys.readouterr().out


def test_a_torch_that_survives_is_a_failure(demo: Any) -> None:
    reference, _, holdfast = story(demo)
    assert demo.conclude(reference, reference, holdfast) == 1


def test_a_storm_that_did_not_take_place_is_a_failure(demo: Any) -> None:
    reference, torch, holdfast = story(demo)
    holdfast.strikes = []
    assert demo.conclude(reference, torch, holdfast) == 1


def test_a_blow_that_holdfast_never_made_up_for_is_a_failure(demo: Any) -> None:
    reference, torch, holdfast = story(demo)
    holdfast.struck("SIGKILL", 0, 2.0)
    assert demo.conclude(reference, torch, holdfast) == 1


@pytest.mark.parametrize("width", [78, 80, 101, 120])
def test_the_panes_fill_the_terminal_and_no_more(demo: Any, width: int) -> None:
    import demo_screen

    waiting = tuple(demo.Run(name, name, "One will be killed. " * 3) for name in ("a", "b", "c"))
    for runs in (story(demo), waiting):
        lines = ["".join(text for _, text in line) for line in demo_screen.frame(runs, width)]
        assert len(lines) < demo_screen.LOWEST
        assert max(len(line) for line in lines) <= width
        panes = [line for line in lines if line.startswith(("╭", "│", "╰"))]
        assert len(panes) == demo_screen.PANE_LINES + 2
        assert {len(line) for line in panes} == {width}
