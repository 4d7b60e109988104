"""examples/resume.py, killed and started again, ends with the weights of a run without a break."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "resume.py"


def run(checkpoint: Path, *more: str) -> str:
    command = [sys.executable, str(EXAMPLE), "--checkpoint", str(checkpoint), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == ""
    return done.stdout


@pytest.mark.slow
def test_the_example_ends_with_the_same_weights_in_one_run_and_in_four(tmp_path: Path) -> None:
    whole = run(tmp_path / "one.pt")
    assert whole.startswith("weights ")
    for steps in ("5", "11", "16"):  # in the first epoch, at its end, and in the last
        assert "weights" not in run(tmp_path / "two.pt", "--steps", steps)
    last = run(tmp_path / "two.pt").splitlines()
    assert last[0].startswith("goes on in epoch")
    assert last[1] == whole.strip()
