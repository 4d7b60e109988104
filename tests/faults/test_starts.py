"""Starts that fail because something is short: tried again while the others go on, not for ever."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data import Dataset

import holdfast
from holdfast.engine import events as ev
from holdfast.processes import process_method
from holdfast.run_report import logged_run
from holdfast.worker.faults import VARIABLE
from tests.faults.outside import kill_and_see_it_dead, nursery
from tests.support.scripts import run_script

LIMITS = ev.Limits()
pytestmark = [pytest.mark.faults, pytest.mark.timeout(90, method="thread")]


class Noisy(Dataset[Any]):
    """Every sample shows the random state it was made from."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, int(torch.randint(1 << 30, ()))])


def batches(loader_class: Any) -> list[list[list[int]]]:
    torch.manual_seed(7)
    return [batch.tolist() for batch in loader_class(Noisy(), batch_size=2, num_workers=2)]


def failing(point: str, error: str, tries: int) -> str:
    """The first `tries` replacements of worker 0 cannot be made."""
    return ";".join(
        f"{point}:errno={error}@worker=0,generation={number + 1}" for number in range(tries)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "error"),
    [
        ("fork", "EAGAIN"),
        ("fork", "ENOMEM"),
        ("make-channel", "EMFILE"),
        ("make-arena", "ENFILE"),
        ("make-nursery", "EAGAIN"),
    ],
)
def test_a_replacement_that_finds_no_room_is_tried_again_and_nothing_is_lost(
    point: str, error: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = batches(torch.utils.data.DataLoader)
    monkeypatch.setenv(VARIABLE, failing(point, error, 3))
    torch.manual_seed(7)
    with holdfast.DataLoader(Noisy(), batch_size=2, num_workers=2, logbook=tmp_path) as loader:
        iterator = iter(loader)
        seen = [next(iterator).tolist() for _ in range(2)]
        worker, both = iterator._workers[0].pid, nursery(iterator)
        kill_and_see_it_dead(both if point in ("make-nursery", "make-arena") else worker)
        seen += [batch.tolist() for batch in iterator]
    assert seen == expected
    failed = [one for one in loader.incidents if one.kind == "start-failed"]
    assert [one.worker_id for one in failed] == [0]  # said once, not at every try
    assert "tried again" in failed[0].action
    assert loader.stats()["restarts"] == len(loader.incidents) - 1
    (late,) = logged_run.read(tmp_path).events
    # What the others have made in the meantime need not be made again.
    tries = 1 if point == "make-nursery" else 3
    assert (late["event"], late["worker"], late["tries"]) == ("started-late", 0, tries)


def test_when_there_is_never_room_one_error_tells_of_all_tries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_method, "LIMITS", ev.Limits(first_pause=0.01, longest_pause=0.02))
    later = failing("make-channel", "EMFILE", LIMITS.tries).split(";")[1:]
    monkeypatch.setenv(VARIABLE, ";".join([failing("fork", "EAGAIN", 1), *later]))
    with holdfast.DataLoader(Noisy(), batch_size=2, num_workers=2) as loader:
        iterator = iter(loader)
        next(iterator)
        pid = iterator._workers[0].pid
        kill_and_see_it_dead(pid)
        with pytest.raises(holdfast.WorkerStartError) as caught:
            for _ in iterator:
                pass
    text = str(caught.value)
    assert text.startswith(
        f"DataLoader worker (pid(s) {pid}) exited unexpectedly: [Noisy] worker 0 could"
    )
    assert f"in {LIMITS.tries} tries within" in text
    assert "EAGAIN (Resource temporarily unavailable), 1 times" in text
    assert f"EMFILE (Too many open files), {LIMITS.tries - 1} times" in text
    assert "ulimit -u" in text


@pytest.mark.slow
def test_descriptors_that_are_really_used_up_are_waited_for() -> None:
    ended = run_script("holdfast", AS_A_SCRIPT.format(shortage=DESCRIPTORS))
    assert ended.code == 0, ended.err
    assert ended.out == "['killed', 'start-failed'] fd-exhaustion True\n", ended.err
    assert not ended.left


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_processes_that_are_really_used_up_are_waited_for() -> None:
    ended = run_script("holdfast", AS_A_SCRIPT.format(shortage=PROCESSES))
    assert ended.code == 0, ended.err
    assert ended.out == "['killed', 'start-failed'] task-limit True\n", ended.err
    assert not ended.left


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_a_refused_first_process_is_explained_and_the_loader_can_be_used_again() -> None:
    ended = run_script("holdfast", REFUSED.format(shortage=PROCESSES))
    assert ended.code == 0, ended.err
    assert ended.out == "True True 0 [0, 1, 2, 3]\n", ended.err
    assert not ended.left


DESCRIPTORS = """
import resource
LIMIT = resource.RLIMIT_NOFILE
become = lambda: None
who = lambda iterator: os.getpid()
def least():
    with open(os.devnull) as file:
        return file.fileno()  # the lowest number that is free
"""

