"""The lifeline, with a process that does nothing but hold on to it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from holdfast.processes.lifeline import ARM, Lifeline

BY_FUNCTION = "import sys; from holdfast.processes.lifeline import arm; arm({fd})\n"
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


CLOSED = """
import os, resource, sys
for fd in (1, 2):
    os.close(fd)
resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))
{way}
left = [fd for fd in (1, 2) if os.path.exists(f"/proc/self/fd/{{fd}}")]
os._exit(10 + len(left))
"""


@pytest.mark.parametrize(
    ("way", "limit"),
    [(ARM, 256), (BY_FUNCTION, 256), (ARM, 3)],
    ids=["text", "function", "text, and no other number is free"],
)
def test_it_is_never_held_by_the_number_of_a_standard_stream(way: str, limit: int) -> None:
    """What is printed there would go into the pipe, or be refused."""
    lifeline = Lifeline()
    text = way.format(fd=lifeline.reading)
    program = CLOSED.format(way=text, limit=limit)
    done = subprocess.run(
        [sys.executable, "-c", program], pass_fds=[lifeline.reading], timeout=60, check=False
    )
    lifeline.cut()
    assert done.returncode == 10
