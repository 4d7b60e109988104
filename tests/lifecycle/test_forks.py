"""Processes around the loader: children that the user forks, loaders in child processes, loaders inside loaders."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from typing import Any

import pytest

from holdfast import DataLoader, LoaderClosed
from tests.lifecycle.samples import Numbers
from tests.lifecycle.trainer import Stage
from tests.support.processes import children

pytestmark = pytest.mark.timeout(60, method="thread")


def values(loader: Any) -> list[int]:
    return [batch.item() for batch in loader]


def nothing() -> None:
    pass


CHILDREN = {
    "os._exit": "os._exit(0)",
    "sys.exit": "sys.exit(0)",
    "sys.exit after collecting everything": "del iterator, loader; gc.collect(); sys.exit(0)",
    "sys.exit after close": "loader.close(); sys.exit(0)",
    "next() of the parent's iterator": """
            try:
                next(iterator)
            except Exception as error:
                say("refused", type(error).__name__)
            sys.exit(0)
""",
    "an epoch of its own": """
            assert [batch.item() for batch in loader] == list(range(100))
            loader.close()
            sys.exit(0)
""",
}


@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("does", CHILDREN)
def test_a_forked_child_of_the_trainer_does_not_disturb_its_loader(
    stage: Stage, does: str, persistent: bool
) -> None:
    ended = stage.run(
        f"""
        loader = DataLoader(Numbers(100), num_workers=2, persistent_workers={persistent})
        iterator = iter(loader)
        stream = [next(iterator).item() for _ in range(10)]
        pids = [worker.pid for worker in iterator._workers]
        child = os.fork()
        if child == 0:
            {CHILDREN[does]}
        assert os.waitpid(child, 0)[1] == 0
        stream += [next(iterator).item() for _ in range(40)]
        assert [worker.pid for worker in iterator._workers] == pids
        stream += [batch.item() for batch in iterator]
        assert stream == list(range(100)), stream
        say("incidents", len(loader.incidents))
        """
    )
    assert ended.err == ""
    assert ended.code == 0
    assert ended.values("incidents") == ["0"]
    assert not ended.left
    if does.startswith("next()"):
        assert ended.values("refused")


def test_the_parents_loader_closes_quickly_while_a_forked_child_lives(stage: Stage) -> None:
    """The child holds copies of all sockets: their ends do not end when the parent closes them."""
    ended = stage.run(
        """
        loader = DataLoader(Numbers(100), num_workers=2)
        iterator = iter(loader)
        next(iterator)
        child = os.fork()
        if child == 0:
            time.sleep(3600)
        began = time.monotonic()
        loader.close()
        say("took", time.monotonic() - began)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        """
    )
    assert ended.err == ""
    assert float(ended.values("took")[0]) < 2.0
    assert not ended.left


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_multiprocessing_children_come_and_go_beside_a_loader(method: str) -> None:
    context = multiprocessing.get_context(method)
    with DataLoader(Numbers(100), num_workers=2) as loader:
        iterator = iter(loader)
        stream = []
        for _ in range(3):
            stream.append(next(iterator).item())
            process = context.Process(target=nothing)
            process.start()
            process.join()
            assert process.exitcode == 0
        stream += values(iterator)
        assert stream == list(range(100))
        assert loader.incidents == []


def epoch_in_a_child(connection: Any) -> None:
    loader = DataLoader(Numbers(50), num_workers=2, persistent_workers=True)
    connection.send([values(loader), values(loader), len(children())])


@pytest.mark.parametrize("daemon", [True, False])
def test_a_loader_with_workers_works_in_a_multiprocessing_process(daemon: bool) -> None:
    """Also in a daemonic one, which multiprocessing forbids to have children of its own."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=epoch_in_a_child, args=(there,), daemon=daemon)
    process.start()
    there.close()
    first, second, workers = here.recv()
    assert first == second == list(range(50))
    assert workers >= 1
    process.join(20)
    assert process.exitcode == 0
    # Its workers do not outlive it: the fixture of all tests looks.


def test_a_daemonic_process_that_is_terminated_leaves_no_worker(stage: Stage) -> None:
    ended = stage.run(
        """
        import multiprocessing

        def hang(connection):
            iterator = iter(DataLoader(Troubled("sleep", at=2), num_workers=2))
            connection.send([next(iterator).item(), next(iterator).item()])
            next(iterator)

        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()
        process = context.Process(target=hang, args=(there,), daemon=True)
        process.start()
        say("got", *here.recv())
        process.terminate()
        process.join()
        """
    )
    assert ended.values("got") == ["0 1"]
    assert ended.err == ""
    assert not ended.left


