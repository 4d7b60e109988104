"""The live view: who is found, what is said of them, and that q ends it."""

from __future__ import annotations

import io
import os
import pty
import select
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data
from rich.console import Console

from holdfast import DataLoader
from holdfast.autopsy.blackbox import Note
from holdfast.views import worker_table
from holdfast.views.py_spy import Stacks, innermost
from holdfast.views.workers import Memory, Worker, WorkerMonitor
from tests.autopsy.made_up import MEMINFO, MOUNTS_V2, Tree
from tests.support.processes import eventually

ROOT = Path(__file__).resolve().parents[2]


class Slow(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        time.sleep(0.01)
        return index


def found(watch: WorkerMonitor) -> list[Worker]:
    return [row for row in watch.refresh() if row.pid != row.trainer]


@pytest.mark.parametrize("make", [DataLoader, torch.utils.data.DataLoader], ids=["ours", "torch"])
def test_the_workers_of_a_program_are_found_and_measured(make: Any) -> None:
    loader = make(Slow(), batch_size=4, num_workers=2)
    watch = WorkerMonitor(os.getpid())
    stream = iter(loader)
    try:
        next(stream)
        assert eventually(lambda: len(found(watch)) == 2)
        rows = watch.refresh()
        assert [row.trainer for row in rows] == [os.getpid()] * 3
        assert rows[0].pid == os.getpid()
        for number, row in enumerate(rows[1:]):
            assert row.memory is not None
            assert 0 < row.memory.private < row.memory.resident
            assert row.cpu is not None
            assert row.threads
            assert row.descriptors
            if make is DataLoader:
                assert row.number == number
                assert row.note is not None
                assert row.note.step in ("fetch", "collate", "send", "idle")
            else:
                assert row.number is None
                assert row.note is None
    finally:
        del stream
    assert eventually(lambda: not found(watch))


@pytest.mark.slow
def test_worker_threads_are_found_through_what_their_program_writes() -> None:
    watch = WorkerMonitor(os.getpid())
    with DataLoader(Slow(), batch_size=4, num_workers=2, worker_method="thread") as loader:
        stream = iter(loader)

        def seen() -> bool:
            next(stream)
            steps = [row.note.step for row in found(watch) if row.note is not None]
            return len(steps) == 2 and "boot" not in steps

        assert eventually(seen)
        first, second = found(watch)
        assert (first.method, first.number, second.number) == ("thread", 0, 1)
        assert first.command == "thread holdfast-worker-0"
        assert str(first.pid) in os.listdir("/proc/self/task")
        out = Console(file=io.StringIO(), width=160)
        out.print(worker_table.draw([first, second], []))
        assert "thread 0" in out.file.getvalue()  # type: ignore[attr-defined]
    assert not found(watch)


def test_somebody_elses_workers_are_not_shown_for_a_pid() -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        stream = iter(DataLoader(Slow(), num_workers=1))
        next(stream)
        assert WorkerMonitor(other.pid).refresh() == []
        assert WorkerMonitor(os.getpid()).refresh() != []
        del stream
    finally:
        other.communicate(b"\n", timeout=20)


def stat(pid: int, parent: int, ticks: int = 0) -> str:
    head = f"{pid} (odd) name) S {parent} {' '.join(['0'] * 9)} {ticks} 0"
    return f"{head} {' '.join(['0'] * 6)} 77"


def rollup(private: int) -> str:
    return f"00-ff\nRss: {private + 500} kB\nShared_Clean: 500 kB\nPrivate_Dirty: {private} kB\n"


def test_growth_and_cpu_are_differences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    tree = Tree(tmp_path)
    tree.proc("10/stat", stat(10, 1))
    tree.proc("10/comm", "python\n")
    tree.proc("11/stat", stat(11, 10))
    tree.proc("11/comm", "pt_data_worker\n")
    tree.proc("11/smaps_rollup", rollup(1000))
    watch = WorkerMonitor(10, tree.roots)
    first = watch.refresh()[1]
    assert (first.cpu, first.growth) == (None, None)
    assert first.memory == Memory(1500 << 10, 1000 << 10, 500 << 10)
    clock[0] += 10
    tree.proc("11/stat", stat(11, 10, 5 * os.sysconf("SC_CLK_TCK")))
    tree.proc("11/smaps_rollup", rollup(3000))
    second = watch.refresh()[1]
    assert second.cpu == pytest.approx(0.5)
    assert second.growth == pytest.approx(200 << 10)
    # another process under the same number starts from nothing
    tree.proc("11/stat", stat(11, 10).replace(" 77", " 99"))
    assert watch.refresh()[1].cpu is None


def test_growth_is_not_known_from_one_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    tree = Tree(tmp_path)
    tree.proc("10/stat", stat(10, 1))
    tree.proc("11/stat", stat(11, 10))
    tree.proc("11/comm", "pt_data_worker\n")
    tree.proc("11/smaps_rollup", rollup(1000))
    watch = WorkerMonitor(10, tree.roots)
    watch.refresh()
    clock[0] += 10
    (tree.roots.proc / "11/smaps_rollup").unlink()
    assert watch.refresh()[1].growth is None


def test_files_are_looked_at_again_only_if_others_are_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = Tree(tmp_path)
    tree.proc("10/stat", stat(10, 1))
    folder = tree.roots.proc / "10/fd"
    folder.mkdir()
    for number in range(50):
        (folder / str(number)).symlink_to("/dev/null")
    looks: list[Any] = []
    real = os.readlink
    monkeypatch.setattr(os, "readlink", lambda path: looks.append(path) or real(path))
    watch = WorkerMonitor(roots=tree.roots)

    def looked() -> int:
        looks.clear()
        watch.refresh()
        return len(looks)

    assert [looked() for _ in range(11)] == [50, *[0] * 9, 50]
    (folder / "50").symlink_to("/dev/null")
    assert [looked(), looked()] == [51, 0]


def test_a_worker_that_has_said_nothing_yet_belongs_to_the_nurserys_trainer(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.proc("10/stat", stat(10, 1))
    tree.proc("10/cmdline", "python\0-c\0import x\nx.train()\0")
    tree.proc("11/stat", stat(11, 10))
    tree.proc("11/comm", "hf_nursery\n")
    tree.proc("12/stat", stat(12, 11))
    tree.proc("12/comm", "pt_data_worker\n")
    trainer, started = WorkerMonitor(roots=tree.roots).refresh()
    assert (trainer.pid, trainer.command) == (10, "python -c import x x.train()")
    assert (started.ours, started.number) == (True, None)
    assert drawn([started], 80)[1].split()[:2] == ["12", "ours"]


@pytest.mark.parametrize(
    ("pid", "words"),
    [
        (None, "no loader workers are running"),
        pytest.param(os.getpid(), "no loader workers now", id="ours"),
        (2**22, "has ended"),
    ],
)
def test_that_there_are_no_workers_is_said(pid: int | None, words: str) -> None:
    assert words in worker_table._no_workers(pid)


def worker(**changes: Any) -> Worker:
    figures: dict[str, Any] = {
        "pid": 4_194_303,
        "trainer": 812,
        "ours": True,
        "number": 12,
        "state": "S",
        "cpu": 1.0,
        "memory": Memory(120 << 30, 99 << 20, 9 << 10),
        "growth": 1.4e6,
        "descriptors": 1234,
        "threads": 12,
        "note": Note(8123, 31, "fetch", time.monotonic() - 2),
        "wchan": "futex_wait_queue",
        "command": "",
    }
    return Worker(**{**figures, **changes})


def drawn(rows: list[Worker], width: int, spy: Stacks | None = None) -> list[str]:
    out = Console(file=io.StringIO(), width=width, soft_wrap=True, highlight=False)
    out.print(worker_table.draw(rows, ["memory 1 GiB of 2 GiB available"], spy))
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 120])
def test_every_line_fits_and_says_what_is_done(width: int) -> None:
    lines = drawn([worker(pid=812, number=None, command="python train.py " * 9), worker()], width)
    assert max(map(len, lines)) <= width
    assert lines[1].split()[:2] == ["812", "trainer"]
    assert lines[2].split()[:7] == ["4194303", "ours", "12", "S", "100%", "120G", "99M"]
    assert "+80M/m" in lines[2]
    assert "fetch" in lines[2]
    if width == 120:
        assert "fetch batch 8123 sample 31, 2." in lines[2]


