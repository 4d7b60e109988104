"""The lifeline, with a process that does nothing but hold on to it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from holdfast.engine.lifeline import ARM, Lifeline

BY_FUNCTION = "import sys; from holdfast.engine.lifeline import arm; arm({fd})\n"
WAITING = "print('armed', flush=True); sys.stdin.read()"
WAYS = pytest.mark.parametrize("way", [ARM, BY_FUNCTION], ids=["text", "function"])


def hold(lifeline: Lifeline, way: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys\n{way.format(fd=lifeline.reading)}\n{WAITING}"],
        pass_fds=[lifeline.reading],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@WAYS
def test_whoever_holds_on_is_killed_when_it_is_cut(way: str) -> None:
    lifeline = Lifeline()
    with hold(lifeline, way) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "armed\n"
        lifeline.cut()
        assert process.wait(30) == -signal.SIGKILL


@WAYS
def test_whoever_comes_too_late_to_be_signalled_leaves_without_a_word(way: str) -> None:
    lifeline = Lifeline()
    lifeline.let_go()  # of the only writing end there is
    with hold(lifeline, way) as process:
        assert process.communicate(timeout=30) == ("", "")
        assert process.returncode == 0
    lifeline.cut()