class Outer(Numbers):
    def __getitem__(self, index: int) -> Any:
        return [index * 10 + batch.item() for batch in DataLoader(Numbers(5), num_workers=2)]


def test_a_loader_inside_a_worker_of_a_loader_works_and_leaves_nobody() -> None:
    loader = DataLoader(Outer(4), num_workers=2, batch_size=None)
    assert list(loader) == [[index * 10 + inner for inner in range(5)] for index in range(4)]
    assert not children()


def test_a_trainer_that_ignores_sigchld_still_gets_its_workers_replaced(stage: Stage) -> None:
    """The kernel then reaps children by itself; some launchers leave it set for the programs they start."""
    ended = stage.run(
        """
        import logging
        logging.getLogger("holdfast").setLevel(logging.ERROR)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        loader = DataLoader(Numbers(100), num_workers=2)
        iterator = iter(loader)
        stream = [next(iterator).item()]
        kill(iterator._workers[0].pid)
        stream += [batch.item() for batch in iterator]
        assert stream == list(range(100)), stream
        say("incidents", *[(incident.worker_id, incident.signal) for incident in loader.incidents])
        """
    )
    assert ended.err == ""
    assert ended.code == 0
    assert ended.values("incidents") == ["(0, 'SIGKILL')"]


def test_a_trainer_that_waits_for_all_its_children_does_not_harm_the_loader(stage: Stage) -> None:
    """os.wait() in a SIGCHLD handler reaps the nursery, too."""
    ended = stage.run(
        """
        def reap(number, frame):
            while True:
                try:
                    if os.waitpid(-1, os.WNOHANG)[0] == 0:
                        return
                except ChildProcessError:
                    return

        signal.signal(signal.SIGCHLD, reap)
        for _ in range(3):
            loader = DataLoader(Numbers(20), num_workers=2)
            assert [batch.item() for batch in loader] == list(range(20))
            loader.close()
        say("done")
        """
    )
    assert ended.err == ""
    assert ended.code == 0
    assert ended.values("done")


def in_a_child(act: Any) -> str:
    """What `act` says in a forked child."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        os.write(writer, str(act()).encode() or b"-")
        os._exit(0)
    os.close(writer)
    said = os.read(reader, 10_000).decode()
    os.close(reader)
    os.waitpid(pid, 0)
    return said


def test_a_child_that_looks_at_its_parents_workers_takes_nothing_from_them() -> None:
    iterator = iter(DataLoader(Numbers(200), num_workers=2))
    seen = [next(iterator).item()]
    for _ in range(5):
        assert "pid=" in in_a_child(lambda: iterator._workers)
        seen.append(next(iterator).item())
    seen += [batch.item() for batch in iterator]
    assert seen == list(range(200))


def test_a_childs_next_on_its_parents_iterator_is_refused_also_when_the_lock_was_held() -> None:
    iterator = iter(DataLoader(Numbers(20), num_workers=1))

    def refused() -> str:
        try:
            next(iterator)
        except LoaderClosed as error:
            return str(error)
        return "not refused"

    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with iterator._pool.lock:
            held.set()
            release.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(30)
    try:
        assert "belongs to process" in in_a_child(refused)
    finally:
        release.set()
        holder.join()


def test_a_nursery_lets_go_of_what_belongs_to_its_parents_parent() -> None:
    """Or workers of the first trainer would be kept from dying with it by a loader of its child."""
    first = iter(DataLoader(Numbers(20), num_workers=1))
    next(first)
    line = os.fstat(first._pool.driver.resources.lifeline._writing)

    def holders() -> int:
        """How many processes below this one hold the first loader's line."""
        second = iter(DataLoader(Numbers(20), num_workers=1))
        next(second)
        nursery = second._pool.driver.resources.nursery.pid
        found = 0
        for name in os.listdir(f"/proc/{nursery}/fd"):
            path = f"/proc/{nursery}/fd/{name}"
            with contextlib.suppress(OSError):
                writes = bool(os.lstat(path).st_mode & 0o200)  # the link says how it is open
                found += writes and os.path.samestat(os.stat(path), line)
        second._shutdown_workers()
        return found

    assert in_a_child(holders) == "0"
    assert [batch.item() for batch in first] == list(range(1, 20))
