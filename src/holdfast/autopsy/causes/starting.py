"""Workers that fail to start."""

from __future__ import annotations

from holdfast.autopsy.cause import Cause, hint, proof, sign, todo

__all__ = ["CAUSES"]

CAUSES = (
    Cause(
        slug="spawn-bootstrap",
        title="ran the main script again instead of starting",
        meaning=(
            "Under spawn and forkserver every worker imports your main script, and a script without the "
            "`__main__` guard then makes its own loaders and workers. Python stops that with this error."
        ),
        evidence="It ended with status 1 before it was ready; its error goes through `spawn_main`.",
        signs=(
            proof(r"before the\s+current process has finished its bootstrapping phase"),
            proof(
                r"This probably means that you are not using fork to start your\s+child processes and you have forgotten to use the proper idiom"
            ),
            sign(r"_check_not_importing_main"),
            hint(r"(spawn_main|_fixup_main_from_path)[\s\S]{0,3000}BrokenPipeError: \[Errno 32\]"),
            hint(r"popen_spawn_win32\.py[\s\S]{0,600}BrokenPipeError: \[Errno 32\]"),
        ),
        explains=("exited-unexpectedly", "worker-import-error", "exited-by-itself"),
        see=("notebook-main", "unpicklable-args", "py314-forkserver"),
        remedies=(
            todo("Put what the script does under a guard", "if __name__ == '__main__': main()"),
            todo("Move datasets and functions into their own module and import it"),
        ),
        already="It does not start such a worker again and again; the error quotes the worker's message.",
    ),
    Cause(
        slug="nursery-failed",
        title="ended because the process that starts the workers failed",
        meaning=(
            "A small process of holdfast forks all workers, and it ended with an error. Under spawn and "
            "forkserver it is a fresh Python that imports torch, so it fails if the installation has "
            "changed during the run."
        ),
        evidence="That process sent its traceback, or was seen to exit, before the workers ended.",
        signs=(proof(r"the process that starts the workers (raised|exited by itself)"),),
        explains=("exited-unexpectedly", "killed-unexplained", "exited-by-itself"),
        see=("spawn-bootstrap", "worker-import-error"),
        remedies=(
            todo("Read its traceback: the last line is the cause"),
            todo(
                "See whether a fresh Python can import what it needs",
                "python -c 'import torch, holdfast' && holdfast doctor",
            ),
            todo("If the traceback ends in holdfast's own code, report it with the traceback"),
        ),
        already="Another such process was started, and new workers from it.",
    ),
    Cause(
        slug="notebook-main",
        title="cannot find a class that is defined in a notebook cell or under the guard",
        meaning=(
            "A spawned worker imports modules by name, and what was defined in a cell, in `python -c`, in "
            "a script on standard input or under `if __name__` does not exist there. The class is fine, "
            "but has to be defined in a module."
        ),
        evidence="It ended before it was ready: `Can't get attribute`, or the main module has no file.",
        signs=(
            proof(r"AttributeError: Can't get attribute '[^']+' on <module '__(mp_)?main__'"),
            proof(
                r"FileNotFoundError: \[Errno 2\] No such file or directory: '[^'\n]*<(stdin|string)>'"
            ),
            sign(r"AttributeError: Can't get attribute '[^']+' on <module"),
            sign(
                r"_pickle\.PicklingError: Can't pickle <\S+ '__main__\.[^']+'>: (attribute lookup|it's not)"
            ),
        ),
        explains=(
            "exited-unexpectedly",
            "unpicklable-args",
            "worker-import-error",
            "exited-by-itself",
            "bad-sample",
        ),
        see=("spawn-bootstrap", "unpicklable-args"),
        remedies=(
            todo(
                "Move the class or function into a .py file and import it", "%%writefile mydata.py"
            ),
            todo(
                "On Linux, let workers inherit it",
                "DataLoader(..., multiprocessing_context='fork')",
            ),
        ),
        already="The error names the attribute and says this, instead of a hang.",
    ),
    Cause(
        slug="unpicklable-args",
        title="could not be started: its dataset or functions cannot be pickled",
        meaning=(
            "Under spawn and forkserver dataset, collate_fn and worker_init_fn are sent to the worker as a "
            "pickle. Lambdas, local functions, open files, locks, database handles and generators cannot be "
            "pickled."
        ),
        evidence="A pickling error while the process is being started; no worker ever ran.",
        signs=(
            proof(r"Can't (pickle|get) local object '[^']+'"),
            proof(r"Can't pickle <function <lambda> at"),
            proof(r"TypeError: (cannot|can't) pickle '?[\w.]+'? objects?\b"),
            proof(r"h5py objects cannot be pickled"),
            sign(r"_pickle\.PicklingError: Can't pickle"),
            sign(r"Got pickle error when attempting to start a worker Process"),
        ),
        explains=("exited-unexpectedly",),
        see=("py314-forkserver", "notebook-main", "lost-batch-unpicklable-result"),
        remedies=(
            todo(
                "Replace a lambda or local function by one at module level, or by functools.partial"
            ),
            todo(
                "Open files and databases in the worker, at first use",
                "def __getitem__(self, i): self.file = self.file or h5py.File(self.path)",
            ),
            todo(
                "Leave handles out of the pickle",
                "def __getstate__(self): return {{**self.__dict__, 'file': None}}",
            ),
            todo(
                "On Linux, if nothing speaks against fork",
                "DataLoader(..., multiprocessing_context='fork')",
            ),
        ),
        already="It names the attribute that cannot be pickled, such as dataset.transform.transforms[3].fn.",
    ),
    Cause(
        slug="py314-forkserver",
        title="is started in another way since Python 3.14",
        meaning=(
            "From Python 3.14 on, the default on Linux is forkserver and no longer fork. forkserver pickles "
            "the dataset and imports the main script, so code that relied on fork fails with pickle errors."
        ),
        evidence=(
            "A traceback through popen_forkserver.py of Python 3.14. torch mentions 3.14 under every Python, "
            "so its warning alone proves nothing."
        ),
        signs=(
            proof(
                r"/python3\.(1[4-9]|[2-9]\d)/multiprocessing/popen_forkserver\.py\"[^\n]*(\n[ \t][^\n]*){0,60}"
                r"\n(?P<said>[\w.]*(PicklingError|TypeError|AttributeError): [^\n]*([Pp]ickle|local object)[^\n]*)"
            ),
        ),
        explains=("unpicklable-args", "exited-unexpectedly"),
        see=("unpicklable-args", "spawn-bootstrap"),
        remedies=(
            todo("Make it picklable; it is the safer way", "holdfast explain unpicklable-args"),
            todo(
                "Or ask for fork, for this loader only",
                "DataLoader(..., multiprocessing_context='fork')",
            ),
        ),
        already="It uses the start method that you or Python choose and names what cannot be pickled.",
    ),
    Cause(
        slug="worker-import-error",
        title="could not import what it needs",
        meaning=(
            "A spawned worker starts with a fresh interpreter and imports your modules again, and one of "
            "these imports failed. The usual differences to the trainer are paths set by the launcher, the "
            "working folder, or a changed environment."
        ),
        evidence="It ended with status 1 before it was ready, with an ImportError in its message.",
        signs=(
            sign(r"in spawn_main[\s\S]{0,4000}(ModuleNotFoundError|ImportError):"),
            sign(
                r"worker \d+ could not start\. It says:[\s\S]{0,4000}(ModuleNotFoundError|ImportError):"
            ),
        ),
        explains=("exited-unexpectedly", "exited-by-itself"),
        see=("notebook-main", "spawn-bootstrap"),
        remedies=(
            todo("Import it in a fresh Python from the same folder", "python -c 'import MODULE'"),
            todo("Put the folder on the path for children too", "export PYTHONPATH=$PWD"),
        ),
        already="It quotes the worker's own traceback and does not start it again and again.",
    ),
    Cause(
        slug="task-limit",
        title="was refused another process or thread",
        meaning=(
            "The number of tasks is limited for the user (ulimit -u) or the control group (pids.max), and "
            "every thread counts. Numeric libraries start one thread per core in every worker."
        ),
        evidence="Errno 11; `pids.current` near `pids.max`; `Threads:` in `/proc/PID/status`.",
        signs=(
            proof(r"can't start new thread"),
            proof(r"pthread_create failed for thread \d+ of \d+"),
            proof(r"cgroup: fork rejected by pids controller"),
            sign(r"BlockingIOError: \[Errno 11\] Resource temporarily unavailable"),
            sign(r"fork: retry: Resource temporarily unavailable"),
            sign(r"libgomp: Thread creation failed: Resource temporarily unavailable"),
            sign(r"OMP: Error #34: System unable to allocate necessary resources for OMP thread"),
        ),
        explains=("python-exception", "bad-sample", "exited-unexpectedly"),
        see=("fork-enomem", "oversubscription"),
        remedies=(
            todo(
                "One thread per library and worker",
                "export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1",
            ),
            todo(
                "Raise the user's limit (now {nproc_soft}); beyond the hard one ({nproc_hard}) only root can",
                "ulimit -u {nproc_wanted}",
            ),
            todo(
                "Raise the container's limit (now {pids_max})",
                "docker run --pids-limit=-1 ...",
                "docker",
            ),
            todo(
                "Ask for the node's limit to be raised (now {pids_max})",
                "podPidsLimit: 4096   # kubelet",
                "kubernetes",
            ),
            todo("Fewer workers", "DataLoader(..., num_workers={fewer_workers})"),
        ),
        already="torch uses one thread in each worker; a fork that fails is tried again and reported.",
    ),
    Cause(
        slug="daemonic-children",
        title="cannot be started from a daemonic process",
        meaning=(
            "Python does not allow daemonic processes to have children, and the workers of pools, of Celery "
            "and of torch itself are daemonic. A loader inside one of them cannot start workers."
        ),
        evidence="AssertionError from `Process.start`.",
        signs=(proof(r"daemonic processes are not allowed to have children"),),
        explains=("python-exception", "bad-sample"),
        remedies=(
            todo(
                "Use a pool whose processes may have children",
                "concurrent.futures.ProcessPoolExecutor()",
            ),
            todo(
                "Or use a loader that works there",
                "from holdfast import DataLoader",
                given="torch's loader",
            ),
        ),
        already="Its workers can be started from daemonic processes; they die with their trainer anyway.",
    ),
    Cause(
        slug="cuda-in-forked-worker",
        title="touched CUDA after a fork",
        meaning=(
            "CUDA cannot be used in a process forked from one that has used it already. Somewhere the "
            "dataset or the collate function makes or loads a tensor on the GPU."
        ),
        evidence="The message, raised in a worker; CUDA was initialised in the trainer.",
        signs=(
            proof(r"Cannot re-initialize (CUDA|XPU|HPU|MPS|NPU) in forked subprocess"),
            sign(r"CUDA error: initialization error[\s\S]{0,2000}DataLoader worker"),
            sign(
                r"Caught RuntimeError in DataLoader worker[\s\S]{0,4000}CUDA error: (initialization error|invalid device ordinal)"
            ),
        ),
        explains=("python-exception", "bad-sample"),
        remedies=(
            todo(
                "Keep the dataset on the CPU and move batches in the training loop",
                "batch = batch.to('cuda', non_blocking=True)",
            ),
            todo("Load what was saved on a GPU to the CPU", "torch.load(path, map_location='cpu')"),
            todo("If workers must use the GPU", "DataLoader(..., multiprocessing_context='spawn')"),
        ),
        already="The error arrives at that batch, with the sample's index; the worker goes on.",
    ),
    Cause(
        slug="startup-per-epoch",
        title="is started again for every epoch, which takes time",
        meaning=(
            "torch makes new workers in every iter(), and under spawn each imports torch and the main "
            "script. On large scripts the GPU idles for minutes between epochs."
        ),
        evidence="The first batch of each epoch takes far longer than the others.",
        signs=(
            hint(
                r"(?i)(start of|between|each) epochs?[^.\n]{0,60}(slow|takes|minutes|idle)[^.\n]{0,60}worker"
            ),
        ),
        remedies=(
            todo("Keep the workers", "DataLoader(..., persistent_workers=True)"),
            todo("Import less at the top of the main script; workers import it too"),
        ),
        already="All workers are forked from one prepared process, in milliseconds; spawn imports torch once.",
    ),
)
