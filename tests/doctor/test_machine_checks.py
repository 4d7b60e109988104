"""The checks of the machine, on machines that are made up."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.autopsy.machine_facts import MachineFacts
from holdfast.autopsy.readers import cgroup, procfs
from holdfast.doctor import machine_checks, software_checks
from holdfast.doctor.findings import Check, bad, good, warning, worst
from holdfast.doctor.surroundings import Surroundings
from holdfast.kernel import FEATURES, NEEDED, Feature
from holdfast.private_names import Needed, Part
from tests.autopsy.made_up import LIMITS, MEMINFO, MOUNTS_V2, Tree

GIB = 1 << 30


def memory(total: float, available: float, swap: float = 4, free: float = 4) -> procfs.Meminfo:
    return procfs.Meminfo(*(int(size * GIB) for size in (total, available, swap, free)))


def limits(files: Any = (65536, 65536), processes: Any = (None, None)) -> procfs.Limits:
    return procfs.Limits(files, processes)


def part(name: str, needed: Needed, wrong: str = "") -> Part:
    return Part(name, "speed", "it is slower", needed, wrong)


WELL = Surroundings(
    machine=MachineFacts(
        cpus=8,
        memory=memory(64, 50),
        shm=procfs.Fill(32 * GIB, 30 * GIB),
        limits=limits(),
        max_map_count=65530,
        overcommit=0,
    ),
    confined=cgroup.Confinement(oom_group=False),
    environment={"OMP_NUM_THREADS": "1"},
    cores=8,
    kernel_log="/dev/kmsg",
    python=(3, 11, 7),
    torch="2.13.0",
    numpy="2.4",
    sharing="file_descriptor",
    kernel={name: Feature(name, "as usual") for name in FEATURES},
    private_names=(part("torch._x", ""),),
)


def but(**changes: Any) -> Surroundings:
    """The healthy machine with something else: of the machine, of its group, or of Python."""
    here = WELL
    for name, value in changes.items():
        if name in Surroundings.__dataclass_fields__:
            here = replace(here, **{name: value})
        elif name in cgroup.Confinement.__dataclass_fields__:
            here = replace(here, confined=replace(here.confined, **{name: value}))
        else:
            here = replace(here, machine=replace(here.machine, **{name: value}))
    return here


def having(name: str, way: str, lost: str) -> Surroundings:
    """The healthy machine with another way to something that is asked of the kernel."""
    return but(kernel={**WELL.kernel, name: Feature(name, way, lost)})


def test_a_healthy_machine_is_good_throughout() -> None:
    checks = machine_checks.examine(WELL)
    assert [check for check in checks if check.status != "good"] == []
    assert len({check.name for check in checks}) == len(checks) == len(machine_checks.CHECKS)


ILLS: dict[str, tuple[Surroundings, str, str, str]] = {
    "no memory": (but(memory=memory(64, 0.5)), "memory", "bad", "512 MiB of 64 GiB"),
    "little memory": (but(memory=memory(64, 8)), "memory", "warning", "8.0 GiB of 64 GiB"),
    "unknown memory": (but(memory=None), "memory", "warning", "cannot be read"),
    "no swap": (but(memory=memory(16, 12, 0, 0)), "swap", "warning", "is killed at once"),
    "swap in use": (but(memory=memory(16, 12, 4, 0.1)), "swap", "warning", "short of memory"),
    "group is full": (
        but(memory_limit=10 * GIB, memory_usage=int(9.5 * GIB)),
        "cgroup memory",
        "bad",
        "10 GiB",
    ),
    "group fills": (
        but(memory_limit=10 * GIB, memory_usage=8 * GIB),
        "cgroup memory",
        "warning",
        "8.0 GiB used",
    ),
    "all are killed": (
        but(oom_group=True),
        "oom.group",
        "warning",
        "kills all its processes",
    ),
    "docker's shm": (
        but(shm=procfs.Fill(64 << 20, 64 << 20)),
        "/dev/shm",
        "warning",
        "holdfast's loader does not use it",
    ),
    "no shm": (but(shm=None), "/dev/shm", "warning", "not there"),
    "few files": (but(limits=limits((1024, 4096))), "open files", "warning", "raised to 4096"),
    "hardly any files": (
        but(limits=limits((128, 128))),
        "open files",
        "bad",
        "no more without root",
    ),
    "tasks used up": (but(pids_max=500, pids_current=450), "processes", "bad", "450 of 500"),
    "tasks nearly used up": (
        but(pids_max=500, pids_current=100),
        "processes",
        "warning",
        "100 of 500",
    ),
    "few processes": (
        but(limits=limits(processes=(500, 500))),
        "processes",
        "warning",
        "500 allowed",
    ),
    "few mappings": (but(max_map_count=1000), "mappings", "warning", "1000"),
    "strict overcommit": (
        but(overcommit=2, commit=(9 * GIB, 10 * GIB)),
        "overcommit",
        "warning",
        "9.0 GiB of 10 GiB",
    ),
    "quota": (
        but(cpus=2.0),
        "processors",
        "warning",
        "quota is 2",
    ),
    "slurm's share": (
        but(environment={"SLURM_CPUS_PER_TASK": "4"}),
        "processors",
        "warning",
        "Slurm allows 4",
    ),
    "threads and fork": (
        but(threads=3, thread_names=("tensorboard",)),
        "start method",
        "warning",
        "tensorboard",
    ),
    "threads": (
        but(threads=3, thread_names=("tensorboard",)),
        "threads",
        "warning",
        "1 of Python and 1 of",
    ),
    "many native threads": (but(threads=40), "threads", "warning", "39 of libraries"),
    "no torch": (but(torch=None), "versions", "bad", "not installed"),
    "old torch": (but(torch="2.1.2+cu121"), "versions", "bad", "needs torch 2.6"),
    "a name that is gone": (
        but(private_names=(part("torch._x", ""), part("torch._y", "", wrong="is gone"))),
        "private names",
        "warning",
        "torch._y is gone: it is slower",
    ),
    "a needed name that is gone": (
        but(private_names=(part("torch._y", "always", wrong="is gone"),)),
        "private names",
        "bad",
        "torch._y is gone",
    ),
    "new python": (
        but(python=(3, 14, 0), start_method="forkserver"),
        "versions",
        "warning",
        "not forked by default",
    ),
    "no GIL": (but(free_threaded=True), "versions", "warning", "free-threaded"),
    "names in shm": (but(sharing="file_system"), "sharing", "warning", "names in /dev/shm remain"),
    "kernel log": (but(kernel_log=None), "kernel log", "warning", "counters"),
    "two OpenMPs": (
        but(openmp=("libgomp.so.1", "libiomp5.so")),
        "OpenMP",
        "warning",
        "two runtimes",
    ),
    "OpenCV": (but(opencv=8, opencv_loaded=True), "OpenCV", "warning", "8 threads"),
    "no pidfds": (
        having("process handles", "waitpid", "noticed later"),
        "process handles",
        "warning",
        "waitpid: noticed later",
    ),
    "no lifeline": (
        having("signal at the end of a pipe", "", "they live on"),
        "signal at the end of a pipe",
        "warning",
        "none: they live on",
    ),
    "no sockets": (
        having("passing descriptors", "", "no sockets"),
        "passing descriptors",
        "bad",
        "The workers are torch's own",
    ),
    "no NumPy": (but(numpy=None), "versions", "warning", "Without NumPy"),
}


@pytest.mark.parametrize(
    ("here", "words"),
    [
        (WELL, "Before Python 3.13 a multiprocessing.SharedMemory"),
        (but(python=(3, 13, 1)), "no thread can be started while the interpreter shuts down"),
        (but(torch="2.13.0+cu130"), "nothing in the dataset may touch the GPU"),
        (but(torch="2.20.0"), "The newest torch that holdfast was tried with is 2."),
        (but(python=(3, 19, 0)), "The newest Python that holdfast was tried with is 3."),
    ],
)
def test_what_is_good_to_know_of_versions_is_said(here: Surroundings, words: str) -> None:
    check = software_checks.versions(here)
    assert check.status == "good"
    assert words in check.meaning


def test_threads_of_linear_algebra_are_told_for_torch_and_for_us() -> None:
    """Ours have one, unless the user's variables decide: any of those the workers look at."""

    def said(name: str, here: Surroundings) -> str:
        return next(check.meaning for check in machine_checks.examine(here) if check.name == name)

    unset, chosen = but(environment={}), but(environment={"OPENBLAS_NUM_THREADS": "3"})
    assert "with torch's loader NumPy's BLAS starts 8 threads" in said("OpenMP", unset)
    assert "each of holdfast's workers uses one thread for" in said("OpenMP", unset)
    assert said("OpenMP", chosen) == "OPENBLAS_NUM_THREADS=3"
    assert "uses one thread for" in said("threads", replace(unset, threads=40))
    assert "as your variables say" in said("threads", replace(chosen, threads=40))


