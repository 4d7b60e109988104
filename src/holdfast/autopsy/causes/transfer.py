"""Batches on their way from a worker to the trainer: shared memory, descriptors, queues, threads."""

from __future__ import annotations

from holdfast.autopsy.cause import Cause, hint, proof, sign, todo

__all__ = ["CAUSES"]

CAUSES = (
    Cause(
        slug="shm-exhausted",
        title="found no room in /dev/shm",
        meaning=(
            "torch sends tensors through files in /dev/shm, and by default a container has 64 MB of it. The "
            "file can be created although there is no room; the first write to it is then a bus error."
        ),
        evidence=(
            "SIGBUS, or error 28, with `/dev/shm` nearly full. What a dead worker had there is free again, "
            "so a small `/dev/shm` counts too."
        ),
        signs=(
            proof(
                r"unable to (write to|allocate shared memory\(shm\) for) file </torch_\S+>: No space left on device \(28\)"
            ),
            proof(r"unable to resize file </torch_\S+> to the right size: No space left"),
            sign(r"This might be caused by insufficient shared memory \(shm\)"),
            sign(r"dataloader's workers are out of shared memory"),
            sign(r"is killed by signal: Bus error"),
            sign(r"unable to write to file </torch_"),
            sign(r"(?i)OSError: \[Errno 28\] No space left on device.*(/dev/shm|psm_|torch_)"),
            sign(r"/dev/shm[^\n]{0,80}No space left on device"),
            hint(r"Fatal Python error: Bus error"),
        ),
        explains=(
            "exited-unexpectedly",
            "silent-stall",
            "sigbus-not-shm",
            "lost-batch-unpicklable-result",
        ),
        see=("sigbus-not-shm", "file-system-strategy"),
        remedies=(
            todo("See how much there is (now {shm_total}, {shm_free} free)", "df -h /dev/shm"),
            todo("Remove what dead runs have left", "ls -l /dev/shm; rm -f /dev/shm/torch_*"),
            todo(
                "Start a container with more; a running one cannot be changed",
                "docker run --shm-size={shm_wanted}g ...   # or --ipc=host",
                "docker",
            ),
            todo(
                "Mount memory on /dev/shm; it counts against the pod's limit",
                "volumes: [{{name: shm, emptyDir: {{medium: Memory, sizeLimit: {shm_wanted}Gi}}}}]   "
                "# with volumeMounts: [{{name: shm, mountPath: /dev/shm}}]",
                "kubernetes",
            ),
            todo("On your own machine", "mount -o remount,size={shm_wanted}g /dev/shm"),
            todo(
                "Or use a loader that does not need it",
                "from holdfast import DataLoader",
                given="torch's loader",
            ),
        ),
        already=(
            "Batches do not go through /dev/shm: 64 MB are enough for batches of any size. If it is full "
            "all the same, the dataset or another program fills it."
        ),
    ),
    Cause(
        slug="sigbus-not-shm",
        title="read a part of a memory-mapped file that is not there any more",
        meaning=(
            "A memory-mapped file (numpy.memmap, LMDB, Arrow, safetensors) became shorter, or the disk "
            "or network below it failed, and reading the missing part is a bus error. torch's message "
            "blames shared memory, but there is room in it."
        ),
        evidence="SIGBUS with room in `/dev/shm`; a frame in memmap, LMDB, mmap; EIO in the kernel log.",
        signs=(
            sign(r"mdb_\w+: MDB_(CORRUPTED|PAGE_NOTFOUND|INVALID)"),
            sign(r"lmdb\.CorruptedError"),
            hint(r"Bus error[\s\S]{0,4000}(memmap|lmdb|mmap_mode|pyarrow)"),
        ),
        explains=("shm-exhausted", "exited-unexpectedly"),
        see=("shm-exhausted", "storage-stall"),
        remedies=(
            todo(
                "See whether something rewrites or truncates the file while it is read",
                "ls -l --time-style=full-iso FILE; fuser -v FILE",
            ),
            todo(
                "Look for errors of the disk or the mount",
                "sudo dmesg -T | grep -iE 'I/O error|nfs|EXT4-fs error|blk_update'",
            ),
            todo(
                "Copy the data to a local disk and read it from there",
                "cp FILE /tmp/ && python train.py --data /tmp/FILE",
            ),
            todo("Check the database", "mdb_stat -e PATH"),
        ),
        already="It checks /dev/shm before it blames it; the worker is replaced and the sample is named.",
    ),
    Cause(
        slug="fd-exhaustion",
        title="ran out of file descriptors",
        meaning=(
            "The number of open files, sockets and pipes of a process is limited, and with torch's loader "
            "every tensor you keep is one more. When no descriptor is free, the kernel drops it from the "
            "message without an error, hence 'received 0 items of ancdata'."
        ),
        evidence="Open descriptors in `/proc/PID/fd` near `ulimit -n`; errno 24.",
        signs=(
            proof(r"received 0 items of ancdata"),
            proof(r"Too many open files\. Communication with the\s+workers is no longer possible"),
            proof(r"\[Errno 24\] Too many open files"),
            sign(
                r"unable to open shared memory object </torch_\S+> in read-write mode: Too many open files"
            ),
            hint(r"unable to open shared memory object </torch_"),
            sign(r"Too many open files \(24\)"),
            sign(r"\bEMFILE\b"),
        ),
        explains=(
            "lost-batch-unpicklable-result",
            "bad-sample",
            "python-exception",
            "silent-stall",
            "file-system-strategy",
            "exited-unexpectedly",
            "pin-thread",
        ),
        see=("file-system-strategy", "max-map-count"),
        remedies=(
            todo(
                "Raise the soft limit (now {nofile_soft}); beyond the hard one ({nofile_hard}) only root can",
                "ulimit -n {nofile_wanted}",
            ),
            todo("Close files in the dataset", "with open(path, 'rb') as file: ..."),
            todo(
                "Copy what you keep from batches: each of their tensors holds a descriptor",
                "kept.append(target.clone())",
                given="torch's loader",
            ),
            todo(
                "Use fewer workers: each needs three descriptors in the trainer; batches need none",
                "DataLoader(..., num_workers={fewer_workers})",
                given="holdfast",
            ),
            todo(
                "Raise it for the container", "docker run --ulimit nofile=65536:65536 ...", "docker"
            ),
            todo(
                "See what is open in the trainer, or by its pid in a worker",
                "ls -l /proc/{trainer}/fd | awk '{{print $NF}}' | sort | uniq -c | sort -n | tail",
            ),
        ),
        already="Three descriptors per worker, however many batches you keep.",
    ),
    Cause(
        slug="file-system-strategy",
        title="lost a named file of the 'file_system' sharing strategy",
        meaning=(
            "This strategy, the usual cure for too many descriptors, gives every tensor a name in /dev/shm. "
            "The first process that is done removes the name, and other processes fail to open it; after a "
            "kill names stay for ever, and /dev/shm fills up over days."
        ),
        evidence="`torch_*` names in /dev/shm whose pid does not exist; set_sharing_strategy in the code.",
        signs=(
            proof(r"could not unlink the shared memory file /?torch_"),
            sign(
                r"unable to open shared memory object </torch_\S+> in read-write mode: No such file or directory"
            ),
            sign(r"torch_shm_manager[^\n]{0,80}(error|failed|could not)"),
            sign(r"error executing torch_shm_manager"),
        ),
        explains=("abort", "fd-exhaustion", "exited-unexpectedly"),
        see=("fd-exhaustion", "shm-exhausted"),
        remedies=(
            todo(
                "Go back to descriptors and raise their number",
                "torch.multiprocessing.set_sharing_strategy('file_descriptor')   # and: ulimit -n {nofile_hard}",
            ),
            todo("Remove what is left", "rm -f /dev/shm/torch_*"),
        ),
        already="Its memory has no names, so none can be lost or left behind.",
    ),
    Cause(
        slug="lost-batch-unpicklable-result",
        title="made a batch that could not be sent, and the trainer waits for it",
        meaning=(
            "torch pickles results in a background thread, and when that fails it prints a traceback "
            "and drops the batch. The worker goes on, the trainer waits for a batch that never comes."
        ),
        evidence="A traceback through `_feed` of multiprocessing/queues.py, and no progress after it.",
        signs=(
            proof(
                r"multiprocessing/queues\.py\", line \d+, in _feed[\s\S]{0,4000}?"
                r"(PicklingError|an't pickle|annot pickle)"
            ),
            sign(r"Exception in thread QueueFeederThread"),
            sign(r"multiprocessing/queues\.py\", line \d+, in _feed"),
        ),
        explains=("unpicklable-args", "silent-stall"),
        see=("unpicklable-args", "silent-stall"),
        remedies=(
            todo(
                "Return tensors, arrays, numbers and strings; leave out open files, locks, lambdas, modules"
            ),
            todo(
                "See which part cannot be pickled",
                "python -c 'import pickle, mydata; pickle.dumps(mydata.dataset[0])'",
            ),
        ),
        already="Results are pickled before they count as made; a failure is an error at that batch.",
    ),
    Cause(
        slug="queue-poisoned-by-death",
        title="died while it held the lock of the common queue, and all others wait for it",
        meaning=(
            "torch's workers share one result queue with one lock. A worker that is killed while it holds "
            "the lock, or in the middle of a message, blocks all others, and no timeout applies to that "
            "read."
        ),
        evidence="One worker dead, the others in `sem_wait` under `_feed`, the trainer in `_recv`.",
        signs=(
            hint(r"in _recv_bytes[\s\S]{0,600}in _recv\b[\s\S]{0,600}KeyboardInterrupt"),
            sign(
                r"_pickle\.UnpicklingError: (pickle data was truncated|invalid load key)[\s\S]{0,3000}dataloader"
            ),
        ),
        see=("silent-stall", "pin-thread"),
        remedies=(
            todo(
                "Find out why that worker died; the rest follows from it",
                "sudo dmesg -T | tail -50",
            ),
            todo("End the run and start it again; this queue cannot be repaired"),
        ),
        already="One channel per worker and no locks between them: a death affects no other worker.",
    ),
    Cause(
        slug="pin-thread",
        title="was cut off: the thread of the trainer that pins memory ended",
        meaning=(
            "With pin_memory=True a thread of the trainer copies batches to pinned memory, and it ends "
            "when what it reads is damaged or the GPU reports an error. The reason is usually in the "
            "worker or in CUDA, not in the thread."
        ),
        evidence="The words 'pin memory thread'; a CUDA error near them points to the GPU.",
        signs=(
            proof(r"Pin memory thread exited unexpectedly"),
            proof(r"Caught \w+ in pin memory thread for device"),
            sign(r"Exception in thread Thread-\d+[^\n]*_pin_memory_loop"),
        ),
        explains=("exited-unexpectedly",),
        see=("fd-exhaustion", "queue-poisoned-by-death"),
        remedies=(
            todo("Look for the first error above it: a dead worker, or CUDA"),
            todo("For a CUDA error find its place", "CUDA_LAUNCH_BLOCKING=1 python train.py"),
            todo("See whether it works without pinning", "DataLoader(..., pin_memory=False)"),
        ),
        already="There is no such thread; batches are pinned whole, inside next().",
    ),
    Cause(
        slug="pin-thread-vs-fork-atexit",
        title="hangs on a lock that the pinning thread held when it was forked",
        meaning=(
            "The pinning thread of one loader runs while the workers of the next are forked, and the C "
            "library's exit lock can be held at that moment. The child then waits for it at the first "
            "library it initialises, for ever."
        ),
        evidence="`__cxa_atexit` in the native stack of a worker of the second loader.",
        signs=(sign(r"__(cxa|internal)_atexit"),),
        explains=("fork-lock-deadlock", "silent-stall"),
        see=("fork-lock-deadlock",),
        remedies=(
            todo("Make both iterators before either starts pinning"),
            todo(
                "Start workers from a clean process",
                "DataLoader(..., multiprocessing_context='forkserver')",
            ),
        ),
        already="There is no pinning thread.",
    ),
    Cause(
        slug="shutdown-noise",
        title="was cleaned up late, with a harmless complaint",
        meaning=(
            "The clean-up of torch's iterator runs when the interpreter gets to it, at times in a forked "
            "child that does not own the workers. The run is over and nothing was lost."
        ),
        evidence="The message comes after a normal end.",
        signs=(
            proof(r"AssertionError: can only test a child process"),
            sign(r"Exception ignored in: <function _MultiProcessingDataLoaderIter\.__del__"),
            hint(r"_pin_memory_loop[\s\S]{0,2500}ConnectionResetError: \[Errno 104\]"),
            hint(
                r"multiprocessing/resource_sharer\.py[\s\S]{0,1500}(EOFError|ConnectionRe\w+Error|FileNotFoundError)"
            ),
        ),
        remedies=(
            todo("Nothing, if the run had ended; look further up if it had not"),
            todo(
                "End workers before the interpreter does",
                "del iterator   # or keep persistent_workers=True",
            ),
        ),
        already="Loaders end their workers by themselves, in the process that owns them, without noise.",
    ),
    Cause(
        slug="join-hang-at-epoch-end",
        title="does not end, and the trainer waits for it after the last batch",
        meaning=(
            "torch joins its workers one after the other, five seconds each, and a worker whose queue is "
            "blocked does not learn that it has to stop. The epoch is complete, but the loop does not "
            "return."
        ),
        evidence="The stack is in `_shutdown_workers`, `join`, `waitpid`.",
        signs=(
            sign(
                r"_shutdown_workers[\s\S]{0,1200}(w\.join|popen_fork\.py\", line \d+, in (wait|poll))"
            ),
        ),
        see=("silent-stall", "shutdown-noise"),
        remedies=(
            todo("Keep the workers between epochs", "DataLoader(..., persistent_workers=True)"),
            todo("See what the worker waits for", "py-spy dump --pid {pid}"),
        ),
        already="Closing takes two seconds at most for all workers together, then they are killed.",
    ),
    Cause(
        slug="tmpdir-nfs",
        title="cannot remove its temporary folder on NFS",
        meaning=(
            "multiprocessing puts sockets into TMPDIR, and on NFS a file that is still open is renamed "
            "instead of removed. The complaint comes at shutdown and does no harm."
        ),
        evidence="A `.nfs…` name under a `pymp-` folder.",
        signs=(
            proof(r"\[Errno 16\] Device or resource busy: '[^']*\.nfs"),
            sign(r"pymp-\w+[\s\S]{0,300}(\.nfs|Directory not empty)"),
        ),
        remedies=(todo("Put temporary files on a local disk", "export TMPDIR=/tmp"),),
        already="Its channels have no names in any file system.",
    ),
    Cause(
        slug="auth-digest",
        title="was refused by its own trainer: the key of the connection differs",
        meaning=(
            "torch passes descriptors over an authenticated socket, and rejects a process that was forked "
            "at a bad moment or has replaced its key. It happens in the middle of an epoch, at random."
        ),
        evidence="AuthenticationError from multiprocessing.connection.",
        signs=(proof(r"AuthenticationError: digest (received|sent) was (wrong|rejected)"),),
        explains=("python-exception", "bad-sample"),
        remedies=(
            todo("Start workers before other libraries fork or start threads"),
            todo(
                "Start workers from a clean process",
                "DataLoader(..., multiprocessing_context='forkserver')",
            ),
        ),
        already="Descriptors are sent over an inherited socket pair that needs no key.",
    ),
)
