"""What people paste: messages with the cause that must be found, and texts in which there is none.

Written for these tests from the wordings that torch (0.4 to 2.13), Python, glibc, the kernel, CUDA,
Docker, Kubernetes and Slurm use.
"""

from __future__ import annotations

_WORKER = "RuntimeError: DataLoader worker (pid {}) is killed by signal: {}. "
_CAUGHT = (
    "Traceback (most recent call last):\n"
    '  File "train.py", line 31, in <module>\n    for batch in loader:\n'
    "{error}: Caught {error} in DataLoader worker process 2.\nOriginal Traceback (most recent call last):\n"
    '  File "/lib/torch/utils/data/_utils/worker.py", line 351, in _worker_loop\n    data = fetcher.fetch(index)\n'
    '  File "data.py", line 12, in __getitem__\n    {code}\n{error}: {text}\n'
)


def caught(error: str, text: str, code: str = "return load(self.paths[i])") -> str:
    return _CAUGHT.format(error=error, text=text, code=code)


FAILURES: list[tuple[str, str]] = [
    # -- killed
    ("nursery-failed", "worker 0 disappeared while it was starting; gave up\n    because: the process that starts the workers raised\n        Traceback (most recent call last):\n        ImportError: libtorch.so: cannot open shared object file"),
    ("killed-unexplained", _WORKER.format(812, "Killed") + "\nRuntimeError: DataLoader worker (pid(s) 812) exited unexpectedly"),
    ("killed-unexplained", "RuntimeError: DataLoader worker (pid 4161) is killed by signal: Killed. Details are lost due to multiprocessing. Rerunning with num_workers=0 may give better error trace."),
    ("killed-unexplained", "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\ntrain.py FAILED\n  exitcode  : -9 (pid: 3321)\n  traceback : Signal 9 (SIGKILL) received by PID 3321"),
    ("oom-killed", "[ 4238.65] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=x,mems_allowed=0,oom_memcg=/job,task_memcg=/job,task=python,pid=812,uid=0"),
    ("oom-killed", "[Mon Nov  3 04:12:09 2025] Memory cgroup out of memory: Killed process 19573 (python) total-vm:39132kB, anon-rss:29576kB, oom_score_adj:500\n" + _WORKER.format(19573, "Killed")),
    ("oom-killed", "kernel: Out of memory: Killed process 2211 (python3) total-vm:61042000kB"),
    ("oom-killed", "kernel: Out of memory: Kill process 2211 (python) score 912 or sacrifice child"),
    ("oom-killed", "python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0"),
    ("oom-killed", "RuntimeError: DataLoader worker (pid(s) 2150614) exited unexpectedly\nslurmstepd: error: Detected 1 oom-kill event(s) in StepId=15043231.batch. Some of your processes may have been killed by the cgroup out-of-memory handler."),
    ("oom-killed", "slurmstepd: error: Detected 2 oom_kill events in StepId=8814.0. Some of the step tasks have been OOM Killed.\nsrun: error: node107: task 0: Out Of Memory"),
    ("group-oom", "    Last State:     Terminated\n      Reason:       OOMKilled\n      Exit Code:    137"),
    ("group-oom", "kernel: Tasks in /kubepods/pod1/abc are going to be killed due to memory.oom.group set"),
    ("group-oom", '"State": {"Status": "exited", "OOMKilled": true, "ExitCode": 137}'),
    ("killed-from-outside", "earlyoom[722]: sending SIGTERM to process 812 uid 1000 \"python\": badness 900, VmRSS 14000 MiB"),
    ("killed-from-outside", "systemd-oomd[911]: Killed /user.slice/user-1000.slice/session-3.scope due to memory pressure for /user.slice"),
    ("group-sigterm", "Warning  Evicted  2m  kubelet  The node was low on resource: memory. Threshold quantity: 100Mi, available: 80Mi. Container train was using 31Gi, request is 8Gi."),
    ("group-sigterm", "=>> PBS: job killed: walltime 3612 exceeded limit 3600"),
    ("group-sigterm", "slurmstepd: error: *** JOB 771234 ON node017 CANCELLED AT 2026-11-16T03:11:59 DUE TO TIME LIMIT ***\n" + _WORKER.format(99, "Terminated")),
    ("fd-exhaustion", 'Traceback (most recent call last):\n  File "/usr/lib/python3.10/multiprocessing/queues.py", line 244, in _feed\n    obj = _ForkingPickler.dumps(obj)\nRuntimeError: unable to open shared memory object </torch_4071_2953> in read-write mode: Too many open files (24)'),
    ("group-sigterm", "slurmstepd: error: *** JOB 10609057 ON g002 CANCELLED AT 2025-08-22T01:14:01 DUE TO TIME LIMIT ***"),
    ("killed-from-outside", _WORKER.format(812, "Terminated") + "\nRuntimeError: DataLoader worker (pid(s) 812) exited unexpectedly"),
    ("group-sigterm", _WORKER.format(812, "Terminated") + "\n" + _WORKER.format(813, "Terminated")),
    ("group-sigterm", _WORKER.format(812, "Terminated") + "\nRuntimeError: DataLoader worker (pid(s) 812, 813) exited unexpectedly"),
    ("group-sigterm", "slurmstepd: error: *** JOB 881 ON g002 CANCELLED AT 2025-08-22T01:14:01 DUE TO PREEMPTION ***"),
    ("group-sigterm", "torch.distributed.elastic.multiprocessing.api.SignalException: Process 71 got signal: 15"),
    ("stream-not-repeatable", "worker 0 (pid 812): its stream goes on, and not as it was: samples may be missing or come twice: this stream is not deterministic: drawn again, 3 of 3 batches delivered in this epoch came out different, the first of them batch 0 of this worker"),
    ("stream-not-repeatable", "holdfast.errors.StreamLost: DataLoader worker (pid(s) 812) exited unexpectedly, and the stream of worker 0 is not continued: this stream is not deterministic: 3 batches of this epoch had been delivered, and drawn again it ended after 2."),
    ("exited-unexpectedly", "RuntimeError: DataLoader worker (pid(s) 411948) exited unexpectedly"),
    ("exited-unexpectedly", "RuntimeError: DataLoader worker (pid(s) 5, 6, 7) exited unexpectedly"),
    ("ctrl-c-flood", "Process Process-3:\nTraceback (most recent call last):\n  File \"worker.py\", line 9\nKeyboardInterrupt\nProcess Process-1:\nTraceback (most recent call last):\nKeyboardInterrupt"),
    ("ctrl-c-flood", "Fatal Python error: could not acquire lock for <_io.BufferedWriter name='<stderr>'> at interpreter shutdown, possibly due to daemon threads"),
    # -- crashed
    ("native-segv", "ERROR: Unexpected segmentation fault encountered in worker.\n" + _WORKER.format(9, "Segmentation fault")),
    ("native-segv", "Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f (most recent call first):\n  File \"data.py\", line 3 in __getitem__"),
    ("native-segv", "[ 4554.33] python[1333]: segfault at 20 ip 00007fbbf5aba028 sp 00007ffc284486a0 error 4 in libtorch_cpu.so"),
    ("native-segv", "ERROR: Unexpected floating-point exception encountered in worker."),
    ("illegal-instruction", _WORKER.format(9, "Illegal instruction")),
    ("illegal-instruction", "[12.1] traps: python[77] trap invalid opcode ip:7f1 sp:7ff error:0 in libfoo.so"),
    ("stack-overflow", caught("RecursionError", "maximum recursion depth exceeded")),
    ("abort", _WORKER.format(9, "Aborted")),
    ("abort", "malloc(): memory corruption\n" + _WORKER.format(9, "Aborted")),
    ("abort", "free(): double free detected in tcache 2\nFatal Python error: Aborted"),
    ("abort", "double free or corruption (!prev)\nAborted (core dumped)"),
    ("allocation-failed", "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n" + _WORKER.format(9, "Aborted")),
    ("allocation-failed", caught("RuntimeError", "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 400000000 bytes. Error code 12 (Cannot allocate memory)")),
    ("allocation-failed", "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.45 GiB for an array with shape (1000000000,)"),
    ("cpu-limit", _WORKER.format(9, "CPU time limit exceeded")),
    ("stray-signal", _WORKER.format(9, "Alarm clock")),
    ("macos-trap", _WORKER.format(9, "Trace/BPT trap: 5")),
    ("exited-by-itself", "RuntimeError: DataLoader worker (pid 9) exited unexpectedly with exit code 3. Details are lost due to multiprocessing. Rerunning with num_workers=0 may give better error trace."),
    # -- transport
    ("shm-exhausted", "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).\n" + _WORKER.format(13, "Bus error") + "It is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit."),
    ("shm-exhausted", "RuntimeError: DataLoader worker (pid 325) is killed by signal: Bus error. "),
    ("shm-exhausted", "RuntimeError: unable to write to file </torch_31_2>: No space left on device (28)"),
    ("shm-exhausted", "RuntimeError: unable to allocate shared memory(shm) for file </torch_9_1_0>: No space left on device (28)"),
    ("fd-exhaustion", "RuntimeError: received 0 items of ancdata"),
    ("fd-exhaustion", "OSError: [Errno 24] Too many open files: '/data/train/1.jpg'"),
    ("fd-exhaustion", "RuntimeError: Too many open files. Communication with the workers is no longer possible. Please increase the limit using `ulimit -n` in the shell or change the sharing strategy by calling `torch.multiprocessing.set_sharing_strategy('file_system')` at the beginning of your code"),
    ("fd-exhaustion", caught("OSError", "[Errno 24] Too many open files: '/x'")),
    ("fd-exhaustion", "RuntimeError: unable to open shared memory object </torch_2919_1396182366> in read-write mode"),
    ("file-system-strategy", "terminate called after throwing an instance of 'c10::Error'\n  what():  could not unlink the shared memory file /torch_1_2 : No such file or directory (2)"),
    ("max-map-count", "RuntimeError: unable to mmap 320 bytes from file <filename not specified>: Cannot allocate memory (12)"),
    ("lost-batch-unpicklable-result", "Traceback (most recent call last):\n  File \"/lib/python3.11/multiprocessing/queues.py\", line 244, in _feed\n    obj = _ForkingPickler.dumps(obj)\nTypeError: cannot pickle '_io.BufferedReader' object"),
    ("pin-thread", "RuntimeError: Pin memory thread exited unexpectedly"),
    ("pin-thread", "RuntimeError: Caught RuntimeError in pin memory thread for device 0."),
    ("shutdown-noise", "Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__ at 0x7f>\nTraceback (most recent call last):\nAssertionError: can only test a child process"),
    ("join-hang-at-epoch-end", "  File \"dataloader.py\", line 1570, in _shutdown_workers\n    w.join(timeout=5)\n  File \"/lib/multiprocessing/popen_fork.py\", line 40, in wait"),
    ("tmpdir-nfs", "OSError: [Errno 16] Device or resource busy: '.nfs000000000123'"),
    ("auth-digest", "multiprocessing.context.AuthenticationError: digest received was wrong"),
    ("queue-poisoned-by-death", "_pickle.UnpicklingError: pickle data was truncated\n  File \"/x/torch/utils/data/dataloader.py\", line 9"),
    ("sigbus-not-shm", "lmdb.CorruptedError: mdb_get: MDB_CORRUPTED: Located page was wrong type"),
    # -- starting
    ("spawn-bootstrap", "RuntimeError: \n        An attempt has been made to start a new process before the\n        current process has finished its bootstrapping phase.\n"),
    ("spawn-bootstrap", "  File \"<string>\", line 1, in <module>\n  File \"spawn.py\", line 116, in spawn_main\nRuntimeError:\n An attempt has been made to start a new process before the current process has finished its bootstrapping phase.\nRuntimeError: DataLoader worker (pid 4) exited unexpectedly with exit code 1. Details are lost due to multiprocessing."),
    ("notebook-main", "FileNotFoundError: [Errno 2] No such file or directory: '/home/me/<stdin>'"),
    ("notebook-main", "AttributeError: Can't get attribute 'CustomDataset' on <module '__main__' (built-in)>"),
    ("unpicklable-args", "AttributeError: Can't pickle local object 'main.<locals>.<lambda>'"),
    ("unpicklable-args", "AttributeError: Can't get local object 'main.<locals>.collate'"),
    ("unpicklable-args", "TypeError: h5py objects cannot be pickled"),
    ("unpicklable-args", "TypeError: can't pickle Environment objects"),
    ("unpicklable-args", "TypeError: cannot pickle 'torch._C.Generator' object"),
    ("unpicklable-args", "_pickle.PicklingError: Can't pickle <function <lambda> at 0x7f>: attribute lookup <lambda> on data failed"),
    ("py314-forkserver", "  File \"/usr/lib/python3.14/multiprocessing/popen_forkserver.py\", line 47, in _launch\n    reduction.dump(process_obj, buf)\n  File \"/usr/lib/python3.14/multiprocessing/reduction.py\", line 60, in dump\n    ForkingPickler(file, protocol).dump(obj)\n_pickle.PicklingError: Can't pickle <function <lambda> at 0x7f>: it's not found as __main__.<lambda>"),
    ("unpicklable-args", "UserWarning: Got pickle error when attempting to start a worker Process. This might be because the worker Process arguments are not picklable. Python 3.14+ changed the multiprocessing start method in non-Mac POSIX platforms to 'forkserver', which requires the worker Process arguments to be picklable."),
    ("worker-import-error", "  File \"spawn.py\", line 122, in spawn_main\n  File \"<frozen runpy>\", line 88\nModuleNotFoundError: No module named 'mydata'"),
    ("task-limit", "RuntimeError: can't start new thread"),
    ("task-limit", "OpenBLAS blas_thread_init: pthread_create failed for thread 50 of 64: Resource temporarily unavailable"),
    ("task-limit", "cgroup: fork rejected by pids controller in /docker/abc"),
    ("fork-enomem", "    self.pid = os.fork()\nOSError: [Errno 12] Cannot allocate memory"),
    ("daemonic-children", "AssertionError: daemonic processes are not allowed to have children"),
    ("cuda-in-forked-worker", caught("RuntimeError", "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start method")),
    ("windows-commit", "OSError: [WinError 1455] The paging file is too small for this operation to complete. Error loading \"C:\\torch\\lib\\cudnn_cnn_infer64_8.dll\""),
    # -- stalls
    ("silent-stall", "RuntimeError: DataLoader timed out after 30 seconds"),
    ("fork-lock-deadlock", "DeprecationWarning: This process (pid=7) is multi-threaded, use of fork() may lead to deadlocks in the child."),
    ("openmp-after-use", "OMP: Warning #190: Forking a process while a parallel region is active is potentially unsafe."),
    ("storage-stall", "[99.1] INFO: task python:812 blocked for more than 120 seconds."),
    ("storage-stall", "nfs: server fs1 not responding, still trying"),
    ("async-storage-after-fork", "  File \"/lib/fsspec/asyn.py\", line 91, in sync\n    if event.wait(1):"),
    ("tokenizers-fork", "huggingface/tokenizers: The current process just got forked, after parallelism has already been used. Disabling parallelism to avoid deadlocks..."),
    ("oversubscription", "UserWarning: This DataLoader will create 8 worker processes in total. Our suggested max number of worker in current system is 4, which is smaller than what this DataLoader is going to create."),
    # -- samples
    ("bad-sample", caught("PIL.UnidentifiedImageError", "cannot identify image file '/data/1.jpg'")),
    ("bad-sample", caught("OSError", "image file is truncated (9 bytes not processed)")),
    ("bad-sample", caught("FileNotFoundError", "[Errno 2] No such file or directory: '/data/7.jpg'")),
    ("python-exception", caught("KeyError", "'label'")),
    ("python-exception", caught("ValueError", "could not broadcast input array")),
    ("collate-shape", caught("RuntimeError", "stack expects each tensor to be equal size, but got [3, 4] at entry 0 and [3, 5] at entry 1")),
    ("collate-shape", caught("RuntimeError", "Trying to resize storage that is not resizable")),
    ("collate-shape", caught("TypeError", "default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists; found <class 'NoneType'>")),
    ("reraise-broken", "  File \"/lib/torch/_utils.py\", line 722, in reraise\n    raise exception\nTypeError: HTTPError.__init__() missing 4 required positional arguments: 'code', 'msg', 'hdrs', and 'fp'"),
    ("iterable-duplicates", "UserWarning: Length of IterableDataset <D object> was reported to be 10 (when accessing len(dataloader)), but 11 samples have been fetched."),
    ("handle-shared-across-fork", "KeyError: 'Unable to open object (bad object header version number)'"),
    ("handle-shared-across-fork", "psycopg2.OperationalError: SSL error: decryption failed or bad record mac"),
    ("iterator-dead-after-error", "RuntimeError: generator raised StopIteration"),
    # -- around it
    ("uneven-ranks", "[rank3]:[E1105 10:12:44] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=912, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1800432 milliseconds before timing out."),
    ("lightning-reinstantiate", "MisconfigurationException: Trying to inject custom `DistributedSampler` into the `MyLoader` instance."),
    ("accelerate-rebuild", "KeyError: '_sampler_iter_yielded'"),
    ("stateful-gaps", "KeyError: '_worker_snapshots'"),
    ("timeout-api", "AssertionError: _SingleProcessDataLoaderIter requires timeout == 0"),
    # -- as logs look
    ("oom-killed", "\x1b[31mEpoch 1:  40%|####      | 40/100\rEpoch 1:  41%|####      | 41/100\x1b[0m\r" + "Out of memory: Killed process 5 (python)"),
    ("allocation-failed", "[rank0]: MemoryError"),
]  # fmt: skip