def test_a_fork_while_threads_run_is_a_pitfall_of_newer_pythons() -> None:
    threaded = but(python=(3, 12, 0), threads=3, thread_names=("tensorboard",))
    assert "DeprecationWarning" in software_checks.versions(threaded).meaning
    assert software_checks.versions(replace(threaded, python=(3, 11, 0))).status == "good"


def test_libraries_that_are_not_loaded_are_no_complaint() -> None:
    assert software_checks.opencv(but(opencv=8)).status == "good"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ""),
        ({"container": "lxc"}, "lxc"),
        ({"APPTAINER_CONTAINER": "/a.sif"}, "apptainer"),
        ({"KUBERNETES_SERVICE_HOST": "1"}, "kubernetes"),
    ],
)
def test_containers_are_known_by_what_they_say(
    tmp_path: Path, environment: dict[str, str], expected: str
) -> None:
    here = Surroundings.read(Tree(tmp_path).roots, environment)
    assert here.container == expected
    assert (expected or "none recognised") in machine_checks.container(here).meaning


@pytest.mark.parametrize("ill", ILLS)
def test_what_is_wrong_is_found_and_nothing_else(ill: str) -> None:
    here, name, status, words = ILLS[ill]
    checks = {check.name: check for check in machine_checks.examine(here)}
    assert checks[name].status == status
    assert words in checks[name].meaning
    others = {one.name for one in checks.values() if one.status != "good"} - {name}
    assert others <= {
        "threads",
        "start method",
        "swap" if here.machine.memory is None else "threads",
    }


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_asked_of_the_kernel_has_a_row(name: str) -> None:
    lost = next(
        one
        for one in machine_checks.examine(having(name, "", "nothing serves"))
        if one.name == name
    )
    assert lost.status == ("bad" if name in NEEDED else "warning")
    assert "nothing serves" in lost.meaning


