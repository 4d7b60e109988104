"""Nothing left behind: every test must end without processes or shared memory it started.

A leak is reported as an error of the test that caused it. What does not work here is to compare
all processes of the machine before and after, since other people's runs come and go meanwhile; so
only our descendants count, and orphans in our process group (a worker of a trainer that the
test killed is no descendant of ours any more). Names in `/dev/shm` count unless a stranger uses
them. Both are given a moment to go away, because a process that is told to stop
is still there for some milliseconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, TypeVar

# Read when torch is loaded, here and in all processes below. Threads that wait for the next loop over a tensor would
# spin, on cores that other tests need: a fifth of the time of the suite.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import hypothesis
import pytest

from tests.explain.matrices import MATRICES
from tests.support import warm
from tests.support.dispositions import take_back
from tests.support.groups import NoGroup, memory_group
from tests.support.huge_pages import move_to_huge_pages
from tests.support.processes import signal_if
from tests.support.timeouts import keep_stderr, pytest_timeout_set_timer  # noqa: F401

# How long an example takes says something about the machine, not about the product.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

GRACE = 3.0
SHM = Path("/dev/shm")
T = TypeVar("T")


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.setpgid(0, 0)  # orphans are told by their group: not the neighbour's
        keep_stderr()
    if "PYTEST_XDIST_WORKER" in os.environ or not config.getoption("numprocesses", None):
        # Not in the process that only hands out the tests.
        take_back()
        gc.disable()  # imports make no garbage to speak of; see `pytest_collection_finish`
    # pytest does this itself, unless started with `-p no:faulthandler`.
    if not config.pluginmanager.hasplugin("faulthandler"):
        faulthandler.enable(file=os.fdopen(os.dup(2), "w"), all_threads=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End what was kept for all tests. In one of several test processes, hand over what is to be
    shown at the end."""
    warm.close_all()
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["matrices"] = list(MATRICES)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    MATRICES.extend(getattr(node, "workeroutput", {}).get("matrices", []))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The confusion matrices of the autopsy, passed or not."""
    if MATRICES:
        terminalreporter.section("injected causes and verdicts")
    for told in sorted(MATRICES, key=lambda told: "\n" in told):
        terminalreporter.write_line(told)


LONGEST = (
    "tests/demo/",
    "tests/shortage/",
    "tests/differential/",
    "tests/autopsy/",
    "tests/worker/test_leak_tracer.py",
    "tests/transport/test_scarce.py",
    "tests/lifecycle/",
)
"""Where single tests take longest."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of several test processes none shall begin a long test when the others have nothing left to do."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


