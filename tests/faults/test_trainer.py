"""Deaths while the trainer is busy, large, stopped, or out of descriptors itself."""

from __future__ import annotations

import os
import re
import resource
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.faults.checker import Batch, Surroundings, recorded_batch, seeded
from tests.faults.outside import nursery, pids
from tests.faults.scenario import arguments, golden, step, wait_until_started
from tests.faults.table import Case
from tests.support.processes import alive, children, eventually, kill
from tests.support.scripts import run_script

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120, method="thread")]

CASE = Case("SIGKILL", "working")


def rest(iterator: Any) -> list[Batch]:
    return [recorded_batch(batch) for batch in iterator]


def has_answered_all(iterator: Any, worker: int) -> bool:
    """Whether it waits for what next() will order; to ask for pids takes in what has come."""
    pids(iterator)
    return not iterator._pool.machine.seats[worker].busy and step(iterator, worker) == "idle"


@pytest.mark.parametrize("thread", ["main", "other"])
@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_a_death_during_a_training_step_is_dealt_with_meanwhile(kind: str, thread: str) -> None:
    """next() is not called: the incident is there, and so is a replacement that works ahead."""
    case = replace(CASE, kind=kind)
    got: list[Batch] = []
    failures: list[BaseException] = []

    def train() -> None:
        seeded()
        with holdfast.DataLoader(**arguments(case)) as loader:
            iterator = iter(loader)
            got.append(recorded_batch(next(iterator)))
            wait_until_started(iterator)
            before = pids(iterator)
            parent = nursery(iterator)
            kill(before[1])
            assert eventually(lambda: len(loader.incidents) == 1)
            # Only the kernel is asked: a call into the loader could do the work itself.
            assert eventually(lambda: len(children(parent) - set(before)) == 1)
            (born,) = children(parent) - set(before)
            assert eventually(lambda: step(iterator, 1) == "idle")
            assert alive(born)
            assert loader.incidents[0].pid == before[1]
            got.extend(rest(iterator))

    def run() -> None:
        try:
            train()
        except BaseException as error:
            failures.append(error)

    if thread == "main":
        run()
    else:
        other = threading.Thread(target=run)
        other.start()
        other.join()
    if failures:
        raise failures[0]
    assert got == golden(case).epochs[0]


@pytest.mark.slow
def test_nothing_is_raised_outside_next() -> None:
    """Also when replacing is over: the training step ends in peace, next() then tells."""
    before = Surroundings.handlers_now()
    seeded()
    with holdfast.DataLoader(**arguments(CASE), max_restarts=1) as loader:
        iterator = iter(loader)
        got = [recorded_batch(next(iterator))]
        steps = 0
        for death in range(2):
            victim = pids(iterator)[1]
            wait_until_started(iterator)
            assert eventually(lambda: has_answered_all(iterator, 1))
            kill(victim)
            deadline = time.monotonic() + 20
            while len(loader.incidents) <= death:  # the training step: plain bytecode
                steps += 1
                assert time.monotonic() < deadline
        assert steps > 0
        assert Surroundings.handlers_now() == before
        assert [(one.step, one.action) for one in loader.incidents] == [
            ("idle", "replaced"),  # nothing is said of a batch: it was making none
            ("idle", "gave up"),
        ]
        with pytest.raises(holdfast.RestartLimitExceeded):
            got.extend(map(recorded_batch, iterator))
    assert got == golden(CASE).epochs[0][: len(got)]


def test_a_death_while_another_thread_waits_in_next_does_not_reach_the_main_thread() -> None:
    case = replace(CASE, workers=1)
    seeded()
    with holdfast.DataLoader(**arguments(case)) as loader:
        got: list[Batch] = []
        ready = threading.Event()
        go_on = threading.Event()

        def consume() -> None:
            iterator = iter(loader)
            victims.extend(pids(iterator))
            wait_until_started(iterator)
            ready.set()
            go_on.wait(20)
            got.extend(rest(iterator))

        victims: list[int] = []
        consumer = threading.Thread(target=consume)
        consumer.start()
        assert ready.wait(20)
        kill(*victims)
        go_on.set()
        consumer.join(30)
        assert not consumer.is_alive()
    assert got == golden(case).epochs[0]
    assert len(loader.incidents) == 1


