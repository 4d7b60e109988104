"""The head of the cluster is lost: an error that a program can catch, and a state to go on from."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
import torch

import holdfast
from tests.ray.datasets import Noisy, digest
from tests.ray.stock import stock

SCRIPT = textwrap.dedent("""
    import json, os, signal, sys, time
    import psutil, ray, torch
    from tests.ray.datasets import Noisy
    from tests.ray.loaders import on_ray

    ray.init("local", num_cpus=2, log_to_driver=False, object_store_memory=100 << 20)
    loader = on_ray(Noisy(400, seconds=0.02), batch_size=4, shuffle=True)
    iterator, seen = iter(loader), []
    seen.append(next(iterator))
    (head,) = [one for one in psutil.Process().children() if one.name() == "gcs_server"]
    os.kill(head.pid, signal.SIGKILL)
    began = time.monotonic()
    try:
        for batch in iterator:
            seen.append(batch)
    except RuntimeError as error:
        soon = time.monotonic() - began < 20
        torch.save(seen, sys.argv[1])
        with open(sys.argv[2], "w") as file:
            json.dump(loader.state_dict(), file)
        print("caught", type(error).__name__, soon, "head" in str(error), flush=True)
        os._exit(0)
""")


def test_a_lost_head_is_one_clear_error_within_seconds_and_the_run_goes_on_elsewhere(
    tmp_path: Path,
) -> None:
    root = Path(__file__).parents[2]
    had, state = tmp_path / "had.pt", tmp_path / "state.json"
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(had), str(state)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.stdout.splitlines()[-1:] == ["caught WorkerLost True True"], ended.stderr[-3000:]
    seen = torch.load(had)
    assert 1 <= len(seen) < 100
    dataset = Noisy(400)
    with holdfast.DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2) as loader:
        loader.load_state_dict(json.loads(state.read_text()))
        rest = list(loader)
    assert digest([*seen, *rest]) == stock(dataset, batch_size=4, shuffle=True)
