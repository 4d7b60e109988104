"""Readers of /proc, control groups, the kernel's log: on made-up trees, and where there is nothing."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.autopsy.machine_facts import MachineFacts, in_words
from holdfast.autopsy.readers import Roots, cgroup, kernel_log, procfs
from tests.autopsy.made_up import MEMINFO, Tree

PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


# -- control groups, v1 --------------------------------------------------------------------


def test_v1_kills_are_read_in_the_group_and_in_all_above(tree: Tree) -> None:
    tree.v1(7, "/job/step")
    for path, count in (("job/step", 2), ("job", 5), (".", 9)):
        tree.cgroup(
            f"memory/{path}/memory.oom_control",
            f"oom_kill_disable 0\nunder_oom 0\noom_kill {count}\n",
        )
    found = cgroup.kills(7, tree.roots)
    assert found is not None
    assert list(found.values()) == [2, 5, 9]


def test_v1_the_tightest_limit_counts_and_unlimited_is_none(tree: Tree) -> None:
    tree.v1(7, "/job/step")
    tree.cgroup("memory/job/step/memory.limit_in_bytes", "9223372036854771712\n")
    tree.cgroup("memory/job/memory.limit_in_bytes", "4096000\n")
    tree.cgroup("memory/job/memory.usage_in_bytes", "4000000\n")
    tree.cgroup("memory/memory.limit_in_bytes", "8192000\n")
    tree.cgroup("pids/job/pids.max", "100\n")
    tree.cgroup("pids/job/pids.current", "99\n")
    tree.cgroup("pids/job/pids.events", "max 3\n")
    tree.cgroup("cpu,cpuacct/job/cpu.cfs_quota_us", "150000\n")
    tree.cgroup("cpu,cpuacct/job/cpu.cfs_period_us", "100000\n")
    found = cgroup.confinement(7, tree.roots)
    assert (found.memory_limit, found.memory_usage) == (4096000, 4000000)
    assert (found.pids_max, found.pids_current, found.pids_refused) == (100, 99, 3)
    assert found.cpus == 1.5
    assert found.oom_group is None


def test_v1_inside_a_container_the_mount_shows_its_own_group(tree: Tree) -> None:
    """The path is that of the host; the mount begins at the container's group."""
    tree.proc("7/cgroup", "4:memory:/docker/abc/inner\n")
    tree.proc(
        "self/mountinfo",
        "30 20 0:26 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
    )
    tree.cgroup("memory/memory.oom_control", "oom_kill 4\n")
    tree.cgroup("memory/inner/memory.oom_control", "oom_kill 1\n")
    found = cgroup.kills(7, tree.roots)
    assert found is not None
    assert list(found.values()) == [1, 4]


# -- control groups, v2 --------------------------------------------------------------------


def test_v2_kills_limits_and_the_group_flag(tree: Tree) -> None:
    tree.v2(7, "/kubepods/pod1")
    tree.cgroup(
        "kubepods/pod1/memory.events",
        "low 0\nhigh 0\nmax 12\noom 3\noom_kill 3\noom_group_kill 1\n",
    )
    tree.cgroup("kubepods/memory.events", "oom_kill 8\n")
    tree.cgroup("kubepods/pod1/memory.max", "1048576\n")
    tree.cgroup("kubepods/pod1/memory.current", "1048000\n")
    tree.cgroup("kubepods/memory.max", "max\n")
    tree.cgroup("kubepods/pod1/memory.oom.group", "1\n")
    tree.cgroup("kubepods/pod1/cpu.max", "50000 100000\n")
    kills = cgroup.kills(7, tree.roots)
    assert kills is not None
    assert list(kills.values()) == [3, 8]
    found = cgroup.confinement(7, tree.roots)
    assert (found.memory_limit, found.memory_usage, found.oom_group) == (1048576, 1048000, True)
    assert found.cpus == 0.5


def test_v2_with_a_private_namespace_the_root_is_ours(tree: Tree) -> None:
    tree.v2(7, "/")
    tree.cgroup("memory.events", "oom_kill 2\n")
    found = cgroup.kills(7, tree.roots)
    assert found is not None
    assert list(found.values()) == [2]


def test_v2_paths_that_lie_outside_of_the_namespace_do_no_harm(tree: Tree) -> None:
    tree.v2(7, "/../other")
    assert cgroup.confinement(7, tree.roots).memory_limit is None


def test_a_v2_tree_without_a_memory_controller_says_nothing(tree: Tree) -> None:
    tree.v2(7, "/job")
    tree.cgroup("job/cgroup.procs", "7\n")
    assert cgroup.kills(7, tree.roots) is None


# -- processes -----------------------------------------------------------------------------


