"""Orders to the nursery: they wait for it, and the pool does not."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast import DataLoader, kernel
from holdfast.engine import nursery as nurseries
from holdfast.engine.nurse import MESSAGE, NotBorn, Nurse
from holdfast.engine.nursery import LISTENING, Nursery
from holdfast.engine.silence import BOOT_ALLOWANCE
from tests.support.processes import eventually

WORKERS = 40
SETUP = bytes(30_000)


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A nursery that does not read, and its end of the line."""
    process = SimpleNamespace(send_signal=lambda number: None, close=lambda: None)
    monkeypatch.setattr(nurseries.kernel, "Child", lambda pid, control: process)
    ours, theirs = kernel.socket_pair()
    nursery = Nursery(0, ours)
    yield nursery, theirs
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
        head, fds, _, _ = socket.recv_fds(theirs, MESSAGE, 2)
        assert pickle.loads(head) == ("start", worker, 0, (len(SETUP), worker))
        os.write(fds[1], b"!")
        assert os.read(fds[0], 1) == b"!"
        for fd in fds:
            os.close(fd)
        nursery.flush()
        assert theirs.recv(MESSAGE) == SETUP
        nursery.flush()
    assert not nursery.has_backlog
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_nursery_has_time_to_start_before_it_has_to_listen(line: Any) -> None:
    nursery, theirs = line
    for worker in range(WORKERS):
        nursery.start(worker, 0, SETUP, 0, 0)
    now = time.monotonic()
    assert not nursery.deaf(now + LISTENING + 1)
    assert nursery.deaf(now + BOOT_ALLOWANCE + 1)
    theirs.send(pickle.dumps(NotBorn(0, 0, errno.EAGAIN)))
    assert nursery.reports()
    now = time.monotonic()
    assert not nursery.deaf(now + LISTENING - 1)
    assert nursery.deaf(now + LISTENING + 1)


def test_a_nursery_that_lacks_something_to_be_sent_an_order_is_asked_again_later(
    line: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    nursery, theirs = line
    for worker in range(WORKERS):
        nursery.start(worker, 0, SETUP, 0, 0)
    theirs.recv(MESSAGE)

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
    monkeypatch.setattr(nurseries, "LISTENING", 0.1)
    monkeypatch.setattr("holdfast.engine.crew.LONGEST_WAIT", 0.05)
    loader = DataLoader(range(40), batch_size=2, num_workers=1)
    iterator: Any = iter(loader)
    assert next(iterator).tolist() == [0, 1]
    pool = iterator._pool
    nursery = pool.holdings.nursery
    os.kill(nursery.pid, signal.SIGSTOP)
    with pool.lock:
        while not nursery.has_backlog:
            nursery.signal(0, -1, 0)  # to no process
    assert eventually(lambda: pool.holdings.nursery is not nursery)
    assert [batch.tolist() for batch in iterator] == [[n, n + 1] for n in range(2, 40, 2)]
    (incident,) = loader.incidents
    loader.close()
    assert (incident.cause, incident.confidence) == ("nursery-failed", "high")
    assert "took no orders and was ended" in incident.report()
    assert "SIGKILL" not in incident.report()


def test_a_descriptor_that_cannot_be_moved_costs_one_start_and_not_all_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nurse: Any = object.__new__(Nurse)
    ours, nurse.control = kernel.socket_pair()
    reports: list[Any] = []
    nurse._report = reports.append

    def refuse(fd: int) -> int:
        os.close(fd)
        raise OSError(errno.EMFILE, "")

    monkeypatch.setattr(kernel, "above_stdio", refuse)
    descriptors = len(os.listdir("/proc/self/fd"))
    order = pickle.dumps(("start", 3, 1, (2, 3)))
    socket.send_fds(ours, [order], [0, 1])
    ours.send(b"ab")
    assert nurse._obey(lambda *given: None)
    assert reports == [NotBorn(3, 1, errno.EMFILE)]
    assert len(os.listdir("/proc/self/fd")) == descriptors
    ours.close()
    nurse.control.close()
