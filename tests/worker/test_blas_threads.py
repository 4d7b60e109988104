"""Threads of linear algebra in workers: one each, unless the user has said how many."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import warm

PROGRAM = """
import json, sys
import numpy as np
from threadpoolctl import ThreadpoolController, threadpool_info
from holdfast import DataLoader

class Counts:
    def __len__(self):
        return 2
    def __getitem__(self, index):
        np.ones((8, 8)) @ np.ones((8, 8))
        return [one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"]

def widen(worker):
    ThreadpoolController().limit(limits=2, user_api="blas")

def same(sample):
    return sample

if __name__ == "__main__":
    method, init = sys.argv[1:]
    loader = DataLoader(
        Counts(), batch_size=None, num_workers=1, collate_fn=same, multiprocessing_context=method,
        worker_init_fn=widen if init else None,
    )
    print(json.dumps(list(loader)[0]))
"""


def counts(folder: Path, method: str, init: str = "", **variables: str) -> set[int]:
    """In a worker. The libraries read variables when they are loaded: with some, in an interpreter of its own."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    program = folder / "program.py"
    program.write_text(PROGRAM)
    command, environment = [str(program), method, init], environment | variables
    if variables:
        command.insert(0, sys.executable)
        ended = subprocess.run(
            command, env=environment, timeout=120, capture_output=True, text=True
        )
    else:
        ended = warm.run(command, env=environment, timeout=120)
    assert ended.returncode == 0, ended.stderr
    found = set(json.loads(ended.stdout))
    if not found:
        pytest.skip("NumPy has no BLAS here that can be asked")
    return found


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_worker_has_one(method: str, tmp_path: Path) -> None:
    assert counts(tmp_path, method) == {1}


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: one thread anyway")
def test_with_a_variable_of_the_users_it_has_as_many_as_the_libraries_have(tmp_path: Path) -> None:
    assert min(counts(tmp_path, "fork", OPENBLAS_NUM_THREADS="2", MKL_NUM_THREADS="2")) > 1


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: one thread anyway")
def test_so_does_a_worker_init_fn(tmp_path: Path) -> None:
    assert counts(tmp_path, "fork", "widen") == {2}
