"""Datasets for trainers: samples that get their worker into trouble, and say so before.

Workers speak through file descriptor 1, in one write each, so that a test learns from the trainer's output that a
worker is where it is wanted, without sleeping.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

__all__ = [
    "TROUBLES",
    "Bulky",
    "Endless",
    "Numbers",
    "Troubled",
    "become_deaf",
    "get_into",
    "ignore_termination",
    "nothing_special",
]

_lock = threading.Lock()


def _announce(what: str) -> None:
    os.write(1, f"{what} {os.getpid()}\n".encode())


def _sleep() -> None:
    time.sleep(3600)


def _spin() -> None:
    while True:
        pass


def _hold_the_gil() -> None:
    ctypes.PyDLL(None).sleep(3600)


def _wait_for_a_lock() -> None:
    with _lock, _lock:
        pass


def _write_to_a_full_pipe() -> None:
    _, end = os.pipe()
    while True:
        os.write(end, bytes(65536))


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _sleep_deaf() -> None:
    become_deaf(0)
    time.sleep(3600)


TROUBLES = {
    "sleep": _sleep,
    "spin": _spin,
    "gil": _hold_the_gil,
    "lock": _wait_for_a_lock,
    "write": _write_to_a_full_pipe,
    "stop": _stop,
    "deaf": _sleep_deaf,
}


def get_into(trouble: str) -> None:
    _announce("trouble")
    TROUBLES[trouble]()


def become_deaf(worker: int) -> None:
    """A worker_init_fn: nothing that a process can ignore gets through, not even the notice of its parent's death."""
    for number in signal.valid_signals():
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            try:
                signal.signal(number, signal.SIG_IGN)
            except OSError:  # two belong to the C library
                pass
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # PR_SET_PDEATHSIG


def ignore_termination(worker: int) -> None:
    """A worker_init_fn."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def nothing_special(worker: int) -> None:
    """A worker_init_fn."""


class Numbers(Dataset[Any]):
    def __init__(self, size: int = 1000) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return index


class Troubled(Numbers):
    """Every sample from `at` on ends in trouble."""

    def __init__(self, trouble: str, at: int = 0, size: int = 1000) -> None:
        super().__init__(size)
        self.trouble = trouble
        self.at = at

    def __getitem__(self, index: int) -> int:
        if index >= self.at:
            get_into(self.trouble)
        return index


class Bulky(Numbers):
    """Samples that go through the channel and fill it if it is not read. Each worker waits for a byte from `gate` before
    its first one, and says who it is."""

    def __init__(self, gate: int) -> None:
        super().__init__()
        self.gate = gate
        self.begun = False

    def __getitem__(self, index: int) -> bytes:
        if not self.begun:
            self.begun = True
            os.read(self.gate, 1)
            _announce("begun")
        return b"%d " % index * 1500


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        number = 0
        while True:
            yield torch.full((4,), number)
            number += 1
