"""Orders to the nursery: they wait for it, and the pool does not."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import socket
import subprocess
import time
from typing import Any

import pytest

from holdfast import DataLoader, kernel
from holdfast.engine.events import Limits
from holdfast.engine.stall import BOOT_ALLOWANCE
from holdfast.processes import nursery as nurseries
from holdfast.processes.nursery import ORDER_TIMEOUT, Nursery
from holdfast.processes.nursery_reports import MESSAGE_BYTES, ForkFailed
from tests.support import resources
from tests.support.processes import eventually

WORKERS = 40
SETUP = bytes(30_000)


@pytest.fixture
def line() -> Any:
    """A nursery that does not read, and its end of the line."""
    process = subprocess.Popen(["sleep", "90"])
    ours, theirs = kernel.socket_pair()
    nursery = Nursery(process.pid, ours)
    yield nursery, theirs
    nursery.kill()
    process.wait(30)
    nursery.close()
    theirs.close()


def test_orders_wait_for_a_nursery_that_does_not_read_yet_and_the_caller_does_not(
    line: Any,
) -> None:
    nursery, theirs = line
    told: list[bool] = []
    nursery.on_backlog = lambda: told.append(True)
    descriptors = len(os.listdir("/proc/self/fd"))
    began = time.monotonic()
    for worker in range(WORKERS):
        reading, writing = os.pipe()  # closed by the caller as soon as the order is given
        nursery.start(worker, 0, SETUP, reading, writing)
        os.close(reading)
        os.close(writing)
    assert time.monotonic() - began < 1
    assert nursery.pending
    assert told
    for worker in range(WORKERS):
        head, fds, _, _ = socket.recv_fds(theirs, MESSAGE_BYTES, 2)
        assert pickle.loads(head) == ("start", worker, 0, (len(SETUP), worker))
        os.write(fds[1], b"!")
        assert os.read(fds[0], 1) == b"!"
        for fd in fds:
            os.close(fd)
        nursery.flush()
        assert theirs.recv(MESSAGE_BYTES) == SETUP
        nursery.flush()
    assert not nursery.has_backlog
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_nursery_has_time_to_start_before_it_has_to_listen(line: Any) -> None:
    nursery, theirs = line
    for worker in range(WORKERS):
        nursery.start(worker, 0, SETUP, 0, 0)
    now = time.monotonic()
    assert not nursery.is_unresponsive(now + ORDER_TIMEOUT + 1)
    assert nursery.is_unresponsive(now + BOOT_ALLOWANCE + 1)
    theirs.send(pickle.dumps(ForkFailed(0, 0, errno.EAGAIN)))
    assert nursery.reports()
    now = time.monotonic()
    assert not nursery.is_unresponsive(now + ORDER_TIMEOUT - 1)
    assert nursery.is_unresponsive(now + ORDER_TIMEOUT + 1)


def test_a_nursery_that_lacks_something_to_be_sent_an_order_is_asked_again_later(
    line: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    nursery, theirs = line
    for worker in range(WORKERS):
        nursery.start(worker, 0, SETUP, 0, 0)
    theirs.recv(MESSAGE_BYTES)

    def short(packet: bytes, fds: Any) -> None:
        raise OSError(errno.ETOOMANYREFS, "")

    with monkeypatch.context() as patched:
        patched.setattr(nursery, "_send_one", short)
        nursery.flush()
    assert nursery.has_backlog
    assert not nursery.pending, "that the socket is writable would end no wait"
    nursery.flush()
    assert nursery.pending


@pytest.mark.faults
def test_a_nursery_that_takes_no_orders_is_ended_and_not_said_to_be_killed_from_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nurseries, "ORDER_TIMEOUT", 0.1)
    monkeypatch.setattr("holdfast.processes.process_method.LIMITS", Limits(check_interval=0.05))
    loader = DataLoader(range(40), batch_size=2, num_workers=1)
    iterator: Any = iter(loader)
    assert next(iterator).tolist() == [0, 1]
    pool = iterator._pool
    nursery = pool.driver.resources.nursery
    os.kill(nursery.pid, signal.SIGSTOP)
    with pool.lock:
        while not nursery.has_backlog:
            nursery.signal(0, -1, 0)  # to no process
    assert eventually(lambda: pool.driver.resources.nursery is not nursery)
    assert [batch.tolist() for batch in iterator] == [[n, n + 1] for n in range(2, 40, 2)]
    (incident,) = loader.incidents
    loader.close()
    assert (incident.cause, incident.confidence) == ("nursery-failed", "high")
    assert "took no orders and was ended" in incident.report()
    assert "SIGKILL" not in incident.report()


def test_a_descriptor_that_cannot_be_moved_costs_one_start_and_not_all_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(fd: int) -> int:
        os.close(fd)
        raise OSError(errno.EMFILE, "")

    monkeypatch.setattr(kernel, "above_stdio", refuse)  # in the nursery, which is forked now
    with resources.opened(range(4)) as opened:
        nursery = opened.nursery
        folder = f"/proc/{nursery.pid}/fd"
        failed = []
        for generation in range(2):
            nursery.start(0, generation, b"ab", 0, 1)
            failed.append(resources.wait_for_report(opened, ForkFailed))
            descriptors = len(os.listdir(folder))
        assert failed == [ForkFailed(0, one, errno.EMFILE) for one in range(2)]
        nursery.start(0, 2, b"ab", 0, 1)
        resources.wait_for_report(opened, ForkFailed)
        assert len(os.listdir(folder)) == descriptors
