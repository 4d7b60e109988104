"""Is this machine fit for loading data? One function per check. Those of Python, torch and other
libraries are in `software_checks`.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast import kernel
from holdfast.autopsy.machine_facts import in_words
from holdfast.doctor import software_checks
from holdfast.doctor.findings import Check, bad, good, warning
from holdfast.doctor.surroundings import Surroundings

_GIB = 1 << 30


def examine(here: Surroundings) -> list[Check]:
    """All checks of the machine, in the order they are shown."""
    return [check(here) for check in CHECKS]


def memory(here: Surroundings) -> Check:
    known = here.machine.memory
    if known is None:
        return warning("memory", "how much memory there is cannot be read (/proc/meminfo)")
    words = f"{in_words(known.available)} of {in_words(known.total)} available"
    command = "ps -eo pid,rss,comm --sort=-rss | head"
    if known.available < max(_GIB, known.total // 20):
        return bad("memory", f"{words}: a worker may be killed at any moment", command)
    if known.available < known.total // 5:
        return warning("memory", f"{words}: not much; see which process has the rest", command)
    return good("memory", words)


def swap(here: Surroundings) -> Check:
    known = here.machine.memory
    if known is None:
        return warning("swap", "cannot be read (/proc/meminfo)")
    if known.swap_total and known.swap_free < known.swap_total // 10:
        return warning(
            "swap",
            f"{in_words(known.swap_free)} of {in_words(known.swap_total)} left: the machine has been "
            "short of memory",
            "vmstat 1 5   # si and so: what is moved in and out right now",
        )
    if known.swap_total:
        return good("swap", f"{in_words(known.swap_free)} of {in_words(known.swap_total)} free")
    size = 8 if known.total < 64 * _GIB else 32
    command = (
        f"sudo fallocate -l {size}G /swapfile && sudo chmod 600 /swapfile && "
        "sudo mkswap /swapfile && sudo swapon /swapfile"
    )
    if here.container == "kubernetes":
        return warning(
            "swap",
            "none, and a pod cannot add any: a process that runs out of memory is killed at once. It is "
            "a setting of the node (memorySwap of the kubelet)",
        )
    if here.container:
        return warning(
            "swap",
            "none, and a container cannot add any: a process that runs out of memory is killed at once. "
            "Swap is added on the host",
            f"{command}   # on the host",
        )
    return warning(
        "swap",
        "none: a process that runs out of memory is killed at once, where swap would make it slow",
        command,
    )


def memory_limit(here: Surroundings) -> Check:
    limit, usage = here.confined.memory_limit, here.confined.memory_usage
    if limit is None:
        return good("cgroup memory", "no limit below that of the machine")
    used = "" if usage is None else f", {in_words(usage)} used"
    words = f"limited to {in_words(limit)}{used} (page cache included)"
    command = {
        "docker": "docker run --memory=… --memory-swap=…",
        "kubernetes": "resources: {limits: {memory: …Gi}}",
        "slurm": "#SBATCH --mem=…G",
    }.get(here.machine.place, f"cat {here.confined.path}/memory.max")
    if usage is not None and usage > 0.9 * limit:
        return bad("cgroup memory", f"{words}: a worker may be killed at any moment", command)
    if usage is not None and usage > 0.7 * limit:
        return warning("cgroup memory", words, command)
    return good("cgroup memory", words)


def oom_group(here: Surroundings) -> Check:
    if here.confined.oom_group:
        return warning(
            "oom.group",
            "memory.oom.group=1: when this group runs out of memory, the kernel kills all its "
            "processes, the trainer too. No loader can survive that; stay well below the limit",
            "kubelet: singleProcessOOMKill: true   # Kubernetes 1.32 and later",
        )
    if here.confined.oom_group is None:
        return good("oom.group", "not set, as far as can be read: the kernel kills one process")
    return good(
        "oom.group", "off: the kernel kills one process, and holdfast makes it choose a worker"
    )


def shared_memory(here: Surroundings) -> Check:
    shm = here.machine.shm
    files = here.kernel.get("memory files", kernel.Feature("memory files")).way
    ours = "does" if "/dev/shm" in files else "does not"
    if shm is None:
        return warning("/dev/shm", "not there: torch's workers need it, holdfast's do not")
    words = f"{in_words(shm.free)} of {in_words(shm.total)} free"
    command = {
        "docker": "docker run --shm-size=8g …   # or --ipc=host",
        "kubernetes": "volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 8Gi}}]",
    }.get(here.machine.place, "sudo mount -o remount,size=8G /dev/shm")
    if shm.free < _GIB:
        return warning(
            "/dev/shm",
            f"{words}: torch's loader puts every batch there, and NCCL uses it; holdfast's loader "
            + ("uses it here too" if ours == "does" else "does not use it"),
            command,
        )
    return good("/dev/shm", f"{words}; torch's loader and NCCL use it, holdfast {ours}")


def files(here: Surroundings) -> Check:
    if here.machine.limits is None:
        return warning("open files", "the limit cannot be read (/proc/self/limits)")
    soft, hard = here.machine.limits.files
    words = f"{_limit(soft)} allowed, can be raised to {_limit(hard)}"
    if soft is None or soft >= 4096:
        return good("open files", words)
    more = f"ulimit -n {'1048576' if hard is None else hard}"
    if hard is not None and hard <= soft:
        words = f"{_limit(soft)} allowed, and no more without root"
        more = "/etc/security/limits.conf: * hard nofile 1048576"
    meaning = (
        f"{words}: torch's loader needs a descriptor for every tensor you keep (“Too many open "
        "files”); holdfast needs a constant number"
    )
    return (bad if soft < 256 else warning)("open files", meaning, more)


def processes(here: Surroundings) -> Check:
    allowed, used = here.confined.pids_max, here.confined.pids_current
    if allowed is not None and used is not None:
        words = f"{used} of {allowed} tasks of this control group in use (threads count)"
        if allowed - used < 100:
            return bad(
                "processes",
                f"{words}: workers and their threads may fail to start",
                _MORE_PROCESSES,
            )
        if allowed - used < 500:
            return warning("processes", words, _MORE_PROCESSES)
        return good("processes", words)
    soft = here.machine.limits.processes[0] if here.machine.limits else None
    words = f"{_limit(soft)} allowed for this user (threads count)"
    if soft is not None and soft < 1024:
        return warning(
            "processes", f"{words}: “can't start new thread” is likely", "ulimit -u 65536"
        )
    return good("processes", words)


_MORE_PROCESSES = (
    "docker run --pids-limit=-1 …   # or pids.max of the group, podPidsLimit of the kubelet"
)


def mappings(here: Surroundings) -> Check:
    count = here.machine.max_map_count
    if count is None:
        return good("mappings", "vm.max_map_count cannot be read; the usual 65530 is enough")
    if count < 65530:
        return warning(
            "mappings",
            f"vm.max_map_count is {count}: torch maps every tensor you keep; 65530 is usual",
            "sudo sysctl -w vm.max_map_count=262144",
        )
    return good("mappings", f"vm.max_map_count is {count}")


def overcommit(here: Surroundings) -> Check:
    mode = here.machine.overcommit
    if mode != 2:
        known = {0: "heuristic (0)", 1: "always (1)"}
        return good("overcommit", "cannot be read" if mode is None else known.get(mode, str(mode)))
    words = "strict (2): forking a large trainer needs as much memory again"
    if here.commit is not None:
        promised, limit = here.commit
        words += f"; {in_words(promised)} of {in_words(limit)} are committed"
    return warning("overcommit", words, "sudo sysctl -w vm.overcommit_memory=0")


def processors(here: Surroundings) -> Check:
    quota = here.confined.cpus
    if quota is not None and quota < here.cores:
        return warning(
            "processors",
            f"{here.cores} cores are visible, but the quota is {quota:g}: libraries start a thread "
            "for each core they see, and all are throttled together",
            f"export OMP_NUM_THREADS={max(1, int(quota))}   # and num_workers ≤ {max(1, int(quota))}",
        )
    asked = here.environment.get("SLURM_CPUS_PER_TASK", "")
    if asked.isdigit() and int(asked) < here.cores:
        return warning(
            "processors",
            f"Slurm allows {asked} per task, {here.cores} are visible",
            f"num_workers={asked}, OMP_NUM_THREADS=1",
        )
    return good(
        "processors", f"{here.cores}" + ("" if here.cores > 1 else ": one worker is enough")
    )


def kernel_messages(here: Surroundings) -> Check:
    if here.kernel_log:
        return good("kernel log", f"readable ({here.kernel_log}): a kill for memory can be proven")
    return warning(
        "kernel log",
        "not readable: a kill for memory shows only in counters (memory.events, vmstat)",
        "sudo sysctl kernel.dmesg_restrict=0",
    )


def container(here: Surroundings) -> Check:
    if here.container:
        return good(
            "container",
            f"{here.container}: the limits above are the container's; `free` shows the host's",
        )
    return good("container", "none recognised")


def scheduler(here: Surroundings) -> Check:
    job = here.environment.get("SLURM_JOB_ID")
    if job:
        return good(
            "scheduler",
            f"Slurm job {job}: Slurm itself kills jobs for memory; you can ask for a signal first",
            "#SBATCH --signal=B:USR1@120",
        )
    for name, variable in _SCHEDULERS:
        if variable in here.environment:
            return good("scheduler", f"{name} job {here.environment[variable]}")
    return good("scheduler", "none recognised")


_SCHEDULERS = (
    ("PBS", "PBS_JOBID"),
    ("LSF", "LSB_JOBID"),
    ("HTCondor", "_CONDOR_SCRATCH_DIR"),
    ("SGE", "JOB_ID"),
)


def _feature(name: str) -> Callable[[Surroundings], Check]:
    """The check of one kernel feature that our workers use."""

    def check(here: Surroundings) -> Check:
        found = here.kernel.get(name, kernel.Feature(name, "", "it was not tried"))
        if not found.way and name in kernel.NEEDED:
            words = f"{found.lost}. The workers are torch's own here, and are not replaced"
            return bad(name, words)
        if not found.lost:
            return good(name, found.way)
        way = f"{found.way}: " if found.way else "none: "
        return warning(name, f"{way}{found.lost}", _SANDBOX if here.container else "")

    return check


_SANDBOX = "docker run --security-opt seccomp=unconfined …   # if the container forbids it"


def _limit(count: int | None) -> str:
    return "any number" if count is None else str(count)


CHECKS: tuple[Callable[[Surroundings], Check], ...] = (
    memory,
    swap,
    memory_limit,
    oom_group,
    shared_memory,
    files,
    processes,
    mappings,
    overcommit,
    processors,
    software_checks.start_method,
    software_checks.threads,
    software_checks.versions,
    software_checks.private_parts,
    software_checks.sharing,
    kernel_messages,
    software_checks.openmp,
    software_checks.opencv,
    container,
    scheduler,
    *map(_feature, kernel.FEATURES),
)
