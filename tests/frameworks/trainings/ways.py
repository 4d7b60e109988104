"""One training, undisturbed with torch or disturbed with holdfast, and what came of it."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

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
KILLS = "after-fetch:SIGKILL@worker=0,task=2;before-send:SIGKILL@worker=1,task=3"
"""In every loader, or every epoch of one whose workers are not persistent."""
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


WAYS = {"import": by_import, "install": by_install}


@contextmanager
def kills() -> Iterator[None]:
    """Workers are killed in the middle; descriptors that were opened meanwhile are closed at the end."""
    gc.collect()
    before = _descriptors()
    with mock.patch.dict(os.environ, HOLDFAST_FAULTS=KILLS):
        yield
    assert eventually(lambda: not _opened_since(before), 10), _opened_since(before)


def _opened_since(before: set[tuple[int, str]]) -> set[tuple[int, str]]:
    gc.collect()  # what a thread has let go of since may hang in a cycle
    return _descriptors() - before


def _descriptors() -> set[tuple[int, str]]:
    """Pipes, sockets, files in memory and the like, by number and by what they are."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
        except OSError:
            pass
    return found
