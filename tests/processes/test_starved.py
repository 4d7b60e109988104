"""A worker that has to wait for others is not taken for one that has stalled: for a processor, or
for the trainer to read what it sends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import pytest
import torch.utils.data

from holdfast import DataLoader
from tests.support.processes import eventually

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="no such class of processes here"),
    pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="it is not counted here"),
]

SPINS = "import time\nend = time.monotonic() + 2\nwhile time.monotonic() < end:\n    pass"


class Starved(torch.utils.data.Dataset[int]):
    """One sample takes a little of a processor's time, and the processor is another program's."""

    def __init__(self, cpu: int) -> None:
        self.cpu = cpu

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 5:
            os.sched_setaffinity(0, {self.cpu})
            program = subprocess.Popen([sys.executable, "-c", SPINS])
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            end = time.process_time() + 0.02
            while time.process_time() < end and program.poll() is None:
                pass
            program.kill()
            program.wait()
        return index


def test_a_worker_without_a_processor_has_not_stalled() -> None:
    cpu = min(os.sched_getaffinity(0))
    with DataLoader(Starved(cpu), num_workers=1, stall_timeout=0.5) as loader:
        assert [batch.item() for batch in loader] == list(range(8))
        assert loader.incidents == []


class Sends(torch.utils.data.Dataset[bytes]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> bytes:
        return bytes(1 << 20)  # more than a socket holds


def test_a_worker_whose_messages_are_not_read_yet_has_not_stalled() -> None:
    with DataLoader(Sends(), num_workers=1, batch_size=None, prefetch_factor=2) as loader:
        iterator: Any = iter(loader)
        next(iterator)
        driver = iterator._pool.driver
        with iterator._pool.lock:  # nothing is read
            assert eventually(lambda: driver.progress(0).note.step == "send")
            assert eventually(lambda: driver.resources.slots[0].channel.unread)
            before = time.monotonic()
            assert driver.progress(0).active >= before
