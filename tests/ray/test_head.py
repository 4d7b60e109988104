"""The head of the cluster is lost: an error that a program can catch, within seconds."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: make test-ray")

SCRIPT = textwrap.dedent("""
    import os, signal, time
    import psutil, ray, torch
    import holdfast
    from tests.ray.datasets import Noisy

    ray.init(num_cpus=2, log_to_driver=False, object_store_memory=100 << 20)
    dataset = Noisy(4000, seconds=0.01)
    loader = holdfast.DataLoader(dataset, batch_size=4, num_workers=2, worker_method="ray")
    iterator = iter(loader)
    next(iterator)
    (head,) = [one for one in psutil.Process().children() if one.name() == "gcs_server"]
    os.kill(head.pid, signal.SIGKILL)
    began = time.monotonic()
    try:
        for _ in iterator:
            pass
    except RuntimeError as error:
        soon = time.monotonic() - began < 30
        print("caught", type(error).__name__, soon, "head" in str(error), flush=True)
        os._exit(0)
""")


@pytest.mark.timeout(150, method="thread")
def test_a_lost_head_is_one_clear_error_within_seconds(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert ended.stdout.splitlines()[-1:] == ["caught WorkerLost True True"], ended.stderr[-3000:]
