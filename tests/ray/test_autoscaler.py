"""A real autoscaler whose nodes take long: the loader goes on with what there is, and moves."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
from tests.ray.datasets import Noisy
from tests.ray.stock import stock

ROOT = Path(__file__).parents[2]
NODES_TAKE = 20.0  # seconds
COMMANDS = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray")

SCRIPT = """
import json, sys, time
import ray
from holdfast.ray import ray_driver
from tests.ray.datasets import Noisy, digest
from tests.ray.loaders import on_ray

address, batches = sys.argv[1], []
ray.init(address, log_to_driver=False)
ray_driver.PATIENCE = 3.0
with on_ray(Noisy(120), batch_size=4, prefetch_factor=2) as loader:
    driver = (iterator := iter(loader))._pool.driver
    moved = lambda: all(seat.born and not seat.squeezed for seat in driver._seats)
    deadline = time.monotonic() + 180
    while True:
        batches.append(next(iterator))
        if len(batches) == 10:  # the rest comes when all have a processor of their own
            while not moved() and time.monotonic() < deadline:
                time.sleep(0.1)
            has_moved = moved()
            break
    batches += iterator
    nodes = len({seat.node for seat in driver._seats})
    print(json.dumps([digest(batches), has_moved, nodes, len(loader.incidents)]), flush=True)
"""


@contextlib.contextmanager
def autoscaled(folder: Path, processors: int) -> Iterator[str]:
    """The address of a cluster whose head has so many processors. Other nodes come when they are
    needed, after a while, with two each."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    address = f"{_own_address()}:{port}"
    kinds: dict[str, Any] = {
        # The autoscaler does not see what of the head is in use, so it is told that there is nothing.
        "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "node": {
            "resources": {"CPU": 2, "object_store_memory": 100 << 20},
            "node_config": {},
            "min_workers": 0,
            "max_workers": 4,
        },
    }
    provider = {
        "type": "external",
        "module": "tests.ray.slow_nodes.SlowNodes",
        "seconds": NODES_TAKE,
        "gcs_address": address,
        "disable_node_updaters": True,
    }
    config = {
        "cluster_name": "slow",
        "max_workers": 4,
        "provider": provider,
        "available_node_types": kinds,
        "head_node_type": "ray.head.default",
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 5,
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        "cluster_synced_files": [],
        "rsync_exclude": [],
        "rsync_filter": [],
        "worker_start_ray_commands": [],
        **{f"{name}_commands": [] for name in COMMANDS},
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    command = [
        Path(sys.executable).with_name("ray"),
        "start",
        "--head",
        "--block",
        f"--port={port}",
    ]
    command += [f"--num-cpus={processors}", f"--object-store-memory={100 << 20}"]
    command += [f"--autoscaling-config={path}", "--include-dashboard=false"]
    settings = {
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "PYTHONPATH": str(ROOT),
        "RAY_TMPDIR": os.environ["RAY_TMPDIR"] + "/as",
    }
    os.mkdir(settings["RAY_TMPDIR"])
    head = subprocess.Popen(
        command, env={**os.environ, **settings}, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    try:
        _await_head(port)
        yield address
    finally:
        head.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(10)
        for process in psutil.process_iter(["cmdline"]):  # the nodes that came
            if any(settings["RAY_TMPDIR"] in part for part in process.info["cmdline"] or ()):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        head.wait()


def _own_address() -> str:
    from ray._private.services import get_node_ip_address

    return get_node_ip_address()  # type: ignore[no-any-return]


def _await_head(port: int) -> None:
    deadline = time.monotonic() + 40
    while True:
        try:
            socket.create_connection((_own_address(), port), 1).close()
        except OSError:
            assert time.monotonic() < deadline, "the head has not started"
            time.sleep(0.2)
        else:
            return


@pytest.mark.timeout(300, method="thread")
def test_an_autoscaler_that_takes_long_is_waited_for_and_used(tmp_path: Path) -> None:
    with autoscaled(tmp_path, processors=1) as address:
        ended = subprocess.run(
            [sys.executable, "-c", SCRIPT, address],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found == [stock(Noisy(120), batch_size=4), True, 2, 0]
    assert "the Ray cluster has no room for worker " in ended.stderr
    assert "now: it moves there" in ended.stderr
