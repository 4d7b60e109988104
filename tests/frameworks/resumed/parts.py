"""What the trainings have in common: samples, of which loading one ends a worker, and how a program ends in the middle."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

import holdfast
from tests.frameworks.trainings.parts import WIDTH, label, values, weights

SIZE = 24
BATCH = 4
EPOCHS = 2
BREAK = 8
"""Steps, of six in each epoch: the program ends in the middle of the second."""
TRAININGS = {
    "lightning_trainer": (1, ("import",)),
    "accelerate_stateful": (1, ("import",)),
    "accelerate_skip": (1, ("import", "install")),
    "transformers_trainer": (1, ("import", "install")),
    "two_ranks": (2, ("import", "install")),
}
"""By the name of the function: how many ranks there are, and the ways to use holdfast in it."""
SEEDED_BY_SAMPLE = ("accelerate_skip", "transformers_trainer")
"""Nothing of their loaders is saved, so the random states of workers would be lost."""


class Samples(Dataset[Any]):
    """What they are depends on all random generators of the worker."""

    def __init__(self, part: Part) -> None:
        self.part = part

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        if get_worker_info() is not None:
            self.part.kill_one_worker()
        noise = torch.rand(WIDTH) + random.random() + float(np.random.rand())
        return values(index) + 0.01 * noise, label(index)


@dataclass
class Part:
    """One process: the whole training, its first part or its second."""

    which: str  # "whole", "first", "second"
    way: str  # "torch", "import", "install"
    folder: Path
    rank: int = 0
    loaded: int = 0  # samples that this worker has loaded

    def __post_init__(self) -> None:
        self.shared = self.folder  # between the first and the second part
        self.result = self.folder / f"{self.which}-{self.rank}"

    def kill_one_worker(self) -> None:
        """End this worker, when it has loaded some samples, if it is the first."""
        self.loaded += 1
        if self.which == "whole" or self.loaded < 3:
            return
        try:
            os.close(
                os.open(self.folder / f"killed-{self.which}-{self.rank}", os.O_CREAT | os.O_EXCL)
            )
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    def breaks(self, step: int) -> bool:
        return self.which == "first" and step == BREAK

    def end_by_kill(self) -> NoReturn:
        """As a machine that is gone: nothing is closed, nothing is written any more."""
        self.result.write_text(f"killed after {len(holdfast.incidents())} deaths")
        deadline = time.monotonic() + 60
        for rank in range(int(os.environ.get("WORLD_SIZE", "1"))):
            while not (
                self.folder / f"first-{rank}"
            ).exists():  # the others need this one until then
                assert time.monotonic() < deadline
                time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def end(self, model: torch.nn.Module) -> None:
        self.result.write_text(f"{weights(model)} after {len(holdfast.incidents())} deaths")
