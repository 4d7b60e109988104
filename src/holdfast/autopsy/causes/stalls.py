"""A worker or the run makes no progress."""

from __future__ import annotations

from holdfast.autopsy.cause import Cause, hint, proof, report, sign, todo

__all__ = ["CAUSES"]

_STACK = (
    todo(
        "Look at the whole stack it left",
        "holdfast incidents --stacks {logbook}",
        given="holdfast with logbook=",
    ),
    todo(
        "Look at the whole stack it left; logbook= would keep it after the run too",
        "print(loader.incidents[-1].stack)",
        given="holdfast without logbook=",
    ),
)
_SEE_IT = todo("When it hangs again, look before it is replaced", "py-spy dump --native --pid PID")

CAUSES = (
    Cause(
        slug="silent-stall",
        title="waits for something that does not come",
        meaning=(
            "The worker is alive and waits: for a lock, a pipe, a socket, a sleep. By default torch waits "
            "for it for ever; with `timeout` it only says that it timed out."
        ),
        evidence="No CPU time, state S; the stack and the kernel function it sleeps in say for what it waits.",
        signs=(
            sign(r"DataLoader timed out after [\d.]+ seconds"),
            hint(
                r"_try_get_data[\s\S]{0,1500}(selectors\.py|connection\.py)[\s\S]{0,800}KeyboardInterrupt"
            ),
        ),
        see=("fork-lock-deadlock", "storage-stall", "endless-loop", "stopped"),
        remedies=(
            *_STACK,
            todo("Give network reads their own timeout", "requests.get(url, timeout=30)"),
            todo("Have it replaced sooner", "DataLoader(..., stall_timeout={stall_sooner})"),
            _SEE_IT,
        ),
        already="Its stack is saved, it is killed and replaced, and the batch made again.",
    ),
    Cause(
        slug="fork-lock-deadlock",
        title="waits for a lock whose holder was not copied by the fork",
        meaning=(
            "fork() copies locks in the state they are in, but not the threads that hold them. OpenCV, "
            "OpenMP, logging or an allocator in the worker then waits for ever for a thread that does not "
            "exist."
        ),
        evidence=(
            "State S in a futex, no CPU time, forked from a process with threads; its stack is in a library "
            "that keeps locks, or in a file that a thread of the trainer was in at the fork."
        ),
        signs=(sign(r"is multi-threaded, use of fork\(\) may lead to deadlocks in the child"),),
        explains=("silent-stall",),
        see=("silent-stall", "openmp-after-use", "async-storage-after-fork"),
        remedies=(
            todo(
                "Start workers from a clean process",
                "DataLoader(..., multiprocessing_context='forkserver')",
            ),
            todo(
                "Or fork them before your threads begin", "batches = iter(loader)   # then threads"
            ),
            todo("If it is OpenCV, keep it to one thread from the start", "cv2.setNumThreads(0)"),
            todo("If it is a numeric library", "export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1"),
            _SEE_IT,
        ),
        already=(
            "Workers and their replacements are copies of the trainer as it was when the loader began, so "
            "locks taken later do no harm. A lock that was held at that moment stays held in all of them: "
            "after the second stall of that kind, workers are forked again from the trainer, where the lock "
            "is probably free by then. If it never is, the run ends with this error instead of hanging."
        ),
    ),
    Cause(
        slug="storage-stall",
        title="is stuck in the kernel, waiting for storage",
        meaning=(
            "A read on a network or cloud file system does not return, and the process cannot even be "
            "killed until it does. The data or the server is the problem, not the sample's code."
        ),
        evidence="State D, or asleep in an nfs, fuse, ceph or block-device function; I/O pressure.",
        signs=(
            report(r"INFO: task \S+:\d+ blocked for more than \d+ seconds", "medium"),
            sign(r"nfs: server \S+ not responding"),
            sign(
                r"(?i)(ceph|lustre|gpfs|beegfs|fuse)\S*:? [^\n]{0,80}(timed? ?out|not responding|hung)"
            ),
            sign(
                r"OSError: \[Errno (5|116|121|110)\] (Input/output error|Stale file handle|Remote I/O error|Connection timed out)"
            ),
        ),
        explains=("silent-stall", "bad-sample"),
        see=("silent-stall", "sigbus-not-shm"),
        remedies=(
            todo("See whether the mount answers at all", "timeout 10 stat -f PATH_OF_THE_DATA"),
            todo(
                "Look for the kernel's own complaints",
                "sudo dmesg -T | grep -iE 'nfs|not responding|blocked for more'",
            ),
            todo("Copy the data to the node's local disk first", "rsync -a DATA/ $TMPDIR/data/"),
            todo(
                "Let reads fail instead of waiting for ever",
                "mount -o remount,soft,timeo=100 MOUNTPOINT",
            ),
        ),
        already="It does not wait: the worker is abandoned and replaced, and reaped when the kernel lets it die.",
    ),
    Cause(
        slug="endless-loop",
        title="keeps computing one sample and does not finish it",
        meaning=(
            "The worker uses CPU time but does not finish the sample: an endless loop, or a sample far larger "
            "than the others. It is not waiting for anything."
        ),
        evidence="State R, CPU time rising; the stack shows the loop.",
        signs=(),
        see=("silent-stall", "bad-sample"),
        remedies=(
            *_STACK,
            todo("Look for the loop in the stack, and look at this sample's size"),
            todo(
                "If the sample is just large, allow it more time",
                "DataLoader(..., stall_timeout={stall_later})",
            ),
            _SEE_IT,
        ),
        already="Its stack is saved and it is replaced; the second attempt gets twice the time.",
    ),
    Cause(
        slug="stopped",
        title="was stopped or frozen, not hung",
        meaning=(
            "The process was suspended: by SIGSTOP, by a debugger, or by freezing its control group. It can "
            "do nothing until it is continued, not even handle a signal."
        ),
        evidence="State T or t, or asleep in the kernel's freezer.",
        signs=(hint(r"\[\d+\]\+\s+Stopped\s+.*python"),),
        see=("silent-stall", "storage-stall"),
        remedies=(
            todo(
                "Find out what suspends it: a debugger, a paused container, a batch system that suspends jobs"
            ),
            todo("Continue a container that was paused", "docker unpause CONTAINER", "docker"),
            todo(
                "See whether the job was suspended",
                "scontrol show job $SLURM_JOB_ID | grep -i suspend",
                "slurm",
            ),
        ),
        already="It is killed and replaced; a frozen worker that cannot be killed is abandoned.",
    ),
    Cause(
        slug="async-storage-after-fork",
        title="waits for an event loop that did not survive the fork",
        meaning=(
            "s3fs, gcsfs and zarr run their requests in a thread of the process that used them first. A "
            "forked worker inherits the loop without its thread, and its first read waits for ever."
        ),
        evidence="A futex wait under `fsspec/asyn.py`; fsspec was used before the fork.",
        signs=(
            sign(r"fsspec/asyn\.py\", line \d+,? in sync"),
            sign(r"This class is not fork-safe"),
        ),
        explains=("silent-stall", "fork-lock-deadlock"),
        see=("fork-lock-deadlock",),
        remedies=(
            todo("Do not touch the remote file system before the workers start"),
            todo(
                "Or reset the loop in each worker",
                "worker_init_fn=lambda _: fsspec.asyn.reset_lock()",
            ),
            todo(
                "Start workers from a clean process",
                "DataLoader(..., multiprocessing_context='forkserver')",
            ),
        ),
        already="A stalled worker's stack is saved and it is replaced; the replacement inherits the same loop.",
    ),
    Cause(
        slug="tokenizers-fork",
        title="switches off the tokenizer's threads, with a warning",
        meaning=(
            "The tokenizers library had used its thread pool before the fork and turns parallelism off in "
            "the child to avoid a deadlock. It is only a warning; results are correct."
        ),
        evidence="The warning, once per worker.",
        signs=(
            proof(r"The current process just got forked, after parallelism has already been used"),
        ),
        remedies=(todo("Choose it yourself", "export TOKENIZERS_PARALLELISM=false"),),
        already="Nothing is needed.",
    ),
    Cause(
        slug="head-of-line",
        title="is slow with one batch, and all others wait behind it",
        meaning=(
            "Batches are delivered in order, so one slow sample holds back finished ones. Workers and GPU "
            "idle although nothing is wrong."
        ),
        evidence="Finished batches wait while one is outstanding.",
        signs=(hint(r"(?i)in_order=False[^.\n]{0,80}(straggler|slow sample)"),),
        see=("silent-stall",),
        remedies=(
            todo("Prefetch more batches", "DataLoader(..., prefetch_factor=4)"),
            todo("If order does not matter", "DataLoader(..., in_order=False)"),
            todo("Make the slow samples cheaper: resize or re-encode them once"),
        ),
        already="`loader.stats()` counts the waits.",
    ),
    Cause(
        slug="oversubscription",
        title="competes with more workers than there are processors",
        meaning=(
            "More workers or threads run than the job may use processors, because of an affinity mask, a CPU "
            "quota or a Slurm allocation. They then slow each other down."
        ),
        evidence="`cpu.max` or affinity below num_workers; `nr_throttled` in `cpu.stat` rises.",
        signs=(
            proof(
                r"This DataLoader will create \d+ worker processes in total\. Our suggested max number"
            ),
        ),
        see=("task-limit", "affinity-loss"),
        remedies=(
            todo(
                "Use as many as there are processors (here {cpus})",
                "DataLoader(..., num_workers={cpus})",
            ),
            todo("Ask for more", "#SBATCH --cpus-per-task=8", "slurm"),
            todo("Ask for more", "resources: {{requests: {{cpu: 8}}}}", "kubernetes"),
            todo("One thread per library", "export OMP_NUM_THREADS=1"),
        ),
        already="torch uses one thread in each worker.",
    ),
    Cause(
        slug="affinity-loss",
        title="may run on one processor only, like all its siblings",
        meaning=(
            "An OpenMP runtime had bound the trainer's main thread to one core, and forked workers inherit "
            "that. All of them then share one core."
        ),
        evidence="`Cpus_allowed_list` in a worker's `/proc/PID/status` is far shorter than the job's.",
        signs=(hint(r"(?i)(KMP_AFFINITY|GOMP_CPU_AFFINITY|OMP_PROC_BIND)[^\n]{0,80}worker"),),
        see=("oversubscription",),
        remedies=(
            todo("Do not bind", "unset KMP_AFFINITY GOMP_CPU_AFFINITY; export OMP_PROC_BIND=false"),
            todo(
                "Or undo it in the worker",
                "worker_init_fn=lambda _: os.sched_setaffinity(0, range(os.cpu_count()))",
            ),
        ),
        already="Nothing yet.",
    ),
    Cause(
        slug="openmp-after-use",
        title="waits for OpenMP threads that did not survive the fork",
        meaning=(
            "GNU OpenMP keeps a pool of threads, and fork copies the pool's state without the threads. "
            "The first parallel operation in the worker waits for them for ever."
        ),
        evidence="A frame in GOMP_parallel or a parallel torch call; futex wait; no CPU time.",
        signs=(
            sign(r"OMP: Warning #190: Forking a process while a parallel region is active"),
            sign(r"\bGOMP_parallel\b"),
            hint(r"\blibgomp\b.*fork"),
        ),
        see=("fork-lock-deadlock", "silent-stall"),
        remedies=(
            todo("Use one thread in the trainer before workers start", "torch.set_num_threads(1)"),
            todo("Use one thread in libraries too", "export OMP_NUM_THREADS=1"),
            todo(
                "Start workers from a clean process",
                "DataLoader(..., multiprocessing_context='forkserver')",
            ),
        ),
        already="Workers use one thread; a stalled worker's stack is saved and it is replaced.",
    ),
)
