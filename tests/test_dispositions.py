"""Tests that are started by `nohup`, or in the background of a script, find what others find."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

STARTS_ANOTHER = """
import os, signal, subprocess, sys
from tests.support.dispositions import take_back
take_back()
program = "import signal; print(*(int(signal.getsignal(n)) for n in (1, 3, 15)), signal.getsignal(2) is signal.default_int_handler)"
subprocess.run([sys.executable, "-S", "-c", program], check=True)
os.kill(os.getpid(), signal.SIGHUP)
print("still there")
"""


def ignore() -> None:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def test_what_the_tests_start_has_the_default_dispositions_though_ours_were_ignored() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", STARTS_ANOTHER],
        preexec_fn=ignore, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT,
    )  # fmt: skip
    assert ended.stdout == "0 0 0 True\nstill there\n", ended.stderr