HEALTHY: list[str] = [
    "",
    "\n\n",
    "Epoch 1/10: loss 0.51 acc 0.81\nEpoch 2/10: loss 0.44 acc 0.84\nSaved checkpoint to runs/2.pt\n",
    "Epoch 3:  99%|#########9| 990/1000 [01:10<00:00, 14.1it/s, loss=0.3]\rEpoch 3: 100%|##########| 1000/1000",
    "Traceback (most recent call last):\n  File \"train.py\", line 9, in <module>\n    main()\nTypeError: main() missing 1 required positional argument: 'config'",
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 23.69 GiB total capacity)",
    "Traceback (most recent call last):\nKeyError: 'model_state'",
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x100 and 512x10)",
    "ModuleNotFoundError: No module named 'torch'",
    "usage: train.py [-h] [--num-workers N]\ntrain.py: error: unrecognized arguments: --workers 8",
    "INFO: 4 workers started, prefetch_factor=2, pin_memory=True, timeout=0",
    "W1105 nccl: connection to rank 3 closed\nE: early stopping: validation loss did not improve",
    "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='hub', port=443): Max retries exceeded",
    "FAILED tests/test_model.py::test_forward - assert 0.1 == 0.2\n1 failed, 31 passed in 3.1s",
    "[    1.234567] usb 1-1: new high-speed USB device number 2\n[    2.1] EXT4-fs (sda1): mounted filesystem",
    "Successfully installed numpy-2.4.6 torch-2.13.0\nWARNING: You are using pip version 20",
    "ValueError: optimizer got an empty parameter list",
    "wandb: Run summary: loss 0.1\nwandb: Synced 5 files. Killed time budget: none",
    "PermissionError: [Errno 13] Permission denied: '/root/checkpoints'",
    "ERROR: Could not find a version that satisfies the requirement torchh\nsegmentation model loaded, faults: 0",
    "Name: pod1\nStatus: Running\n    State: Running\n    Last State: Terminated\n      Reason: Completed\n      Exit Code: 0",
]  # fmt: skip