def test_a_process_is_read_whatever_its_name_is(tree: Tree) -> None:
    tree.process(7, state="D", ticks=42, wchan="nfs_wait_bit_killable", pages=1000)
    seen = procfs.activity(7, tree.roots)
    assert seen == procfs.Activity("D", "nfs_wait_bit_killable", 42)
    size = procfs.size(7, tree.roots)
    assert size is not None
    assert (size.resident, size.private) == (1000 * PAGE, 750 * PAGE)
    assert procfs.threads(7, tree.roots) == 3
    tree.process(8, pending=1 << 14, caught=0xE8)
    assert procfs.pending_signals(8, tree.roots) == {15}
    assert procfs.caught_signals(8, tree.roots) == {4, 6, 7, 8}
    assert procfs.pending_signals(7, tree.roots) == procfs.caught_signals(7, tree.roots) == set()
    assert procfs.limits(7, tree.roots) == procfs.Limits((1024, 4096), (1000, None))


def test_a_zombie_has_no_size_and_is_dead(tree: Tree) -> None:
    tree.process(7, state="Z")
    tree.proc("7/statm", "0 0 0 0 0 0 0")
    tree.process("self")
    assert procfs.size(7, tree.roots) is None
    assert procfs.is_dead(7, tree.roots)
    assert procfs.is_dead(8, tree.roots)
    assert not procfs.is_dead("self", tree.roots)


def test_the_machine_is_read(tree: Tree) -> None:
    tree.proc("meminfo", MEMINFO)
    tree.proc("vmstat", "nr_free_pages 1\noom_kill 17\noom_kill_other 3\n")
    found = procfs.meminfo(tree.roots)
    assert found is not None
    assert (found.total, found.swap_free) == (16000000 << 10, 1000000 << 10)
    assert procfs.machine_kills(tree.roots) == 17


# -- the kernel's log ----------------------------------------------------------------------

LOG = """\
6,100,5000,-;oom-kill:constraint=CONSTRAINT_MEMCG,task=python,pid=812,uid=0
3,101,5001,-;Memory cgroup out of memory: Killed process 812 (python) total-vm:39132kB
6,102,5002,-;python[81]: segfault at 0 ip 00007f sp 00007f error 4 in libc.so.6
 SUBSYSTEM=memory
6,103,5003,-;Out of memory: Killed process 8120 (python)
"""


def test_old_lines_and_other_namespaces_pids_do_not_count(tree: Tree) -> None:
    tree.roots.kmsg.write_text("3,1,5000000,-;Out of memory: Killed process 812 (python)")
    assert kernel_log.read(tree.roots, since=34.0) is not None
    assert kernel_log.read(tree.roots, since=34.0).lines  # type: ignore[union-attr]
    assert not kernel_log.read(tree.roots, since=36.0).lines  # type: ignore[union-attr]
    namespace = tree.roots.proc / "self" / "ns" / "pid"
    namespace.unlink()
    namespace.symlink_to("pid:[4026532999]")
    assert kernel_log.read(tree.roots) is None


def test_only_lines_of_that_pid_count(tree: Tree) -> None:
    lines = tuple(LOG.splitlines())
    log = kernel_log.KernelLog("here", lines)
    assert len(kernel_log.about(812, log.lines)) == 2
    assert "python[81]: segfault" in kernel_log.about(81, log.lines)[0]
    assert len(kernel_log.about(8120, log.lines)) == 1
    assert kernel_log.about(8, log.lines) == ()


# -- where there is nothing ----------------------------------------------------------------


def test_without_any_of_it_every_reader_says_nothing_and_none_fails(tmp_path: Path) -> None:
    nowhere = Roots(*(tmp_path / name for name in ("proc", "cgroup", "kmsg", "shm")))
    assert cgroup.kills(1, nowhere) is None
    assert cgroup.confinement(1, nowhere) == cgroup.Confinement()
    assert procfs.activity(1, nowhere) is None
    assert procfs.size(1, nowhere) is None
    assert procfs.meminfo(nowhere) is None
    assert procfs.machine_kills(nowhere) is None
    assert procfs.descriptors(1, nowhere) is None
    assert procfs.threads(1, nowhere) is None
    assert procfs.limits(1, nowhere) is None
    assert procfs.pending_signals(1, nowhere) == frozenset()
    assert procfs.caught_signals(1, nowhere) is None
    assert procfs.is_dead(1, nowhere) is None
    assert kernel_log.read(nowhere) is None
    assert procfs.fill(nowhere.shm) is None
    facts = MachineFacts.read(nowhere, {}).facts()
    assert facts["memory_limit"] == "what your limit is"


