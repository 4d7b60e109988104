"""Every feature finds a way where one exists, and reports which it is and what is lost."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast import kernel
from holdfast.kernel import files
from tests.kernel.rows import (
    ALL_DELETED,
    ALL_FILTERED,
    EVERYTHING,
    HERE,
    SINGLE,
    SOURCE,
    Refusal,
)
from tests.support.processes import eventually

NOTHING = Refusal("nothing")
SEAL, SOCKETS = (
    Refusal("no seals", calls={"fcntl:F_ADD_SEALS": "EPERM"}),
    Refusal("no sockets", calls={"socketpair": "EPERM"}),
)
ROWS = (NOTHING, *SINGLE, ALL_FILTERED, ALL_DELETED, EVERYTHING)


@functools.cache
def probed() -> dict[str, dict[str, Any]]:
    """All rows, from one interpreter."""
    for row in ROWS:
        row.skip_unless_possible()
    wanted = [{"deleted": row.deleted, "calls": row.calls, "proc": row.proc} for row in ROWS]
    ended = subprocess.run(
        [sys.executable, str(HERE / "probe.py"), json.dumps(wanted)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return dict(zip((row.name for row in ROWS), json.loads(ended.stdout), strict=True))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_memory_files_children_and_limits_work_with(row: Refusal) -> None:
    found = probed()[row.name]
    assert "error" not in found, found["error"]
    assert found["missing"] is None
    assert found["cores"] >= 1
    assert [
        name for name, (way, _) in found["survey"].items() if name in kernel.NEEDED and not way
    ] == []


def ways(name: str) -> dict[str, tuple[str, str]]:
    """What differs from a system where nothing is refused: the way, and what is lost."""
    plain, found = (probed()[one]["survey"] for one in ("nothing", name))
    return {one: tuple(row) for one, row in found.items() if row != plain[one]}


@pytest.mark.parametrize(
    ("refused", "feature", "way", "lost"),
    [
        (
            "memfd_create refused (EPERM)",
            "memory files",
            "unlinked files in /dev/shm",
            "the free space of /dev/shm",
        ),
        ("no os.memfd_create", "memory files", "the system call", ""),
        ("all of pidfds refused (ENOSYS)", "process handles", "waitpid", "a second later"),
        ("no os.pidfd_open", "process handles", "the system call", ""),
        ("pidfd_send_signal refused (EPERM)", "process handles", "and kill", ""),
        ("F_SETSIG refused (EINVAL)", "signal at the end of a pipe", "", "stopped"),
        ("PR_SET_PDEATHSIG refused (EPERM)", "signal at the parent's death", "", "outlive"),
        ("fallocate refused (EPERM)", "reserving memory", "zeros", "longer"),
        ("no os.posix_fallocate", "reserving memory", "the system call", ""),
        ("prlimit64 refused (EPERM)", "limits", "the system call", ""),
        ("all of limits refused (EPERM)", "limits", "", "allocation"),
        ("no resource.prlimit", "limits of other processes", "the system call", ""),
        ("F_ADD_SEALS refused (EPERM)", "sealed files", "", "packed"),
        ("sched_setscheduler refused (EPERM)", "scheduling policy", "", "later"),
        ("no /proc", "/proc", "", "worker_memory_limit"),
    ],
)
def test_what_serves_instead_and_what_that_costs_is_said(
    refused: str, feature: str, way: str, lost: str
) -> None:
    here, cost = ways(refused)[feature]
    assert way in here
    assert bool(way) == bool(here)
    assert lost in cost
    assert bool(lost) == bool(cost)


def test_what_is_not_refused_stays_as_it_is() -> None:
    assert ways("no os.pipe2") == ways("eventfd2 refused (EPERM)") == {}
    assert set(ways("no os.memfd_create")) == {"memory files"}
    assert set(ways("no /proc")) == {"/proc", "signal at the end of a pipe"}


@pytest.mark.slow
def test_the_doctor_does_not_call_a_machine_good_that_refuses_us_something() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "holdfast", "doctor", "--json"],
        env=EVERYTHING.environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    rows = {row["name"]: row for row in json.loads(ended.stdout)["machine"]}
    lost = {"process handles", "signal at the end of a pipe", "memory files", "limits", "/proc"}
    assert {name for name in lost if rows[name]["status"] == "warning"} == lost


def test_readme_says_of_each_feature_what_is_lost_without() -> None:
    section = (HERE.parents[1] / "docs" / "versions.md").read_text().split("## What needs")[1]
    table = section.split("## Docs")[0]
    assert [name for name in kernel.FEATURES if name not in table] == []


def test_zeros_are_written_to_all_pages_but_those_in_use() -> None:
    page = 4096
    gaps = list(files.gaps(0, 8 * page, [(5 * page, page), (page + 100, page)]))
    assert gaps == [(0, page), (3 * page, 5 * page), (6 * page, 8 * page)]
    assert list(files.gaps(page, 2 * page, [(0, 10 * page)])) == []
    assert list(files.gaps(page, 2 * page, [(4 * page, page)])) == [(page, 2 * page)]


ASKED = (
    r"\bos\.(memfd_create|pidfd_open|eventfd|pipe2?|dup|waitid|posix_fallocate|sched_\w+)\(|"
    r"\bpidfd_send_signal\(|\bresource\.(prlimit|[gs]etrlimit)\(|\bsocketpair\(|\bmmap\.mmap\(|"
    r"\bprctl\(|\bmmap\.(MADV|MAP_POPULATE)|\bfcntl\.F_(SET|ADD|SEAL)"
)


def test_nothing_is_asked_of_the_kernel_elsewhere() -> None:
    # The lifeline: what an interpreter runs before it can import anything of ours.
    allowed = {"kernel", "processes/lifeline.py"}
    found = {
        f"{path.relative_to(SOURCE / 'holdfast')}: {match[0]}"
        for path in (SOURCE / "holdfast").rglob("*.py")
        for match in re.finditer(ASKED, path.read_text())
    }
    assert {one for one in found if not one.startswith(tuple(allowed))} == set()


def _refused(name: str, flags: int) -> int:
    raise PermissionError(1, "Operation not permitted")


def test_a_memory_file_lies_in_the_first_folder_that_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "new_memory_file", _refused)
    monkeypatch.setattr(files, "folders", lambda: (str(tmp_path / "none"), str(tmp_path)))
    fd = kernel.memory_file("holdfast-test", room=100)
    assert os.fstat(fd).st_dev == tmp_path.stat().st_dev
    assert list(tmp_path.iterdir()) == []
    os.close(fd)
    with pytest.raises(OSError, match="No space left"):
        kernel.memory_file("holdfast-test", room=1 << 60)


def test_a_shortage_is_no_refusal() -> None:
    def short(name: str, flags: int) -> int:
        raise OSError(24, "Too many open files")

    chain = kernel.Chain(("first", short), ("second", lambda name, flags: 7))
    with pytest.raises(OSError, match="Too many"):
        chain("a", 0)
    assert chain.way == "first"


def test_a_child_that_takes_long_to_die_is_reaped_after_it_was_let_go() -> None:
    line, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.pause()
        finally:
            os._exit(1)
    try:
        os.close(theirs)
        child = kernel.Child(pid, line)
        child.close()
        assert not child.reaped
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: child.reaped)
        assert child.status == signal.SIGKILL
    finally:
        os.close(line)