def test_torchs_workers_are_told_by_stack_or_by_wchan() -> None:
    theirs = worker(ours=False, number=None, note=None)
    assert "in futex_wait_queue" in drawn([theirs], 120)[1]
    spy = Stacks("/bin/false")
    spy.places[theirs.pid] = "load (data.py:7)"
    assert "load (data.py:7)" in drawn([theirs], 120, spy)[1]


def test_without_py_spy_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    spy = Stacks()
    spy.ask([1])
    assert "py-spy is not installed" in drawn([worker(ours=False, note=None)], 120, spy)[-1]


def test_a_py_spy_beside_python_is_found_in_an_environment_that_is_not_activated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "py-spy"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    assert Stacks().why_not == ""


def test_a_py_spy_that_may_not_look_is_not_asked_again(tmp_path: Path) -> None:
    script = tmp_path / "py-spy"
    script.write_text(
        "#!/bin/sh\necho 'Permission Denied: Try running again with sudo' >&2; exit 1\n"
    )
    script.chmod(0o755)
    spy = Stacks(str(script))

    def refused() -> bool:
        spy.ask([os.getpid()])
        return bool(spy.why_not)

    assert eventually(refused)
    assert "ptrace_scope" in spy.why_not
    spy.close()


def test_the_frame_nearest_to_the_user_is_chosen() -> None:
    frames = [
        {"name": "wait", "filename": "/usr/lib/python3/threading.py", "line": 1},
        {"name": "decode", "filename": "/home/me/data.py", "line": 7},
        {"name": "_worker_loop", "filename": "/x/torch/utils/data/_utils/worker.py", "line": 3},
    ]
    dump = [{"thread_name": "other", "frames": []}, {"thread_name": "MainThread", "frames": frames}]
    assert innermost(dump) == "decode (data.py:7)"
    assert (
        innermost([{"thread_name": "MainThread", "frames": frames[2:]}])
        == "_worker_loop (worker.py:3)"
    )
    assert innermost([]) == ""
    # a forked worker that waits: its trainer's frames are below, and say nothing
    waiting = [
        {"name": "select", "filename": "/usr/lib/python3/selectors.py", "line": 1},
        {"name": "get", "filename": "/usr/lib/python3/multiprocessing/queues.py", "line": 1},
        frames[2],
        {"name": "<module>", "filename": "/home/me/train.py", "line": 9},
    ]
    assert innermost([{"thread_name": "MainThread", "frames": waiting}]) == "idle"