TRAINER = """
    import os, signal, threading, time
    import numpy as np, torch

    def main():
        loader = DataLoader(list(range(400)), batch_size=4, num_workers=2, max_restarts=None)
        weights = None
        {before}
        iterator = iter(loader)
        next(iterator)
        {after}
        matrix = torch.rand(300, 300)
        stop = threading.Event()
        def train():
            while not stop.is_set():
                matrix @ matrix  # OpenMP, in every thread
        threads = [threading.Thread(target=train) for _ in range(2)]
        for thread in threads:
            thread.start()
        matrix @ matrix
        taken = []
        for _ in range(3):
            victim = iterator._workers[0].pid
            began = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            while iterator._workers[0].pid in (victim, None):
                time.sleep(0.001)
            taken.append(time.monotonic() - began)
            for _ in range(3):
                next(iterator)
        rss = int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20
        stop.set()
        for thread in threads:
            thread.join()
        total = 10 + sum(1 for _ in iterator)
        print("rss", rss, "batches", total, "incidents", len(loader.incidents))
        print("replacement", *(f"{{1000 * one:.0f}}" for one in taken))

    if __name__ == "__main__":
        main()
"""
GROW = "weights = np.ones(2 << 27)  # 2 GiB"


@pytest.mark.slow
@pytest.mark.parametrize("growth", ["after", "before"], ids=lambda when: f"grown {when}")
def test_a_large_and_busy_trainer_gets_a_replacement_quickly(
    growth: str, record_property: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """2 GiB of memory, two threads in OpenMP on two cores: a replacement lives soon after a death."""
    texts = {"before": "", "after": "", growth: GROW}
    ended = run_script("holdfast", TRAINER.format(**texts), seconds=90, as_file=True)
    assert ended.code == 0, ended.err
    words = dict(re.findall(r"(rss|batches|incidents) (\d+)", ended.out))
    assert int(words["rss"]) > 2000
    assert (words["batches"], words["incidents"]) == ("100", "3")
    measured = [int(one) for one in ended.out.split("replacement")[1].split()]
    record_property("milliseconds to a live replacement", measured)
    with capsys.disabled():
        print(
            f"\n[2 GiB trainer, grown {growth} the start: replacements alive after {measured} ms]"
        )
    assert max(measured) < 5000
    assert not ended.left


@pytest.mark.slow
def test_a_trainer_that_was_stopped_blames_nobody() -> None:
    """Ctrl-Z, or a suspended machine: the time in between is no stall."""
    script = """
        import os, signal, subprocess, time
        if __name__ == "__main__":
            loader = DataLoader(list(range(60)), batch_size=2, num_workers=2, stall_timeout=1.0)
            iterator = iter(loader)
            next(iterator)
            me = os.getpid()
            helper = subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {me}"])
            os.kill(me, signal.SIGSTOP)
            count = 1 + sum(1 for _ in iterator)
            helper.wait()
            print("batches", count, "incidents", len(loader.incidents))
    """
    ended = run_script("holdfast", script, seconds=60, as_file=True)
    assert ended.out.split() == ["batches", "30", "incidents", "0"], (ended.out, ended.err)


@pytest.mark.slow
def test_a_trainer_without_a_free_descriptor_gets_an_error_and_no_hang() -> None:
    """A replacement needs a channel. Without one, next() says so; nothing hangs, all is let go."""
    seeded()
    loader = holdfast.DataLoader(**arguments(CASE))
    taken: list[int] = []
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        iterator = iter(loader)
        next(iterator)
        victim = pids(iterator)[1]
        wait_until_started(iterator)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        handle = os.pidfd_open(victim)
        try:
            while True:
                taken.append(os.dup(0))
        except OSError:
            pass
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        with pytest.raises((OSError, holdfast.HoldfastError)):
            for _ in iterator:
                pass
        os.close(handle)
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        loader.close()
    assert eventually(lambda: not alive(victim))
    # With descriptors again, it works again.
    seeded()
    assert [recorded_batch(batch) for batch in loader] == golden(CASE).epochs[0]
    loader.close()


def test_a_forked_child_of_the_trainer_does_not_disturb_the_workers(tmp_path: Path) -> None:
    """It holds copies of all descriptors; workers die and end in spite of it."""
    seeded()
    with holdfast.DataLoader(**arguments(CASE)) as loader:
        iterator = iter(loader)
        got = [recorded_batch(next(iterator))]
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        try:
            wait_until_started(iterator)
            kill(pids(iterator)[1])
            got += rest(iterator)
            workers = pids(iterator)
            loader.close()
            assert eventually(lambda: not any(alive(pid) for pid in workers))
        finally:
            kill(child)
            os.waitpid(child, 0)
    assert got == golden(CASE).epochs[0]
    assert len(loader.incidents) == 1
