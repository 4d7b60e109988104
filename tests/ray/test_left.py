"""A program that leaves the cluster while a loader is in use: an error, and no other cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
import torch

from tests.ray.datasets import Noisy, digest
from tests.ray.stock import stock

SCRIPT = textwrap.dedent("""
    import sys, time
    import ray, torch
    from tests.ray.datasets import Noisy
    from tests.ray.loaders import on_ray

    def new():
        dataset = Noisy(400, seconds=0.005)
        return on_ray(dataset, 1, batch_size=4, shuffle=True, prefetch_factor=2)

    loader = new()
    iterator = iter(loader)
    seen = [next(iterator)]
    ray.shutdown()
    try:
        for batch in iterator:
            seen.append(batch)
    except RuntimeError as error:
        print(type(error).__name__, "ray.shutdown()" in str(error), flush=True)
    time.sleep(1.5)  # in which the cluster would be looked at
    print(ray.is_initialized(), flush=True)
    again = new()
    again.load_state_dict(loader.state_dict())
    torch.save([*seen, *again], sys.argv[1])
    left = iter(again)
    next(left)
    # It ends in the middle of an epoch. Ray leaves the cluster before the loader is closed.
""")


def test_who_leaves_the_cluster_gets_an_error_and_no_other_cluster(tmp_path: Path) -> None:
    had = tmp_path / "had.pt"
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
        ended = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(had)],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=100,
            # Its own folder: otherwise it may find a cluster of other tests.
            env={**os.environ, "RAY_TMPDIR": folder},
        )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.splitlines() == ["WorkerLost True", "False"], ended.stderr[-3000:]
    assert ended.stderr.count("Started a local Ray instance") == 2
    assert "Traceback" not in ended.stderr
    expected = stock(Noisy(400, seconds=0.005), 1, 1, batch_size=4, shuffle=True)
    assert digest(torch.load(had)) == expected