def test_the_group_of_the_trainer_is_shown(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.proc("meminfo", MEMINFO)
    tree.proc("self/mountinfo", MOUNTS_V2)
    tree.proc("812/cgroup", "0::/job\n")
    tree.cgroup("job/memory.max", str(8 << 30))
    tree.cgroup("job/memory.current", str(6 << 30))
    lines = worker_table.surroundings([worker()], tree.roots)
    assert "control group 6.0 GiB of 8.0 GiB (75%)" in lines
    assert lines[0] == "memory 1.9 GiB of 15 GiB available"


def test_it_refreshes_in_place_and_ends_with_q() -> None:
    """On a terminal of its own, as over ssh."""
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    child = subprocess.Popen(
        [sys.executable, "-m", "holdfast.cli", "top", "--interval", "0.2", "--no-stacks", "1"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "src", "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    screen = b""
    deadline = time.monotonic() + 60
    try:
        while screen.count(b"available") < 3 and time.monotonic() < deadline:
            if select.select([ours], [], [], 1)[0]:
                screen += os.read(ours, 65536)
        assert screen.count(b"available") >= 3, screen.decode(errors="replace")
        assert b"\x1b[?1049h" in screen  # a screen of its own
        os.write(ours, b"xq")
        assert child.wait(20) in (0, 1)
        assert termios.tcgetattr(theirs) == before
    finally:
        child.kill()
        child.wait(20)
        os.close(ours)
        os.close(theirs)
