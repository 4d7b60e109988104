"""I9: whatever state its workers are in, the interpreter exits at once, and no process stays."""

from __future__ import annotations

import re
import time

import pytest

from tests.support.scripts import run_script

# What is likeliest of these is in tests/lifecycle too, and there in every run.
pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(120, method="thread")]

SCRIPT = """
    import ctypes, os, signal, sys, threading, time

    class Data:
        def __len__(self):
            return 40
        def __getitem__(self, index):
            if index == {at}:
                {sample}
            return index

    def main():
        loader = DataLoader(
            Data(), batch_size=2, num_workers=2, persistent_workers={persistent}, {options}
        )
        iterator = iter(loader)
        next(iterator)
        pids = [worker.pid for worker in iterator._workers]
        {outside}
        print("last", time.monotonic(), flush=True)

    if __name__ == "__main__":
        main()
"""
HANGS = {
    "sleeps": "time.sleep(3600)",
    "holds the GIL": "ctypes.PyDLL(None).sleep(3600)",
    "waits for a lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "is stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "left a thread": "threading.Thread(target=time.sleep, args=(3600,)).start()",
    "dies": "os._exit(3)",
}
OUTSIDE = {
    "all workers are stopped": "[os.kill(pid, signal.SIGSTOP) for pid in pids]",
    "all workers are killed": "[os.kill(pid, signal.SIGKILL) for pid in pids]",
    "nothing": "",
}


def check(**parts: str) -> None:
    values = {"at": "2", "sample": "pass", "persistent": "True", "options": "", "outside": ""}
    began = time.monotonic()
    ended = run_script("holdfast", SCRIPT.format(**{**values, **parts}), seconds=60, as_file=True)
    assert ended.code == 0, ended.err
    (last,) = re.findall(r"last ([\d.]+)", ended.out)
    assert began + ended.seconds - float(last) < 5, "I9: the exit took too long"
    assert not ended.left


@pytest.mark.parametrize("state", HANGS)
def test_the_interpreter_exits_while_a_worker(state: str) -> None:
    check(sample=HANGS[state])


@pytest.mark.parametrize("state", OUTSIDE)
def test_the_interpreter_exits_while(state: str) -> None:
    check(outside=OUTSIDE[state])


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("state", ["sleeps", "is stopped"])
def test_the_interpreter_exits_while_a_spawned_worker(state: str, method: str) -> None:
    check(sample=HANGS[state], options=f"multiprocessing_context={method!r}")