def test_shared_memory_is_ours_too_where_memory_files_are_refused() -> None:
    here = having("memory files", "unlinked files in /dev/shm", "as much room")
    assert machine_checks.shared_memory(here).meaning.endswith("holdfast does")
    small = replace(here, machine=replace(here.machine, shm=procfs.Fill(64 << 20, 64 << 20)))
    assert machine_checks.shared_memory(small).meaning.endswith("uses it here too")


@pytest.mark.parametrize(
    ("place", "words"), [("docker", "--shm-size"), ("kubernetes", "emptyDir"), ("", "remount")]
)
def test_the_command_fits_the_place(place: str, words: str) -> None:
    check = machine_checks.shared_memory(but(shm=procfs.Fill(64 << 20, 64 << 20), place=place))
    assert words in check.command


def test_swap_comes_with_the_commands_that_add_some_except_in_a_pod() -> None:
    none = memory(16, 12, 0, 0)
    assert "mkswap" in machine_checks.swap(but(memory=none)).command
    assert "# on the host" in machine_checks.swap(but(memory=none, container="docker")).command
    assert not machine_checks.swap(but(memory=none, container="kubernetes")).command


def test_a_system_is_read_from_its_files(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.proc("meminfo", MEMINFO + "CommitLimit: 100 kB\nCommitted_AS: 90 kB\n")
    tree.proc("self/limits", LIMITS)
    tree.proc("self/mountinfo", MOUNTS_V2)
    tree.proc("self/cgroup", "0::/job\n")
    tree.proc("self/status", "Threads:\t7\n")
    tree.proc("self/maps", "7f00-7f01 r-xp 0 0:0 0 /usr/lib/libgomp.so.1.0.0\n")
    tree.proc("sys/vm/max_map_count", "1000\n")
    tree.proc("sys/vm/overcommit_memory", "2\n")
    tree.cgroup("job/memory.max", str(8 * GIB))
    tree.cgroup("job/memory.current", str(7 * GIB))
    tree.cgroup("job/memory.oom.group", "1")
    tree.cgroup("job/cpu.max", "50000 100000")
    tree.cgroup("job/pids.max", "100")
    tree.cgroup("job/pids.current", "20")
    here = Surroundings.read(tree.roots, {"SLURM_JOB_ID": "812"})
    assert here.commit == (90 << 10, 100 << 10)
    assert here.threads == 7
    assert here.openmp == ("libgomp.so.1.0.0",)
    checks = {check.name: check.status for check in machine_checks.examine(here)}
    expected = {
        "memory": "warning",
        "cgroup memory": "warning",
        "oom.group": "warning",
        "open files": "warning",
        "processes": "bad",
        "mappings": "warning",
        "overcommit": "warning",
        "processors": "warning",
        "kernel log": "warning",
    }
    assert {name: checks[name] for name in expected} == expected
    assert "812" in machine_checks.scheduler(here).meaning


def test_a_system_that_tells_nothing_is_no_error(tmp_path: Path) -> None:
    checks = machine_checks.examine(Surroundings.read(Tree(tmp_path).roots, {}))
    assert len(checks) == len(machine_checks.CHECKS)


def test_threads_of_this_process_are_named() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="a thread of the test", daemon=True)
    thread.start()
    try:
        assert "a thread of the test" in Surroundings.read().thread_names
    finally:
        end.set()
        thread.join(10)


def test_the_worst_counts() -> None:
    found: list[Check] = []
    assert worst(found) == "good"
    for check, status in (
        (good("a", ""), "good"),
        (bad("b", ""), "bad"),
        (warning("c", ""), "bad"),
    ):
        found.append(check)
        assert worst(found) == status
