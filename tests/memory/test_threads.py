"""Threads of linear algebra in workers: torch's number, the user's, or what fits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.memory import threads
from tests.autopsy.made_up import LIMITS, MOUNTS_V2, Tree

PROGRAM = '''
import hashlib, json, os, sys
import numpy as np
import torch.utils.data
from threadpoolctl import threadpool_info
from holdfast import DataLoader
from holdfast.memory import threads

class Products(torch.utils.data.Dataset):
    """Large enough to be shared among threads."""

    def __init__(self):
        self.matrices = np.random.default_rng(0).standard_normal((3, 300, 300)).astype(np.float32)

    def __len__(self):
        return len(self.matrices)

    def __getitem__(self, index):
        product = self.matrices[index] @ self.matrices[index]
        counts = [one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"]
        return hashlib.sha256(product.tobytes()).hexdigest(), counts

def first(samples):
    return samples[0]

if __name__ == "__main__":
    if "crowded" in sys.argv:
        threads.room = lambda: 3
    method = sys.argv[1]
    answer = {}
    for name, make in (("torch", torch.utils.data.DataLoader), ("ours", DataLoader)):
        loader = make(Products(), num_workers=2, collate_fn=first, multiprocessing_context=method)
        answer[name] = list(loader)
    print(json.dumps(answer))
'''


def products(folder: Path, method: str, *more: str, **environment: str) -> dict[str, Any]:
    (folder / "program.py").write_text(PROGRAM)
    known = {key: value for key, value in os.environ.items() if "NUM_THREADS" not in key}
    path = ":".join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "program.py", method, *more],
        capture_output=True, text=True, timeout=100, check=False, cwd=folder,
        env={**known, "PYTHONPATH": path, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "said": done.stderr}


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_products_are_torchs_to_the_last_bit(tmp_path: Path, method: str) -> None:
    found = products(tmp_path, method)
    assert found["ours"] == found["torch"]


def test_the_users_number_is_respected(tmp_path: Path) -> None:
    found = products(tmp_path, "fork", "crowded", OPENBLAS_NUM_THREADS="2", OMP_NUM_THREADS="2")
    assert found["ours"] == found["torch"]
    assert found["said"] == ""
    counts = {count for _, counts in found["ours"] for count in counts}
    assert counts <= {min(2, os.cpu_count() or 1)}


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_where_they_do_not_fit_there_is_one_and_a_word_about_it(
    tmp_path: Path, method: str
) -> None:
    found = products(tmp_path, method, "crowded")
    assert {count for _, counts in found["ours"] for count in counts} == {1}
    assert found["said"].count("3 are left here (pids.max, ulimit -u)") == 1


@pytest.mark.parametrize(
    ("workers", "cores", "room", "environment", "one_each"),
    [
        (8, 64, None, {}, False),
        (8, 64, 1024, {}, False),
        (8, 64, 1023, {}, True),
        (8, 64, 10, {"OMP_NUM_THREADS": "4"}, False),
        (8, 64, 10, {"OMP_NUM_THREADS": ""}, True),
    ],
)
def test_what_is_crowded(
    workers: int, cores: int, room: int | None, environment: dict[str, str], one_each: bool
) -> None:
    assert bool(threads.crowded(workers, cores, room, environment)) is one_each


def test_room_is_what_the_group_and_the_user_have_left(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    assert threads.room(tree.roots) is None
    tree.proc("self/limits", LIMITS)
    assert threads.room(tree.roots, uid=0) is None
    by_user = threads.room(tree.roots, uid=1000)
    tree.proc("self/mountinfo", MOUNTS_V2)
    tree.proc("self/cgroup", "0::/job\n")
    tree.cgroup("job/pids.max", "100")
    tree.cgroup("job/pids.current", "30")
    assert threads.room(tree.roots, uid=0) == 70
    assert by_user is None or threads.room(tree.roots, uid=1000) == min(70, by_user)