def pytest_collection_finish() -> None:
    """What the imports have made stays for good: no collection of garbage need look at it again.

    With torch that is several hundred thousand objects, in this process and in all that are forked
    from it.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.partition(".")[0] == "torch":
            logger.propagate = True  # else pytest adds a handler to each of 40 in every test
    gc.collect()
    gc.freeze()
    gc.enable()
    move_to_huge_pages()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[pytest.TestReport]:
    report: pytest.TestReport = yield  # type: ignore[misc]
    if report.failed:
        item.stash[_failed] = True
    return report


_failed = pytest.StashKey[bool]()


@pytest.fixture(autouse=True)
def no_process_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    processes = _our_processes()
    names = _shm_names()

    yield

    left_processes = _wait_until_gone(lambda: sorted(_our_processes() - processes))
    left_names = _wait_until_gone(lambda: _without_strangers(_shm_names() - names))
    left_threads = _wait_until_gone(_worker_threads)

    described = [_describe(pid) for pid, _ in left_processes]
    for pid, birth in left_processes:
        with contextlib.suppress(OSError):
            signal_if(pid, lambda pid, birth=birth: _stat(pid)[1] == birth)  # type: ignore[misc]
    # A test that failed half-way had no chance to clean up: one error is enough.
    if request.node.stash.get(_failed, False):
        return
    if described:
        pytest.fail("processes left behind:\n  " + "\n  ".join(described), pytrace=False)
    if left_names:
        pytest.fail(f"names left behind in /dev/shm: {left_names}", pytrace=False)
    if left_threads:
        pytest.fail(f"worker threads left behind: {left_threads}", pytrace=False)


def _worker_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("holdfast-worker")]


def _wait_until_gone(look: Callable[[], list[T]]) -> list[T]:
    """What `look` still finds after the grace period; empty as soon as it finds nothing."""
    left = look()
    if left:
        gc.collect()  # an iterator may hang in a reference cycle
    deadline = time.monotonic() + GRACE  # from when it can be gone: a collection takes its time
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = look()
    return left


def _our_processes() -> set[tuple[int, int]]:
    """Number and birth of our descendants, and of orphans in our process group.

    The kernel's lists of children are followed, and not all processes of the machine looked at, since this runs twice
    for every test. A dead process that another has to reap does not count; our own zombies are ours to reap and do.
    """
    me, group, reaper = os.getpid(), os.getpgrp(), _who_adopts_orphans()
    helpers = _standing_helpers()
    found = set()
    seen = {me}
    look = [(me, child) for child in _children(me)]
    if reaper != os.getppid():  # or its own children could not be told from those
        look += [(reaper, child) for child in _children(reaper)]
    for parent, pid in look:  # grows as it goes
        try:
            state, birth, of_group = _stat(pid)
        except OSError:
            continue
        if pid in seen or (parent == reaper and of_group != group):
            continue
        seen.add(pid)
        if state in b"ZX" and parent != me:
            continue
        look += [(pid, child) for child in _children(pid)]
        if pid not in helpers:
            found.add((pid, birth))
    return found


def _stat(pid: int) -> tuple[bytes, int, int]:
    """Its state, when it was started, and its process group."""
    stat = _read(f"/proc/{pid}/stat")
    fields = stat[stat.rindex(b")") + 2 :].split(None, 20)
    return fields[0], int(fields[19]), int(fields[2])


def _children(pid: int) -> list[int]:
    """All that its threads have forked."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, _read(f"/proc/{pid}/task/{task}/children", 1 << 16).split())
    except OSError:
        pass  # it has just gone
    return found


def _read(path: str, most: int = 1024) -> bytes:
    """A small file of /proc, in a third of the time that `Path.read_text` takes."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, most)
    finally:
        os.close(fd)


@functools.cache
def _who_adopts_orphans() -> int:
    """Process 1 or the nearest subreaper above us; found by orphaning a process."""
    script = "import os, time\nif os.fork() == 0:\n  time.sleep(0.2); print(os.getppid())"
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    return int(made.stdout)


def _standing_helpers() -> set[int | None]:
    """The standard library starts these once and keeps them until the interpreter exits; so do our
    tests, to fork commands from them."""
    return {
        *warm.standing,
        getattr(resource_tracker._resource_tracker, "_pid", None),
        getattr(forkserver._forkserver, "_forkserver_pid", None),
    }


def _shm_names() -> set[str]:
    """Names of shared memory. Semaphores (`sem.…`) are multiprocessing's, under stock torch."""
    try:
        return {name for name in os.listdir(SHM) if not name.startswith("sem.")}
    except OSError:
        return set()


def _without_strangers(names: set[str]) -> list[str]:
    """Leave out names that a process maps which is not ours, or that hold its pid (torch's do:
    `torch_<pid>_…`): they come from another run."""
    if not names:
        return []
    ours = {os.getpid(), *(pid for pid, _ in _our_processes())}
    everybody = {int(entry) for entry in os.listdir("/proc") if entry.isdigit()}
    for pid in everybody - ours:
        names = {name for name in names if not name.startswith(f"torch_{pid}_")}
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        names = {name for name in names if f"/dev/shm/{name}" not in maps}
    return sorted(names)


def _describe(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError as error:
        return f"pid {pid}: {error}"
    return f"pid {pid} ({state}): {command[:200]}"


if sys.platform != "linux":
    pytest.exit("holdfast is built and tested on Linux only", returncode=1)


@pytest.fixture(scope="session")
def memory_groups() -> None:
    """Skips the test, with the reason, where no memory control group can be made."""
    try:
        with memory_group(1 << 30):
            pass
    except NoGroup as why:
        pytest.skip(str(why))
