"""Real shortages in places made for them: a cgroup with a limit, a full /dev/shm, no /sys, no rights.

Each trainer is a process of its own, because a limit is for a whole process tree.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.explain.matrices import note
from tests.support import warm
from tests.support.groups import memory_group

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(100),
    pytest.mark.skipif(os.getuid() != 0, reason="only root can make such places"),
]

TRAINER = """
import json, mmap, os, signal, sys, time
import torch
from holdfast import DataLoader

class Breaks:
    def __init__(self, how, folder):
        self.how, self.folder = how, folder
    def __len__(self):
        return 24
    def __getitem__(self, index):
        if index == 17:
            try:
                os.close(os.open(self.folder + "/struck", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return index
            globals()[self.how]()
        return index

def eat():
    held = []
    while True:
        held.append(bytearray(b"x") * (8 << 20))

def fill():
    with open("/dev/shm/full", "wb+") as file:
        file.truncate(64 << 20)
        memory = mmap.mmap(file.fileno(), 64 << 20)
        for at in range(0, 64 << 20, 4096):
            memory[at] = 1

def kill():
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)

if __name__ == "__main__":
    how, folder, method = sys.argv[1:]
    # Without a limit for workers: with one, a sample that eats is stopped before the kernel kills.
    loader = DataLoader(
        Breaks(how, folder), batch_size=4, num_workers=2, logbook=folder + "/book",
        multiprocessing_context=method, worker_memory_limit=None,
    )
    got = [int(one) for batch in loader for one in batch]
    told = [one.to_json() for one in loader.incidents]
    print(json.dumps({"got": got, "incidents": told}))
"""


METHODS = [
    "fork",
    pytest.param("spawn", marks=pytest.mark.slow),
    pytest.param("forkserver", marks=pytest.mark.slow),
]


def train(
    how: str, folder: Path, before: str | tuple[str, ...], method: str = "fork"
) -> dict[str, Any]:
    """Run a trainer whose sample 17 breaks its worker; what it says of it.

    `before` is code that is run before (see `warm.run`), or a command that starts a fresh interpreter.
    """
    script = folder / "train.py"
    script.write_text(TRAINER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [str(script), how, str(folder), method]
    if isinstance(before, str):
        done = warm.run(command, timeout=80, env=environment, before=before)
    else:
        command = [*before, sys.executable, *command]
        done = subprocess.run(command, capture_output=True, text=True, timeout=80, env=environment)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["got"] == list(range(24)), "batches were lost"
    (incident,) = told["incidents"]
    assert incident["sample"] == 17
    # Of a kill that nothing explains, no sample is suspected the first time.
    suspected = incident["cause"] != "killed-from-outside"
    told = (
        "replaced; the sample is tried alone" if suspected else "replaced; its batch is made again"
    )
    assert incident["action"] == told
    return dict(incident)


@pytest.mark.usefixtures("memory_groups")
@pytest.mark.parametrize("method", METHODS)
def test_a_real_kill_for_memory_in_a_real_group_is_named_with_its_counter(
    method: str, tmp_path: Path
) -> None:
    with memory_group(600 << 20) as group:
        incident = train("eat", tmp_path, group.joining(), method=method)
    note(f"out of memory, {method}", "oom-killed", incident)
    assert (incident["cause"], incident["confidence"]) == ("oom-killed", "high")
    assert incident["signal"] == "SIGKILL"
    said = " ".join(incident["because"])
    assert "oom_kill" in said or "Killed process" in said or "oom-kill" in said
    assert "600 MiB" in said
    assert incident["evidence"]["kills"]["group"] == 1
    assert incident["text"].startswith(
        f"worker {incident['worker_id']} (pid {incident['pid']}) was killed by the kernel"
    )
    assert any(
        "600 MiB" in one["text"] or "memory" in one["text"].lower() for one in incident["remedies"]
    )


def _mounted(folders: dict[str, str]) -> str:
    """Code for `warm.run`, tried."""
    code = warm.mounting(folders)
    tried = warm.run(["-c", ""], timeout=60, before=code)
    if tried.returncode:
        pytest.skip(f"no mount namespace can be made here: {tried.stderr}")
    return code


@pytest.mark.parametrize("method", METHODS)
def test_a_full_dev_shm_is_named(method: str, tmp_path: Path) -> None:
    small = _mounted({"/dev/shm": "size=16m"})
    incident = train("fill", tmp_path, small, method=method)
    note(f"full /dev/shm, {method}", "shm-exhausted", incident)
    assert (incident["cause"], incident["signal"]) == ("shm-exhausted", "SIGBUS")
    assert incident["evidence"]["shm"] == {"total": 16 << 20, "free": 0}
    assert "/dev/shm has 0 B free of 16 MiB" in incident["because"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "hidden",
    [
        pytest.param(("/sys/fs/cgroup",), id="no cgroups"),
        pytest.param(("/sys", "/dev/shm"), id="no sys", marks=pytest.mark.slow),
    ],
)
def test_without_sys_and_without_rights_there_is_less_evidence_and_no_error(
    hidden: tuple[str, ...],
) -> None:
    """As an unprivileged user, without mounted counters, and without access to the kernel's log."""
    _mounted({})
    mounts = [f"mount -t tmpfs -o mode=1777 tmpfs {path} && " for path in hidden]
    inside = ("unshare", "-m", "sh", "-c", "".join([*mounts, 'exec "$@"']), "sh")
    unprivileged = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    try:
        subprocess.run([*inside, *unprivileged, sys.executable, "-c", ""], check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this interpreter cannot be run by an unprivileged user here")
    # Not in pytest's own folder, which every pytest that is started closes to others again.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        incident = train("kill", Path(folder), (*inside, *unprivileged))
    assert (incident["cause"], incident["confidence"]) == ("killed-from-outside", "medium")
    assert incident["evidence"]["kills"]["group"] is None
    assert "kernel_readable" not in incident["evidence"]