PROCESSES = """
import ctypes, resource
LIMIT = resource.RLIMIT_NPROC
def become():
    os.setgid(65534)
    os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # or /proc/self stays root's: PR_SET_DUMPABLE
who = lambda iterator: psutil.Process(iterator._workers[0].pid).ppid()
least = lambda: 1
"""

AS_A_SCRIPT = textwrap.dedent("""
import os, signal, threading, time
import psutil, torch
{shortage}
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        time.sleep(0.01)
        return index

def give_back():
    deadline = time.monotonic() + 30
    while len(loader.incidents) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)  # some tries more
    resource.prlimit(whose, LIMIT, before)

become()
loader = DataLoader(Slow(), num_workers=2)
iterator = iter(loader)
seen = next(iterator).tolist()
victim, whose = iterator._workers[0].pid, who(iterator)
before = resource.prlimit(whose, LIMIT)
helper = threading.Thread(target=give_back)
helper.start()
resource.prlimit(whose, LIMIT, (least(), before[1]))
os.kill(victim, signal.SIGKILL)
for batch in iterator:
    seen += batch.tolist()
helper.join()
causes = [one.cause for one in loader.incidents if one.kind == "start-failed"]
print([one.kind for one in loader.incidents], *causes, seen == list(range(40)))
""")

REFUSED = textwrap.dedent("""
import os
import psutil
from holdfast import WorkerStartError
{shortage}
become()
loader = DataLoader(range(4), num_workers=1, batch_size=4)
before = resource.prlimit(0, LIMIT)
files = len(os.listdir("/proc/self/fd"))
resource.prlimit(0, LIMIT, (least(), before[1]))
try:
    iter(loader)
except WorkerStartError as error:
    said = str(error)
resource.prlimit(0, LIMIT, before)
left = len(os.listdir("/proc/self/fd")) - files
print("EAGAIN" in said, "ulimit -u" in said, left, next(iter(loader)).tolist())
""")


def killed_while_starting(times: int) -> str:
    """The first `times` processes of worker 0 are killed before they are ready."""
    return ";".join(f"before-ready:SIGKILL@worker=0,generation={number}" for number in range(times))


@pytest.mark.parametrize("limit", [None, pytest.param(10**6, marks=pytest.mark.slow)])
def test_who_is_killed_while_starting_is_started_until_it_comes_through(
    limit: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_method, "LIMITS", ev.Limits(longest_pause=0.05))
    expected = batches(torch.utils.data.DataLoader)
    kills = 11
    monkeypatch.setenv(VARIABLE, killed_while_starting(kills))
    torch.manual_seed(7)
    with holdfast.DataLoader(Noisy(), batch_size=2, num_workers=2, max_restarts=limit) as loader:
        assert [batch.tolist() for batch in loader] == expected
    assert [one.cause for one in loader.incidents] == ["killed-from-outside"] * kills
    assert loader.incidents[0].action == "replaced"
    assert loader.incidents[-1].action == "started again after a pause"
    assert loader.stats()["restarts"] == kills


def test_a_nursery_killed_while_workers_start_is_made_again_however_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_method, "LIMITS", ev.Limits(longest_pause=0.05))
    expected = batches(torch.utils.data.DataLoader)
    monkeypatch.setenv(VARIABLE, "before-ready:hang@generation=any")
    torch.manual_seed(7)
    with holdfast.DataLoader(Noisy(), batch_size=2, num_workers=2, max_restarts=10**6) as loader:
        iterator = iter(loader)
        for _ in range(10):
            assert iterator._workers[1].pid is not None  # it has been born
            kill_and_see_it_dead(nursery(iterator))
        monkeypatch.delenv(VARIABLE)
        assert iterator._workers[1].pid is not None
        kill_and_see_it_dead(nursery(iterator))  # whose workers hang
        assert [batch.tolist() for batch in iterator] == expected


@pytest.mark.parametrize("action", ["SIGSEGV", "exit=3"])
def test_who_ends_by_itself_in_every_start_ends_the_run_without_a_limit_too(
    action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, f"before-ready:{action}@worker=0,generation=any")
    with holdfast.DataLoader(Noisy(), batch_size=2, num_workers=2, max_restarts=None) as loader:
        with pytest.raises(holdfast.WorkerStartError, match="while it was starting"):
            list(loader)
        assert len(loader.incidents) == LIMITS.failed_starts


def test_who_is_killed_in_every_start_ends_the_run_by_the_limit_and_in_no_other_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_method, "LIMITS", ev.Limits(longest_pause=0.01))
    monkeypatch.setenv(VARIABLE, "before-ready:SIGKILL@worker=0,generation=any")
    with holdfast.DataLoader(Noisy(), batch_size=2, num_workers=2, max_restarts=12) as loader:
        with pytest.raises(holdfast.RestartLimitExceeded) as caught:
            list(loader)
        assert len(loader.incidents) == 13
    assert "while it was starting" in str(caught.value)
    assert "None for no limit" in str(caught.value)
    assert "fresh Python" not in str(caught.value)
