"""One training, undisturbed with torch or disturbed with holdfast, and what came of it."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch

import holdfast
from holdfast.runtime import totals
from tests.frameworks.trainings.parts import weights
from tests.support.processes import eventually

TRAININGS = (
    "lightning_trainer",
    "lightning_fabric",
    "accelerate_loop",
    "transformers_trainer",
    "transformers_resumed",
    "datasets_table",
    "datasets_stream",
    "web_dataset",
    "pyg_graphs",
    "pyg_nodes",
    "albumentations_images",
    "h5py_file",
    "lmdb_store",
    "zarr_array",
)
WITH_RANKS = (
    "torch_ddp",
    "lightning_trainer",
    "lightning_fabric",
    "accelerate_loop",
    "accelerate_stream",
    "transformers_trainer",
    "transformers_resumed",
)
KILLS = "after-fetch:SIGKILL@worker=0,task=2;before-send:SIGKILL@worker=1,task=3"
"""In every loader, or every epoch of one whose workers are not persistent."""
Program = subprocess.Popen[str]
OPTIONS = {"on_bad_sample": "skip", "max_restarts": None}


@dataclass(frozen=True)
class Outcome:
    weights: str
    deaths: int = 0
    bad_samples: int = 0


def prepare(name: str, folder: Path) -> Any:
    """The module of a training, with its data in `folder`."""
    module = importlib.import_module(f"tests.frameworks.trainings.{name}")
    if hasattr(module, "prepare"):
        module.prepare(folder)
    return module


def trained(module: Any, loader: Any, folder: Path, *, forgiving: bool) -> Outcome:
    before = len(holdfast.incidents()), sum(totals.bad_samples.values())
    torch.manual_seed(11)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = module.train(loader, folder, forgiving)
    deaths, bad = len(holdfast.incidents()), sum(totals.bad_samples.values())
    return Outcome(weights(model), deaths - before[0], bad - before[1])


def undisturbed(module: Any, folder: Path) -> Outcome:
    """With torch; its dataset gives None for the corrupt sample, and its collate function leaves None out."""
    return trained(module, torch.utils.data.DataLoader, folder, forgiving=True)


def by_import(module: Any, folder: Path) -> Outcome:
    with kills():
        loader = functools.partial(holdfast.DataLoader, **OPTIONS)
        return trained(module, loader, folder, forgiving=False)


def by_install(module: Any, folder: Path) -> Outcome:
    with kills(), holdfast.install(**OPTIONS):
        return trained(module, torch.utils.data.DataLoader, folder, forgiving=False)


def by_run(module: Any, folder: Path) -> Outcome:
    """In a program below ``holdfast run``: nothing is said about holdfast, and its options come from the environment."""
    with kills():
        return trained(module, torch.utils.data.DataLoader, folder, forgiving=False)


WAYS = {"import": by_import, "install": by_install, "run": by_run}
ALL = {"undisturbed": undisturbed, **WAYS}


def launched(way: str, folder: Path, names: Iterable[str], ranks: int = 1) -> Program:
    """The program in `__main__`, below ``holdfast run`` if that is the way, and below torchrun if there are several ranks."""
    command = ["-m"]
    if way == "run":
        given = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
        command += ["holdfast", "run", *given, f"--logbook={folder / 'logbook'}", "-m"]
    if ranks > 1:
        command += [*torchrun(ranks), "-m"]
    return started([*command, "tests.frameworks.trainings", way, str(folder), *names])


def torchrun(ranks: int) -> list[str]:
    return ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def started(arguments: list[str], **environment: str) -> Program:
    """Python with these arguments; it finds the tests."""
    root = Path(__file__).parents[3]
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for(program: Program) -> str:
    """What it said."""
    with program:
        try:
            said, _ = program.communicate(timeout=500)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)  # ranks too
    assert program.returncode == 0, said
    return said


def ended(program: Program, folder: Path) -> list[dict[tuple[str, str], Any]]:
    """What came of it: for each rank, by training and way."""
    wait_for(program)
    found = []
    for path in sorted(folder.glob("?.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        found.append({(one.pop("name"), one.pop("way")): one for one in records})
    return found


@contextlib.contextmanager
def kills() -> Iterator[None]:
    """Workers are killed in the middle; processes and descriptors of meanwhile are gone at the end."""
    gc.collect()
    before = _there_is()
    with mock.patch.dict(os.environ, HOLDFAST_FAULTS=KILLS):
        yield
    assert eventually(lambda: not _made_since(before), 10), _made_since(before)


def _made_since(before: set[tuple[int, str]]) -> set[tuple[int, str]]:
    gc.collect()  # what a thread has let go of since may hang in a cycle
    return _there_is() - before


def _there_is() -> set[tuple[int, str]]:
    """Child processes, and descriptors by number and by what they are."""
    found = {(one.pid, "child") for one in psutil.Process().children(recursive=True)}
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
        except OSError:
            pass
    return found