@pytest.mark.parametrize("garbage", ["", "\0\xff", "max", "oom_kill x\n", ")", "7 () \n" * 9])
def test_garbage_is_nothing_too(tree: Tree, garbage: str) -> None:
    for name in (
        "7/stat",
        "7/statm",
        "7/status",
        "7/limits",
        "7/cgroup",
        "meminfo",
        "vmstat",
        "self/mountinfo",
    ):
        tree.proc(name, garbage)
    tree.cgroup("memory.events", garbage)
    assert cgroup.kills(7, tree.roots) is None
    assert procfs.activity(7, tree.roots) is None
    assert procfs.size(7, tree.roots) is None
    assert procfs.meminfo(tree.roots) is None
    assert procfs.machine_kills(tree.roots) is None
    assert cgroup.confinement(7, tree.roots).memory_limit is None


def test_on_this_machine_a_living_process_is_read() -> None:
    assert procfs.activity(os.getpid()) is not None
    size = procfs.size("self")
    assert size is not None
    assert size.resident > 1 << 20
    assert procfs.descriptors("self") > 2  # type: ignore[operator]
    assert procfs.meminfo() is not None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_an_unprivileged_user_gets_less_and_no_error() -> None:
    """As an unprivileged user, and without access to the kernel's log."""
    script = """
import os, sys
sys.path[:0] = sys.argv[1:2]
from holdfast.autopsy.machine_facts import MachineFacts
from holdfast.autopsy.readers import cgroup, kernel_log, procfs
os.setgid(65534); os.setuid(65534)
child = os.fork()
if child == 0:
    import time; time.sleep(60)
try:
    assert procfs.size(child).resident > 0
    assert procfs.machine_kills() is None or procfs.machine_kills() >= 0
    cgroup.kills(child); cgroup.confinement(child)
    assert kernel_log.read() is None or open("/proc/sys/kernel/dmesg_restrict").read() == "0\\n"
    assert procfs.activity(1).state
    MachineFacts.read().facts()
finally:
    os.kill(child, 9); os.waitpid(child, 0)
print("fine")
"""
    source = str(Path(kernel_log.__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", script, source], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "fine\n", done.stderr


# -- what remedies say of a machine --------------------------------------------------------


def test_facts_are_filled_from_the_tree(tree: Tree) -> None:
    tree.v2("self", "/job")
    tree.process("self")
    tree.proc("meminfo", MEMINFO)
    tree.cgroup("job/memory.max", str(4 << 30))
    facts = MachineFacts.read(tree.roots, {"SLURM_JOB_ID": "1"}).facts(workers=8, sample=3)
    assert facts["memory_limit"] == "4.0 GiB"
    assert facts["memory_wanted"] == "6"
    assert (facts["nofile_soft"], facts["nproc_hard"]) == ("1024", "unlimited")
    assert (facts["fewer_workers"], facts["sample"]) == ("4", "3")


@pytest.mark.parametrize(
    ("environment", "place"),
    [({}, ""), ({"SLURM_JOB_ID": "3"}, "slurm"), ({"KUBERNETES_SERVICE_HOST": "x"}, "kubernetes")],
)
def test_the_place_is_known(tree: Tree, environment: dict[str, str], place: str) -> None:
    assert MachineFacts.read(tree.roots, environment).place == place


def test_docker_is_known_by_its_file(tree: Tree) -> None:
    tree.proc("self/root/.dockerenv", "")
    assert MachineFacts.read(tree.roots, {}).place == "docker"


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (64 << 20, "64 MiB"),
        (3 << 30, "3.0 GiB"),
        (5 << 40, "5.0 TiB"),
    ],
)
def test_bytes_are_said_as_people_say_them(count: int, words: str) -> None:
    assert in_words(count) == words


def test_old_lines_of_dmesg_are_not_about_a_new_process() -> None:
    lines = [
        "[   12.345678] Killed process 7 (python)",
        "[ 2345.678901] Killed process 7 (python)",
        "no time at all",
    ]
    assert kernel_log.newer(lines, 100.0) == lines[1:2]
    assert kernel_log.newer(lines, -math.inf) == lines


@pytest.mark.parametrize(
    ("soft", "hard", "wanted"),
    [(1024, 4096, "4096"), (1024, 1024, "2048"), (1024, None, "unlimited")],
)
def test_the_limit_to_set_is_never_the_one_there_is(
    soft: int, hard: int | None, wanted: str
) -> None:
    limits = procfs.Limits(files=(soft, hard), processes=(soft, hard))
    facts = MachineFacts(limits=limits).facts()
    assert (facts["nofile_wanted"], facts["nproc_wanted"]) == (wanted, wanted)
