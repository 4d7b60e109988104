"""Datasets whose best setting is known, because of how they are made."""

from __future__ import annotations

import hashlib
import mmap
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from holdfast import DataLoader


class Computing(Dataset[Any]):
    """Python code, which keeps Python's lock: a processor for each worker process, and no more."""

    loops = 40_000

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        found = 0
        for number in range(self.loops):
            found += number * number % 7
        return torch.tensor([float(found)])


class Hashing(Computing):
    """Native code, which releases Python's lock."""

    content = bytes(1_500_000)

    def __getitem__(self, index: int) -> torch.Tensor:
        hashlib.sha256(self.content).digest()
        return torch.zeros(4)


class Sleeping(Computing):
    """Waits, and nothing else: the more workers the better."""

    seconds = 0.01

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.zeros(4)


class Hoarding(Sleeping):
    """Each worker takes memory of its own, threads too."""

    nbytes = 64 << 20

    def __init__(self) -> None:
        self.mine: Any = None

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.mine is None:
            self.mine = threading.local()
        if not hasattr(self.mine, "held"):
            self.mine.held = torch.ones(self.nbytes // 4)
        return super().__getitem__(index)


class Reading(Computing):
    """Reads a file, past the page cache."""

    piece = 256 << 10

    def __init__(self, path: str) -> None:
        self.path = path

    def __len__(self) -> int:
        return os.path.getsize(self.path) // self.piece

    def __getitem__(self, index: int) -> torch.Tensor:
        file = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, self.piece) as buffer:
                os.preadv(file, [buffer], index * self.piece)
                return torch.tensor([float(buffer[0])])
        finally:
            os.close(file)


class Streaming(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for number in range(64):
            time.sleep(0.004)
            yield torch.tensor([float(number)])


class Empty(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


class Raising(Sleeping):
    def __getitem__(self, index: int) -> Any:
        raise ValueError(f"broken file {index}.jpg")


class SometimesRaising(Sleeping):
    def __getitem__(self, index: int) -> Any:
        if index % 5 == 0:
            raise ValueError(f"broken file {index}.jpg")
        return super().__getitem__(index)


class Hanging(Sleeping):
    def __getitem__(self, index: int) -> Any:
        threading.Event().wait()


class CrashingInThreads(Sleeping):
    def __getitem__(self, index: int) -> Any:
        if threading.current_thread() is not threading.main_thread():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Unpicklable(Sleeping):
    def __init__(self) -> None:
        self.transform = lambda sample: sample + 1

    def __getitem__(self, index: int) -> Any:
        return self.transform(super().__getitem__(index))


class Starting(Sleeping):
    """Starts another program, as some decoders do, and does not end it."""

    def __init__(self, log: str) -> None:
        super().__init__()
        self.log = log

    def __getitem__(self, index: int) -> Any:
        if not os.path.exists(self.log):
            program = subprocess.Popen(["sleep", "600"])
            with open(self.log, "w") as log:
                log.write(str(program.pid))
        return super().__getitem__(index)


def loader() -> Any:
    return DataLoader(Sleeping(), batch_size=4, num_workers=2, worker_method="thread")


def of_ray() -> Any:
    return DataLoader(Sleeping(), batch_size=4, num_workers=2, worker_method="ray")


def pad(samples: list[Any]) -> Any:
    return torch.stack(samples)
