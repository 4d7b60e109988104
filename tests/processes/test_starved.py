"""A worker that has to wait for others is not taken for one that has stalled: for a processor, or
for the trainer to read what it sends. Nor is one that goes on at the last moment."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import pytest
import torch.utils.data

from holdfast import DataLoader
from holdfast.autopsy.readers import procfs
from tests.support.processes import eventually

pytestmark = [pytest.mark.faults]

OTHERS = 12
SPINS = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
end = time.monotonic() + 20
while time.monotonic() < end:
    pass
"""


class Starved(torch.utils.data.Dataset[int]):
    """One sample takes a little of a processor's time, and many programs share that processor."""

    def __init__(self, cpu: int) -> None:
        self.cpu = cpu
        self.others: list[subprocess.Popen[bytes]] = []

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        if index < OTHERS:
            command = [sys.executable, "-I", "-S", "-c", SPINS, str(self.cpu)]
            self.others.append(subprocess.Popen(command))
        if index == OTHERS:
            everywhere = os.sched_getaffinity(0)
            os.sched_setaffinity(0, {self.cpu})
            end = time.process_time() + 0.1
            while time.process_time() < end:
                pass
            os.sched_setaffinity(0, everywhere)
            for other in self.others:
                other.kill()
        if index > OTHERS and self.others:
            self.others.pop().wait()
        return index


@pytest.mark.skipif(
    not os.path.exists("/proc/self/schedstat"), reason="waits for a processor are not counted here"
)
def test_a_worker_without_a_processor_has_not_stalled() -> None:
    cpu = min(os.sched_getaffinity(0))
    with DataLoader(Starved(cpu), num_workers=1, batch_size=2, stall_timeout=1.0) as loader:
        assert torch.cat(list(loader)).tolist() == list(range(24))
        assert loader.incidents == []


class Sends(torch.utils.data.Dataset[bytes]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> bytes:
        return bytes(16 << 20)  # more than a socket holds


def test_a_worker_whose_messages_are_not_read_yet_has_not_stalled() -> None:
    with DataLoader(Sends(), num_workers=1, batch_size=None, prefetch_factor=2) as loader:
        iterator: Any = iter(loader)
        driver = iterator._pool.driver
        with iterator._pool.lock:  # nothing is read after `next`, and that orders one more
            next(iterator)
            assert eventually(lambda: driver.progress(0).note.step == "send")
            assert eventually(lambda: driver.resources.slots[0].channel.unread)
            before = time.monotonic()
            assert driver.progress(0).active >= before


class Waits(torch.utils.data.Dataset[int]):
    """Its first sample needs the other end of a pipe."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 0:
            os.read(self.pipe, 1)
        return index


def test_a_worker_that_goes_on_while_its_stack_is_about_to_be_dumped_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, writing = os.pipe()
    activity, looks = procfs.activity, []

    def goes_on(pid: int, roots: Any) -> Any:
        """The trainer looks at what a stalled worker does, and just then that goes on."""
        if not looks:
            os.write(writing, b"x")
            assert eventually(lambda: driver.progress(0).note.task != 0)
        looks.append(pid)
        return activity(pid, roots)

    with DataLoader(Waits(reading), num_workers=1, batch_size=2, stall_timeout=0.3) as loader:
        iterator: Any = iter(loader)
        driver, pid = iterator._pool.driver, iterator._workers[0].pid
        monkeypatch.setattr(procfs, "activity", goes_on)
        assert torch.cat(list(iterator)).tolist() == list(range(8))
        assert looks == [pid, pid]
        assert iterator._workers[0].pid == pid
        assert loader.incidents == []
    os.close(reading)
    os.close(writing)
