"""Memory runs out, or grows."""

from __future__ import annotations

from holdfast.autopsy.cause import Cause, hint, proof, report, sign, todo

__all__ = ["CAUSES"]

_LESS_IN_FLIGHT = todo(
    "Keep less in flight. The memory needed is about workers × prefetch_factor × bytes of a batch, plus "
    "what each worker itself needs",
    "DataLoader(..., num_workers={fewer_workers}, prefetch_factor=1)",
)
_MORE_DOCKER = todo(
    "Give the container more memory (now {memory_limit})",
    "docker run --memory={memory_wanted}g --memory-swap={memory_wanted}g ...",
    "docker",
)
_MORE_KUBERNETES = todo(
    "Raise the pod's memory limit (now {memory_limit}); a Memory emptyDir on /dev/shm counts too",
    "resources: {{limits: {{memory: {memory_wanted}Gi}}}}",
    "kubernetes",
)
_MORE_SLURM = todo(
    "Ask Slurm for more memory (now {memory_limit}); --mem-per-cpu is multiplied by --cpus-per-task",
    "#SBATCH --mem={memory_wanted}G",
    "slurm",
)

CAUSES = (
    Cause(
        slug="oom-killed",
        title="was killed by the kernel for lack of memory",
        meaning=(
            "The machine, or the control group the run is confined to, had no memory left, and the "
            "kernel chose this process to get some back. The victim need not be the culprit: all "
            "processes of the group share one limit, and what lies in /dev/shm or in tmpfs counts."
        ),
        evidence=(
            "SIGKILL that holdfast did not send, and `oom_kill` went up in the worker's control group "
            "or one above it (`memory.events`, in v1 `memory.oom_control`) or in `/proc/vmstat`; or "
            "the kernel log names the pid. Without one of these, no death is called that."
        ),
        signs=(
            report(r"Memory cgroup out of memory: Kill(ed)? process"),
            report(r"Out of memory(: |\. |: Kill process |: Killed process )Kill(ed)? process"),
            report(r"oom-kill:constraint=CONSTRAINT_"),
            report(r"invoked oom-killer: gfp_mask"),
            report(r"oom_reaper: reaped process"),
            proof(r"slurmstepd: error: Detected \d+ oom[-_]kill event"),
            sign(r"srun: error: \S+ tasks? [\d,-]+: Out Of Memory"),
            sign(r"JOB \d+ ON \S+ CANCELLED AT .* DUE TO (memory|MEMORY)"),
            sign(r"slurmstepd: error: (Job|Step)\S* \S*\s*exceeded memory limit"),
        ),
        explains=("killed-unexplained", "killed-from-outside", "exited-unexpectedly"),
        see=("killed-from-outside", "cow-growth", "prefetch-bytes", "group-oom"),
        remedies=(
            _LESS_IN_FLIGHT,
            todo(
                "See which process grows: if memory rises through the epoch, it is cow-growth or a leak, not size",
                "holdfast explain cow-growth",
            ),
            _MORE_DOCKER,
            _MORE_KUBERNETES,
            _MORE_SLURM,
            todo(
                "Add swap: a shortage then makes the run slow for a while, but kills no process (now {swap_total} of swap, and "
                "{memory_available} of {memory_total} memory available)",
                "fallocate -l 16G /swapfile && chmod 600 /swapfile && mkswap /swapfile && "
                "swapon /swapfile",
            ),
        ),
        already=(
            "The worker is replaced and its batch made again. Workers raise their own "
            "oom_score_adj, so that the kernel takes one of them and not the trainer."
        ),
    ),
    Cause(
        slug="group-oom",
        title="and everything else in its container was killed at once for lack of memory",
        meaning=(
            "The control group has `memory.oom.group` set, as Kubernetes does since 1.28 on cgroup v2: "
            "one shortage kills every process in it, a supervisor too. Only staying below the limit "
            "helps."
        ),
        evidence="`memory.oom.group` is 1; the container's last state is `OOMKilled`, exit code 137.",
        signs=(
            proof(r"Tasks in \S+ are going to be killed due to memory\.oom\.group set"),
            proof(r"(?i)reason:\s*\"?OOMKilled\b"),
            sign(r"\bOOMKilled\b"),
            sign(r'"OOMKilled":\s*true'),
        ),
        explains=("oom-killed", "killed-unexplained"),
        see=("oom-killed",),
        remedies=(
            _LESS_IN_FLIGHT,
            _MORE_KUBERNETES,
            _MORE_DOCKER,
            todo(
                "Let the kubelet kill single processes (Kubernetes 1.32 or later), so that a worker "
                "can be replaced",
                "singleProcessOOMKill: true   # in the kubelet's configuration",
                "kubernetes",
            ),
        ),
        already=(
            "It reads the flag when a worker dies, and reports it. Nothing can be replaced once the "
            "whole container is gone; the logbook shows the minutes before."
        ),
    ),
    Cause(
        slug="allocation-failed",
        title="could not get the memory it asked for",
        meaning=(
            "An allocation was refused, so the sample failed with an error and the worker was not killed. "
            "The usual reasons are a limit of the process (ulimit -v, ulimit -d), strict overcommit, or an "
            "absurd size read from a damaged file."
        ),
        evidence="MemoryError, `std::bad_alloc` or torch's DefaultCPUAllocator in the worker's error.",
        signs=(
            proof(r"DefaultCPUAllocator: (can't|not enough memory|cannot) ?(allocate)?"),
            proof(r"numpy\.?\S*_ArrayMemoryError: Unable to allocate"),
            sign(r"terminate called after throwing an instance of 'std::bad_alloc'"),
            sign(r"Caught MemoryError in DataLoader worker process"),
            sign(r"^MemoryError\b"),
            hint(r"\bstd::bad_alloc\b"),
        ),
        explains=("abort", "bad-sample", "python-exception"),
        see=("oom-killed", "bad-sample"),
        remedies=(
            todo(
                "Look at the size it asked for: if it is absurd, the file is damaged or a shape is "
                "wrong, and more memory will not help"
            ),
            todo(
                "See which limits apply", "ulimit -v; ulimit -d; cat /proc/sys/vm/overcommit_memory"
            ),
            todo("Lift the limit for this shell", "ulimit -v unlimited; ulimit -d unlimited"),
            _LESS_IN_FLIGHT,
        ),
        already="The error names the sample, the other batches arrive, and the worker goes on.",
    ),
    Cause(
        slug="cow-growth",
        title="keeps growing because it copies the dataset it was forked with",
        meaning=(
            "Forked workers share the trainer's memory until they write to it, and even reading a Python "
            "object writes to its reference count. So a dataset of lists, dicts or strings is copied page "
            "by page into every worker: no leak, but memory grows by the dataset's size per worker."
        ),
        evidence=(
            "`Private_Dirty` in `/proc/PID/smaps_rollup` rises with the number of samples read while "
            "RSS hardly moves; flat with spawn, and flat for packed arrays."
        ),
        signs=(
            hint(r"(?i)copy-on-write (growth|duplication) of the dataset"),
            hint(
                r"(?i)(worker|RAM|CPU memory)[^.\n]{0,60}(grows|increases|creeps)[^.\n]{0,40}epoch"
            ),
        ),
        see=("oom-killed", "decoder-leak", "allocator-fragmentation"),
        remedies=(
            todo(
                "Let holdfast keep large lists and dicts once, in memory that all workers share; it "
                "works with torch's loader too and says what it could not move",
                "holdfast.pack(dataset)   # or: self.samples = holdfast.PackedList(samples)",
            ),
            todo(
                "Or keep the dataset's contents in arrays (numpy, torch, Arrow) or in one bytes object with "
                "offsets, not in millions of Python objects",
                "self.paths = numpy.array(paths, dtype='S')   # not a list of str",
            ),
            todo(
                "Start workers without fork; each then has one copy from the start and does not grow",
                "DataLoader(..., multiprocessing_context='forkserver')",
            ),
            todo(
                "Use fewer workers, since each has its copy",
                "DataLoader(..., num_workers={fewer_workers})",
            ),
        ),
        already=(
            "Workers freeze the garbage collector's lists, so that garbage collections copy nothing. The "
            "loader logs once if a dataset is large enough for pack() to matter."
        ),
    ),
    Cause(
        slug="prefetch-bytes",
        title="and its siblings keep more batches in flight than there is memory for",
        meaning=(
            "Each loader keeps num_workers × prefetch_factor batches in flight, and a validation loader "
            "that stays open adds its own. With large batches that is many gigabytes, and no message "
            "mentions them."
        ),
        evidence="Bytes of a batch × workers × prefetch_factor × loaders is near the limit.",
        signs=(hint(r"(?i)prefetch[^.\n]{0,80}(out of memory|OOM|memory limit)"),),
        see=("oom-killed", "pool-accumulation"),
        remedies=(
            todo(
                "Prefetch less: with large batches that costs little speed",
                "DataLoader(..., prefetch_factor=1)",
            ),
            todo("Close the loader that is not in use", "val_loader.close()"),
            todo("Fewer workers", "DataLoader(..., num_workers={fewer_workers})"),
        ),
        already="Each batch exists once, in memory that is reused; `loader.stats()['held_bytes']` is what you keep.",
    ),
    Cause(
        slug="allocator-fragmentation",
        title="does not give back the memory it has freed",
        meaning=(
            "glibc keeps freed memory in its arenas, one per thread, and large blocks of changing size "
            "leave holes. The process seems to leak in steps, although every object is freed."
        ),
        evidence="Resident memory falls after `malloc_trim(0)`.",
        signs=(hint(r"\bmalloc_trim\b.{0,60}(returned|freed|released)"),),
        see=("cow-growth", "decoder-leak"),
        remedies=(
            todo("Two arenas are enough for a worker", "export MALLOC_ARENA_MAX=2"),
            todo("Return large blocks at once", "export MALLOC_TRIM_THRESHOLD_=65536"),
            todo("Use another allocator", "LD_PRELOAD=libjemalloc.so.2 python train.py"),
        ),
        already="Batches are not on the heap: they are made in shared memory that is reused.",
    ),
    Cause(
        slug="decoder-leak",
        title="loses memory in a native library with every sample",
        meaning=(
            "Some video and audio readers do not free everything when a file is closed. The worker "
            "grows steadily, whatever Python frees, until something kills it."
        ),
        evidence="Private memory grows in proportion to samples decoded, also with spawn.",
        signs=(hint(r"(?i)(decord|pyav|VideoReader|AVReader|av\.open)[^.\n]{0,60}memory leak"),),
        see=("cow-growth", "allocator-fragmentation", "oom-killed"),
        remedies=(
            todo(
                "Close what you open, also when it raises", "with av.open(path) as container: ..."
            ),
            todo(
                "Let workers end with the epoch, which frees all their memory",
                "DataLoader(..., persistent_workers=False)",
            ),
            todo("Try another release of the decoder, or another library"),
        ),
        already="A worker that is killed because of such growth is replaced, and its batch is made again.",
    ),
    Cause(
        slug="gc-effects",
        title="inherited a garbage collector that is switched off, or collects too much",
        meaning=(
            "With gc.disable() in the trainer, forked workers never free reference cycles, and large "
            "samples in such cycles pile up. The opposite, a full collection for every sample, takes far "
            "longer than loading it and copies shared pages."
        ),
        evidence="`gc.isenabled()` is False in a worker; memory falls after one `gc.collect()`.",
        signs=(hint(r"gc\.(disable|collect)\(\)[^\n]{0,80}(worker|__getitem__|DataLoader)"),),
        see=("cow-growth", "oom-killed"),
        remedies=(
            todo("Switch it on where samples are made", "worker_init_fn=lambda _: gc.enable()"),
            todo("In __getitem__ the youngest generation is enough", "gc.collect(0)"),
        ),
        already="Workers freeze the objects they were forked with; collections look at new objects only.",
    ),
    Cause(
        slug="fork-enomem",
        title="could not be started: there was not enough memory to fork so large a process",
        meaning=(
            "fork() reserves as much memory as the parent has, and under strict overcommit or in a full "
            "control group that is refused. It often happens when the validation loader starts, because "
            "the trainer has grown by then."
        ),
        evidence="Errno 12 from fork; `CommitLimit` against `Committed_AS` in `/proc/meminfo`.",
        signs=(
            proof(r"os\.fork\(\)\s+OSError: \[Errno 12\] Cannot allocate memory"),
            proof(r"fork: (retry: )?Cannot allocate memory"),
            sign(r"popen_fork\.py[\s\S]{0,300}\[Errno 12\] Cannot allocate memory"),
        ),
        explains=("max-map-count",),
        see=("oom-killed", "task-limit"),
        remedies=(
            todo(
                "Do not fork workers from the large process",
                "DataLoader(..., multiprocessing_context='forkserver')",
            ),
            todo(
                "Allow overcommit (now vm.overcommit_memory={overcommit})",
                "sysctl vm.overcommit_memory=1",
            ),
            todo("Make the loaders before the model grows, and keep them"),
            _MORE_DOCKER,
            _MORE_KUBERNETES,
            _MORE_SLURM,
        ),
        already=(
            "The trainer is forked once per loader, early; all workers and replacements are forked from "
            "that small copy."
        ),
    ),
    Cause(
        slug="windows-commit",
        title="could not load torch: the page file of Windows is too small",
        meaning=(
            "Every spawned worker loads torch's libraries, and Windows reserves room for their data "
            "in the page file whether it is used or not. With CUDA builds that is gigabytes per worker."
        ),
        evidence="WinError 1455 while torch is imported in the child.",
        signs=(
            proof(r"\[WinError 1455\]"),
            sign(r"The paging file is too small for this operation to complete"),
        ),
        explains=("spawn-bootstrap", "exited-unexpectedly", "worker-import-error"),
        remedies=(
            todo("Fewer workers", "DataLoader(..., num_workers=2, persistent_workers=True)"),
            todo("Make the page file larger: System, Advanced, Performance, Virtual memory"),
            todo("Or run it under WSL 2, where this does not exist"),
        ),
        already="Nothing: holdfast's engine runs on Linux.",
    ),
    Cause(
        slug="max-map-count",
        title="has more memory mappings than the kernel allows one process",
        meaning=(
            "torch maps every shared tensor separately, and the kernel allows one process about 65,000 "
            "mappings. A program that keeps tens of thousands of tensors from workers gets 'cannot allocate "
            "memory' with plenty of memory free."
        ),
        evidence="`wc -l /proc/PID/maps` is near `vm.max_map_count`; memory is free.",
        signs=(
            sign(r"unable to mmap \d+ bytes from file <[^>]*>: Cannot allocate memory \(12\)"),
            hint(r"unable to mmap .*Cannot allocate memory"),
        ),
        see=("fd-exhaustion", "allocation-failed"),
        remedies=(
            todo(
                "Copy what you keep; the copy is ordinary memory",
                "kept.append(target.clone())",
                given="torch's loader",
            ),
            todo(
                "Raise the limit (now {max_map_count})",
                "sysctl vm.max_map_count=1048576",
            ),
        ),
        already="One mapping per worker, however many batches you keep.",
    ),
)
