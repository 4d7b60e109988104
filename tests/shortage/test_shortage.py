"""Real runs in a real control group with a limit.

Under it stock torch loses its run, for four different reasons; holdfast finishes, with the stream
that stock torch has where there is no limit. The trainer is never the victim.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data

from holdfast.autopsy.readers import cgroup
from tests.autopsy.test_places import memory_group
from tests.shortage.trainer import stream

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.getuid() != 0, reason="only root can make a control group"),
]

SHM = Path("/dev/shm")
LIMITS = {"Leaking": 600, "CopyOnWrite": 450, "Cyclic": 600, "Large": 520}
"""MiB for trainer and workers; the trainer alone needs about 250, with the list 420."""


def run(which: str, kind: str, group: Path, *more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run(
        [sys.executable, "-m", "tests.shortage.trainer", which, kind, *more],
        capture_output=True, text=True, timeout=90, env=environment, check=False,
        preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None,
    )  # fmt: skip


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind == "Leaking" else pytest.mark.slow) for kind in LIMITS],
)
def test_a_run_that_would_not_fit_goes_through_with_the_same_stream(kind: str) -> None:
    with memory_group(LIMITS[kind] << 20) as group:
        done = run("holdfast", kind, group)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["hash"] == stream(torch.utils.data.DataLoader, kind)[0]
    assert told["stats"]["most_in_flight_bytes"] < LIMITS[kind] << 19


@pytest.mark.slow
@pytest.mark.parametrize("kind", LIMITS)
def test_stock_torch_does_not_survive_there(kind: str) -> None:
    """Or the test above would prove nothing."""
    before = set(SHM.iterdir())
    with memory_group(LIMITS[kind] << 20) as group:
        done = run("torch", kind, group)
        kills = cgroup.kills_of((_as_group(group),))[str(group)]
    for left in set(SHM.iterdir()) - before:  # torch's, when all who know of it are killed
        _, pid, *_ = f"{left.name}__".split("_")
        if left.name.startswith("torch_") and not Path("/proc", pid).exists():
            left.unlink()
    assert done.returncode != 0, done.stdout
    assert kills > 0, done.stderr


def _as_group(path: Path) -> cgroup.Group:
    return cgroup.Group(path, cgroup.groups("self", "memory")[0].version)
