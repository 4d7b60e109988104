"""A process ends: by a crash, by a signal from another process, or by itself."""

from __future__ import annotations

from holdfast.autopsy.cause import Cause, hint, proof, report, sign, todo

__all__ = ["CAUSES"]

ALONE = todo(
    "Load the sample it was working on, alone, in a fresh process, and see it fail",
    'python -X faulthandler -c "import mydata; mydata.dataset[{sample}]"',
    given="a sample",
)
_BY_HAND = todo(
    "Run by hand what a worker does when it starts: imports, unpickling, worker_init_fn",
    'python -X faulthandler -c "import mydata; mydata.worker_init_fn(0)"',
    given="a start",
)

CAUSES = (
    Cause(
        slug="native-segv",
        title="crashed inside native code",
        meaning=(
            "A library written in C or C++ touched memory that is not its own, or divided by zero: "
            "usually a decoder on one damaged file, or two libraries built against different versions. "
            "Python cannot catch that; the process is gone."
        ),
        evidence=(
            "SIGSEGV or SIGFPE; the worker's faulthandler dump shows the line; the kernel log says "
            "`segfault at … in lib….so`. The same sample twice means the data, changing samples mean "
            "the environment."
        ),
        signs=(
            sign(r"is killed by signal: Segmentation fault"),
            sign(r"Unexpected segmentation fault encountered in worker"),
            sign(r"Unexpected floating-point exception encountered in worker"),
            sign(r"is killed by signal: Floating point exception"),
            sign(r"Fatal Python error: (Segmentation fault|Floating[- ]point exception)"),
            report(r"\S+\[\d+\]: segfault at [0-9a-f]+ ip [0-9a-f]+", "medium"),
            report(r"\S+\[\d+\]: general protection fault", "medium"),
            report(r"traps: \S+\[\d+\] (general protection fault|trap divide error)", "medium"),
            hint(r"^Segmentation fault( \(core dumped\))?$"),
        ),
        explains=("exited-unexpectedly",),
        see=("bad-sample", "stack-overflow", "handle-shared-across-fork"),
        remedies=(
            ALONE,
            _BY_HAND,
            todo(
                "If it is always the same sample, have it skipped after it has crashed a worker alone",
                "DataLoader(..., on_bad_sample='skip')   # holdfast's",
                given="a sample",
            ),
            todo(
                "Suspect versions, above all if it moves from file to file: make a fresh environment and "
                "install torch, torchvision, OpenCV and the decoder in one go",
                "python -m pip install --upgrade --force-reinstall torch torchvision",
            ),
            todo(
                "Open files, databases and network handles in the worker, not before it is forked",
                "holdfast explain handle-shared-across-fork",
            ),
        ),
        already=(
            "The stack is saved, the sample is named, the worker is replaced. A sample that crashes a "
            "worker again is loaded alone, and never in the trainer's own process."
        ),
    ),
    Cause(
        slug="stack-overflow",
        title="ran out of stack",
        meaning=(
            "A function called itself, through C or with a raised recursion limit, until the thread's "
            "stack was used up. The system reports that as a segmentation fault."
        ),
        evidence="SIGSEGV with one frame repeated dozens of times in the dump.",
        signs=(
            proof(
                r"Fatal Python error: (_Py_CheckRecursiveCall: )?Cannot recover from stack overflow"
            ),
            sign(r"Caught RecursionError in DataLoader worker process"),
            sign(r"^RecursionError: maximum recursion depth exceeded"),
        ),
        explains=("native-segv", "bad-sample", "python-exception"),
        see=("native-segv",),
        remedies=(
            ALONE,
            _BY_HAND,
            todo(
                "Find the call that repeats, in incident.stack if there is one; usual reasons are nested data, or a "
                "__getattr__ that calls itself while it is unpickled"
            ),
            todo("Do not raise the recursion limit without more stack", "ulimit -s 65536"),
            todo("For a thread", "threading.stack_size(64 << 20)"),
        ),
        already="The dump is kept where the system leaves one, and the worker is replaced.",
    ),
    Cause(
        slug="illegal-instruction",
        title="met an instruction this processor does not have",
        meaning=(
            "A binary was built for a newer or another processor, AVX-512 for example, or a trap was "
            "compiled into it. It depends on the machine, not on the sample."
        ),
        evidence="SIGILL; the dump shows the library call.",
        signs=(
            sign(r"is killed by signal: Illegal instruction"),
            sign(r"Fatal Python error: Illegal instruction"),
            report(r"traps: \S+\[\d+\] trap invalid opcode", "medium"),
        ),
        explains=("exited-unexpectedly",),
        see=("native-segv",),
        remedies=(
            todo("See what this processor has", "grep -m1 flags /proc/cpuinfo"),
            todo(
                "Install that library from a wheel made for all processors, or build it here",
                "python -m pip install --force-reinstall --no-cache-dir PACKAGE",
            ),
        ),
        already="The worker is replaced and its stack kept; on this machine it will happen again.",
    ),
    Cause(
        slug="abort",
        title="aborted itself",
        meaning=(
            "A native library found an error it could not handle and called abort(): an uncaught C++ "
            "exception, a corrupted heap, a failed assertion. The line it wrote to standard error says "
            "which."
        ),
        evidence="SIGABRT that holdfast did not send; the message on standard error; the dump.",
        signs=(
            sign(r"is killed by signal: Aborted"),
            sign(r"Fatal Python error: Aborted"),
            sign(r"terminate called (after throwing|without an active exception|recursively)"),
            proof(
                r"\b(free|malloc|realloc|munmap_chunk|corrupted size vs\. prev_size|malloc_consolidate)\(\)?: ?(invalid|double free|memory corruption|corrupted|unaligned|unsorted)"
            ),
            proof(r"double free or corruption"),
            proof(r"corrupted size vs\. prev_size"),
            proof(r"\*\*\* stack smashing detected \*\*\*"),
            sign(r"Assertion [`'].+' failed\.\s*(Aborted|$)"),
            hint(r"^Aborted( \(core dumped\))?$"),
        ),
        explains=("exited-unexpectedly",),
        see=("allocation-failed", "file-system-strategy", "native-segv"),
        remedies=(
            todo("Read the line on standard error just before it; it names the check that failed"),
            ALONE,
            _BY_HAND,
            todo(
                "A corrupted heap is noticed late: find the first bad access",
                "PYTHONMALLOC=debug MALLOC_CHECK_=3 python train.py",
            ),
            todo("Upgrade or pin the library in the top frames of the stack"),
        ),
        already="The stack is saved and the worker is replaced; a sample that aborts a worker again is named.",
    ),
    Cause(
        slug="killed-from-outside",
        title="was killed by another process, not by the kernel's OOM killer",
        meaning=(
            "A process sent SIGKILL, or sent SIGTERM to this worker alone: a user's command, a scheduler "
            "whose time limit was over, a watchdog, a memory guard such as earlyoom or systemd-oomd, or code "
            "in the worker itself. A signal does not name its sender, but the kernel counts the processes "
            "it kills for memory, and no counter that can be read has moved."
        ),
        evidence=(
            "SIGKILL that holdfast did not send; no `oom_kill` counter moved in the worker's control "
            "group, in any above it, or in `/proc/vmstat` (or the kernel's log names another victim for "
            "every kill that was counted); and no limit on CPU time was reached. Or SIGTERM to one worker "
            "and not to the trainer or the other workers."
        ),
        signs=(
            report(r"earlyoom\[\d+\]: sending SIG(KILL|TERM) to process \d+"),
            proof(r"systemd-oomd\[\d+\]: (Considered|Killed) .*(pressure|swap)"),
            proof(r"systemd-oomd killed \d+ process"),
            sign(r"is killed by signal: (Terminated|Hangup)"),
        ),
        explains=("killed-unexplained", "exited-unexpectedly"),
        see=("oom-killed", "group-sigterm"),
        remedies=(
            todo(
                "Look for the sender: memory guards write to the journal",
                "journalctl -b | grep -iE 'oomd|earlyoom|killed'",
            ),
            todo(
                "See whether the time limit was reached",
                "sacct -j $SLURM_JOB_ID --format=State,ExitCode,Elapsed,Timelimit,MaxRSS",
                "slurm",
            ),
            todo(
                "See what the node did to the pod",
                "kubectl describe pod $HOSTNAME | grep -A8 'Last State'",
                "kubernetes",
            ),
            todo(
                "Record which process sends SIGKILL from now on",
                "auditctl -a always,exit -F arch=b64 -S kill -F a1=9",
            ),
        ),
        already="The worker is replaced and its batch made again.",
    ),
    Cause(
        slug="ended-on-request",
        title="was ended because the program itself asked for it",
        meaning=(
            "The program, or a library that it uses, called terminate() or kill() on one of the process "
            "handles in `iterator._workers`, and holdfast sent the signal. No other process has sent one."
        ),
        evidence="SIGKILL, in our own kill ledger, and not for lack of progress.",
        signs=(proof(r"was sent because the program asked for it: terminate\(\) or kill\(\)"),),
        explains=("killed-from-outside", "killed-unexplained", "exited-unexpectedly"),
        see=("killed-from-outside",),
        remedies=(
            todo(
                "If that was not meant, find the call",
                "grep -rnE '_workers|\\.(terminate|kill)\\(' --include='*.py' .",
            ),
        ),
        already="The worker is replaced and its batch made again.",
    ),
    Cause(
        slug="killed-unexplained",
        title="was killed by SIGKILL; the sender is not known",
        meaning=(
            "SIGKILL comes from the kernel when memory is short, or from a process that may send it. "
            "Memory is the usual reason, but without a counter or a line in the kernel log that is a "
            "guess."
        ),
        evidence="SIGKILL, and no counter and no kernel log could be read, or fewer kills were counted than workers died.",
        signs=(
            sign(r"is killed by signal: Killed"),
            hint(r"exit(ed)? (with )?(code|status):? ?(137|-9)\b"),
            hint(r"(?i)exitcode\s*:\s*-9\b"),
            hint(r"Signal 9 \(SIGKILL\) received by PID"),
            hint(r"^(\[\d+\]\s+)?\d* ?Killed\s*(python|$)"),
        ),
        explains=("exited-unexpectedly",),
        see=("oom-killed", "group-oom", "killed-from-outside"),
        remedies=(
            todo("Ask the kernel", "sudo dmesg -T | grep -iE 'killed process|oom-kill'"),
            todo(
                "Ask the control group (cgroup v2, then v1)",
                "grep oom_kill {cgroup_path}/memory.events {cgroup_path}/memory.oom_control",
            ),
            todo(
                "Ask Slurm", "sacct -j $SLURM_JOB_ID --format=State,ExitCode,MaxRSS,ReqMem", "slurm"
            ),
            todo(
                "Ask Kubernetes",
                "kubectl get pod $HOSTNAME -o jsonpath='{{..lastState}}'",
                "kubernetes",
            ),
            todo(
                "Ask Docker",
                "docker inspect --format '{{{{.State.OOMKilled}}}}' CONTAINER",
                "docker",
            ),
            todo("If a counter says memory", "holdfast explain oom-killed"),
        ),
        already="The worker is replaced and its batch made again, whatever killed it.",
    ),
    Cause(
        slug="group-sigterm",
        title="was told to stop together with the whole job",
        meaning=(
            "A scheduler or a supervisor sent SIGTERM (or SIGHUP) to every process of the job, as it does "
            "before preemption or at a time limit. With torch the workers die first, and the loader "
            "raises before the trainer can save its checkpoint."
        ),
        evidence=(
            "SIGTERM to several processes within milliseconds: it is pending in the trainer, or the process "
            "that starts the workers got it too. Or SIGKILL within two minutes after that, with no "
            "`oom_kill` counter moved."
        ),
        signs=(
            sign(
                r"worker \(pid (\d+)\) is killed by signal: (Terminated|Hangup)[\s\S]{0,8000}"
                r"worker \((pid (?!\1\b)\d+\) is killed by signal: \2|pid\(s\) \d+, \d)"
            ),
            proof(
                r"slurmstepd: error: \*\*\* (JOB|STEP) [\d.]+ ON \S+ CANCELLED AT \S+ DUE TO "
                r"(PREEMPTION|TIME LIMIT)"
            ),
            sign(r"slurmstepd: error: \*\*\* (JOB|STEP) [\d.]+ ON \S+ CANCELLED AT "),
            proof(r"=>> PBS: job killed: walltime"),
            proof(r"The node was low on resource: [\w-]+"),
            sign(r"Sending process \d+ closing signal SIG(TERM|HUP)"),
            sign(r"SignalException: Process \d+ got signal: (15|1)\b"),
            hint(r"exit(ed)? (with )?(code|status):? ?143\b"),
        ),
        explains=("exited-unexpectedly", "killed-from-outside"),
        see=("killed-from-outside", "group-oom"),
        remedies=(
            todo("Save when asked to stop", "signal.signal(signal.SIGTERM, save_and_exit)"),
            todo(
                "Ask for the signal early enough to save",
                "#SBATCH --signal=TERM@120 --requeue",
                "slurm",
            ),
            todo(
                "See whether the time limit was reached",
                "sacct -j $SLURM_JOB_ID --format=State,ExitCode,Elapsed,Timelimit",
                "slurm",
            ),
            todo("Give the pod time to save", "terminationGracePeriodSeconds: 300", "kubernetes"),
            todo(
                "A pod that uses more than it asked for is the first to be evicted: ask for what it needs",
                "resources: {{requests: {{memory: {memory_wanted}Gi}}}}",
                "kubernetes",
            ),
            todo("Give the container time to save", "docker stop --time 300 CONTAINER", "docker"),
        ),
        already="Workers ignore SIGTERM, SIGHUP and SIGINT and serve the trainer until it stops.",
    ),
    Cause(
        slug="ctrl-c-flood",
        title="was interrupted from the keyboard together with everything else",
        meaning=(
            "Ctrl-C reaches every process in the foreground, so each worker prints its own "
            "KeyboardInterrupt and the trainer's is lost among them. It is no failure."
        ),
        evidence="Several workers end within milliseconds and the trainer has KeyboardInterrupt.",
        signs=(
            proof(
                r"could not acquire lock for <_io\.BufferedWriter name='<std(err|out)>'> at interpreter shutdown"
            ),
            sign(r"Process Process-\d+:[\s\S]{0,4000}?\bKeyboardInterrupt\b"),
            hint(r"KeyboardInterrupt[\s\S]{0,2000}exited unexpectedly"),
        ),
        explains=("exited-unexpectedly",),
        remedies=(
            todo("Nothing, if it was you"),
            todo("If workers are left in a notebook, end them", "loader.close()"),
        ),
        already="Workers ignore SIGINT: one traceback, the trainer's, and the loader can be used again.",
    ),
    Cause(
        slug="exited-by-itself",
        title="exited by itself without saying why",
        meaning=(
            "Something in the worker called exit (os._exit in a library, a C library's exit() on a "
            "fatal error, a runtime that ends the process when its licence or device is missing) or "
            "sent a fatal signal to its own process. It did not crash, and no other process killed it."
        ),
        evidence=(
            "An ordinary exit status, no signal, and no farewell on the worker's channel; or, while a "
            "suspect sample was loaded alone, os.kill with its own pid just before it died."
        ),
        signs=(
            sign(r"exited by itself with code \d+"),
            hint(r"exited unexpectedly with exit code (?!1\b)\d+"),
        ),
        explains=("exited-unexpectedly",),
        see=("python-exception", "spawn-bootstrap"),
        remedies=(
            ALONE,
            _BY_HAND,
            todo("See which code calls exit", "strace -f -e trace=exit_group -k python train.py"),
            todo(
                "Search the code that loads a sample",
                "grep -rnE 'os\\._exit|os\\.kill|sys\\.exit|quit\\(' .",
            ),
        ),
        already="The worker is replaced and the sample is named; a sample that does it again is loaded alone.",
    ),
    Cause(
        slug="exited-unexpectedly",
        title="is gone, and torch does not know why",
        meaning=(
            "torch noticed that a worker process no longer exists, and says only that. The reason is in "
            "the worker's exit status, in the kernel's log or further up in this log."
        ),
        evidence="Nothing but the message; the signal is not in it.",
        signs=(
            hint(r"DataLoader worker \(pid(\(s\))? [\d, ]+\) exited unexpectedly"),
            # The trainer fails to open the memory of a batch whose worker is dead.
            sign(
                r'dataloader\.py", line \d+, in _try_get_data\b[\s\S]{0,2500}?multiprocessing/'
                r"resource_sharer\.py[\s\S]{0,2500}?\n(?P<said>(EOFError|ConnectionRe\w+Error|"
                r"FileNotFoundError)\b)"
            ),
        ),
        explains=("shutdown-noise",),
        see=("oom-killed", "shm-exhausted", "native-segv", "spawn-bootstrap"),
        remedies=(
            todo(
                "Look further up for the first error, and keep standard error",
                "python train.py 2>&1 | tee train.log; holdfast explain train.log",
            ),
            todo("Ask the kernel for the pid in the message", "sudo dmesg -T | grep -w {pid}"),
            todo(
                "Run it once with holdfast, which records the reason",
                "from holdfast import DataLoader",
                given="torch's loader",
            ),
        ),
        already="holdfast reads the exit status of every worker and replaces it.",
    ),
    Cause(
        slug="cpu-limit",
        title="used up its CPU time",
        meaning=(
            "A limit on CPU seconds (ulimit -t) is set, as login nodes of clusters often do, and this "
            "process has spent them. At the soft limit the kernel sends SIGXCPU, at the hard limit SIGKILL; "
            "where both are the same, only SIGKILL is seen."
        ),
        evidence="SIGXCPU; or SIGKILL with as much CPU time used as the hard limit in /proc/PID/limits.",
        signs=(
            proof(r"is killed by signal: CPU time limit exceeded"),
            proof(r"Cputime limit exceeded"),
            proof(r"(?i)\bCPU time limit exceeded \(core dumped\)"),
        ),
        explains=("exited-unexpectedly",),
        remedies=(
            todo("See it", "ulimit -t"),
            todo("Lift it, if you may", "ulimit -t unlimited"),
            todo(
                "On a login node: run it as a job",
                "srun --cpus-per-task=4 python train.py",
                "slurm",
            ),
        ),
        already="The worker is replaced; the new one has the same limit again.",
    ),
    Cause(
        slug="stray-signal",
        title="died of a signal that it does not handle",
        meaning=(
            "A timer, an interval profiler or another program sent a signal that ends a process "
            "unless it is handled. A worker has the trainer's handlers only if it was forked after they "
            "were set."
        ),
        evidence="A signal other than the usual ones: SIGALRM, SIGPROF, SIGVTALRM, SIGPIPE, SIGUSR1, SIGSYS, SIGXFSZ.",
        signs=(
            sign(
                r"is killed by signal: (Alarm clock|Profiling timer expired|Virtual timer expired|User defined signal \d|Broken pipe|Real-time signal \d+|Bad system call|File size limit exceeded)"
            ),
        ),
        explains=("exited-unexpectedly",),
        see=("killed-from-outside",),
        remedies=(
            todo(
                "If it was SIGALRM, SIGPROF or SIGVTALRM, look for timers in the code that loads a sample",
                "grep -rnE 'setitimer|signal\\.alarm|timer_create' .",
            ),
            todo(
                "Ignore it in workers if it means nothing there, here for SIGALRM",
                "worker_init_fn=lambda _: signal.signal(signal.SIGALRM, signal.SIG_IGN)",
            ),
            todo("If it was SIGXFSZ, a file grew past the limit on its size", "ulimit -f"),
        ),
        already="The worker is replaced and its batch made again.",
    ),
    Cause(
        slug="macos-trap",
        title="was trapped by macOS for what it did after a fork",
        meaning=(
            "Apple's frameworks (Accelerate, Objective-C) must not be used in a forked child, and stop "
            "the process. It happens on Apple silicon with large tensors and with fork."
        ),
        evidence="SIGTRAP on macOS.",
        signs=(
            sign(r"is killed by signal: Trace/BPT trap"),
            proof(
                r"objc\[\d+\]: \+\[\S+ initialize\] may have been in progress in another thread when fork\(\) was called"
            ),
        ),
        explains=("exited-unexpectedly",),
        remedies=(
            todo("Do not fork there", "DataLoader(..., multiprocessing_context='spawn')"),
            todo("Until then", "export OBJC_DISABLE_INITIALIZE_FORK_SAFETY=YES"),
        ),
        already="Nothing: on macOS the workers are torch's own, and holdfast says so.",
    ),
)
