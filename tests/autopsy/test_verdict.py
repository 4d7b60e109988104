"""From evidence to a cause: a table, the doubtful cases included."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.autopsy.catalogue import CATALOGUE, UNKNOWN
from holdfast.autopsy.cause import Confidence
from holdfast.autopsy.evidence import Evidence, Kills, MemorySample, TrainerThread
from holdfast.autopsy.machine_facts import MachineFacts
from holdfast.autopsy.readers.procfs import Activity, Fill
from holdfast.autopsy.verdict import Run, judge
from holdfast.explain.clues import Finding, find

FULL, ROOMY, SMALL = Fill(64 << 20, 0), Fill(24 << 30, 23 << 30), Fill(64 << 20, 60 << 20)
STILL = Kills(group=0, machine=0)
NAMED = "Memory cgroup out of memory: Killed process 7 (python) total-vm:1kB"
AT_NULL = "python[7]: segfault at 0 ip 00007f628af23219 sp 00007ffd78d46b88 error 4 in libc.so.6"
BY_THE_STACK = (
    "python[7]: segfault at 7ffd78d46ff8 ip 00007f628af2 sp 00007ffd78d47000 error 6 in x"
)
FRAME = '  File "/home/me/data.py", line 3 in __getitem__\n'
CV2 = '  File "/lib/python3/site-packages/cv2/__init__.py", line 3 in resize\n' + FRAME
MEMMAP = '  File "/lib/numpy/_core/memmap.py", line 3 in __getitem__\n' + FRAME

BESIDE = TrainerThread("cache", ('File "/home/me/data.py", line 90 in refresh',))
ASIDE = TrainerThread(
    "tqdm", ('File "/lib/python3/site-packages/tqdm/_monitor.py", line 60 in run',)
)


def killed(**more: Any) -> Evidence:
    return Evidence(signal="SIGKILL", exitcode=-9, pid=7, ready=True, **more)


def died(signal: str, **more: Any) -> Evidence:
    return Evidence(signal=signal, exitcode=-1, pid=7, ready=True, **more)


def stalled(state: str, wchan: str | None, busy: bool | None = False, **more: Any) -> Evidence:
    seen = Activity(state, wchan, 5)
    return Evidence(
        signal="SIGABRT", pid=7, stalled=True, sent_by_us=True, activity=seen, busy=busy, **more
    )


TABLE: list[tuple[str, Evidence, str, Confidence]] = [
    # -- SIGKILL
    ("named by the kernel", killed(kernel_lines=(NAMED,), kernel_readable=True), "oom-killed", "high"),
    ("counted in its group", killed(kills=Kills(1, "/g", 1)), "oom-killed", "high"),
    ("counted, log unreadable, two died, two counted", killed(kills=Kills(2, "/g", 2, 2)), "oom-killed", "high"),
    ("counted once, two died", killed(kills=Kills(1, "/g", 1, 2)), "oom-killed", "low"),
    ("counted once, but the log names another", killed(kills=Kills(1, "/g", 1), kernel_readable=True, kernel_victims=(9,)), "killed-from-outside", "medium"),
    ("counted twice, and the log names one other", killed(kills=Kills(2, "/g", 2), kernel_readable=True, kernel_victims=(9,)), "oom-killed", "high"),
    ("only the machine's counter, no groups", killed(kills=Kills(None, None, 1)), "oom-killed", "medium"),
    ("the machine's counter, two died", killed(kills=Kills(None, None, 1, 2)), "oom-killed", "low"),
    ("another group's kill", killed(kills=Kills(0, None, 1)), "killed-from-outside", "low"),
    ("nothing moved", killed(kills=STILL), "killed-from-outside", "medium"),
    ("nothing moved, and CPU time is used up", killed(kills=STILL, cpu_seconds=0.97, cpu_limit=1.0), "cpu-limit", "high"),
    ("nothing moved, and CPU time is left", killed(kills=STILL, cpu_seconds=0.7, cpu_limit=1.0), "killed-from-outside", "medium"),
    ("nothing moved, and minutes of CPU time are left", killed(kills=STILL, cpu_seconds=3500.0, cpu_limit=3600.0), "killed-from-outside", "medium"),
    ("more CPU time than one process can use", killed(kills=STILL, cpu_seconds=9.0, cpu_limit=1.0), "cpu-limit", "medium"),
    ("CPU time without a limit", killed(kills=STILL, cpu_seconds=900.0), "killed-from-outside", "medium"),
    ("only the machine's counter could be read", killed(kills=Kills(None, None, 0)), "killed-from-outside", "medium"),
    ("only the group could be read", killed(kills=Kills(0, None, None)), "killed-from-outside", "medium"),
    ("nothing could be read", killed(), "killed-unexplained", "medium"),
    ("its status is not known", Evidence(disappeared=True, kills=STILL), "killed-unexplained", "low"),
    ("the nursery was killed", Evidence(disappeared=True, nursery_end="was killed by SIGKILL"), "killed-unexplained", "low"),
    ("the nursery raised", Evidence(disappeared=True, nursery_end="was killed by SIGKILL", nursery_error="Traceback …\nOSError: 1"), "nursery-failed", "high"),
    ("the nursery exited", Evidence(disappeared=True, nursery_end="exited by itself with code 1"), "nursery-failed", "high"),
    # -- SIGBUS
    ("full /dev/shm", died("SIGBUS", shm=FULL), "shm-exhausted", "high"),
    ("full /dev/shm, but a memmap", died("SIGBUS", shm=FULL, stack=MEMMAP), "shm-exhausted", "medium"),
    ("room in /dev/shm, a memmap", died("SIGBUS", shm=ROOMY, stack=MEMMAP), "sigbus-not-shm", "high"),
    ("room in /dev/shm", died("SIGBUS", shm=ROOMY, stack=FRAME), "sigbus-not-shm", "medium"),
    ("small /dev/shm, empty by now", died("SIGBUS", shm=SMALL, stack=FRAME), "shm-exhausted", "low"),
    ("/dev/shm unknown", died("SIGBUS"), "shm-exhausted", "low"),
    # -- a lock, and who may have held it
    ("a lock, its file another thread's at the fork", stalled("S", "futex_wait", stack=FRAME, alone=True, neighbours=(BESIDE,)), "fork-lock-deadlock", "medium"),
    ("a lock, and the worker has threads that may release it", stalled("S", "futex_wait", stack=FRAME, alone=False, neighbours=(BESIDE,)), "silent-stall", "medium"),
    ("a lock, and a thread that has nothing to do with it", stalled("S", "futex_wait", stack=FRAME, alone=True, neighbours=(ASIDE,)), "silent-stall", "medium"),
    # -- crashes
    ("segfault with a stack", died("SIGSEGV", stack=FRAME), "native-segv", "high"),
    ("segfault without", died("SIGSEGV"), "native-segv", "medium"),
    ("segfault without, though a handler was there", died("SIGSEGV", handlers=True), "stack-overflow", "medium"),
    ("segfault without, its handler replaced", died("SIGSEGV", handlers=False), "native-segv", "medium"),
    ("segfault without, and the kernel says where", died("SIGSEGV", handlers=True, kernel_lines=(AT_NULL,)), "native-segv", "medium"),
    ("segfault by the stack pointer", died("SIGSEGV", handlers=False, kernel_lines=(BY_THE_STACK,)), "stack-overflow", "medium"),
    ("endless recursion", died("SIGSEGV", stack=FRAME * 60), "stack-overflow", "medium"),
    ("SIGFPE", died("SIGFPE", stack=FRAME), "native-segv", "high"),
    ("SIGILL", died("SIGILL", stack=FRAME), "illegal-instruction", "high"),
    ("abort without a word", died("SIGABRT", stack=FRAME, stderr=""), "abort", "high"),
    ("abort, words unread", died("SIGABRT", stack=FRAME), "abort", "medium"),
    ("abort of bad_alloc", died("SIGABRT", stderr="terminate called after throwing an instance of 'std::bad_alloc'\n"), "allocation-failed", "medium"),
    ("double free", died("SIGABRT", stderr="free(): double free detected in tcache 2\n"), "abort", "high"),
    ("abort of shared memory's names", died("SIGABRT", stderr="terminate called after throwing an instance of 'c10::Error'\n  what(): could not unlink the shared memory file /torch_7_1 : No such file"), "file-system-strategy", "medium"),
    ("SIGXCPU", died("SIGXCPU"), "cpu-limit", "high"),
    ("SIGALRM", died("SIGALRM"), "stray-signal", "high"),
    ("SIGRTMIN", died("SIGRTMIN"), "stray-signal", "high"),
    ("the user asked us to", killed(sent_by_us=True, kills=Kills(1, "/g", 1)), "ended-on-request", "high"),
    ("SIGTRAP", died("SIGTRAP"), "macos-trap", "low"),
    # -- told to stop
    ("SIGTERM for all", died("SIGTERM", group_signal="SIGTERM"), "group-sigterm", "high"),
    ("SIGTERM for all, a moment ago", died("SIGTERM", group_signal="SIGTERM", group_signal_ago=0.1), "group-sigterm", "high"),
    ("SIGTERM for all, a minute ago", died("SIGTERM", group_signal="SIGTERM", group_signal_ago=60.0), "killed-from-outside", "medium"),
    ("SIGHUP after SIGTERM for all", died("SIGHUP", group_signal="SIGTERM", group_signal_ago=0.1), "group-sigterm", "medium"),
    ("SIGKILL half a minute after SIGTERM for all", killed(kills=STILL, group_signal="SIGTERM", group_signal_ago=30.0), "group-sigterm", "medium"),
    ("SIGKILL after Ctrl-C", killed(kills=STILL, group_signal="SIGINT", group_signal_ago=30.0), "killed-from-outside", "medium"),
    ("an oom kill after SIGTERM for all", killed(kills=Kills(1, "/g", 1), group_signal="SIGTERM", group_signal_ago=30.0), "oom-killed", "high"),
    ("exit after Ctrl-C", Evidence(exitcode=1, ready=True, group_signal="SIGINT", group_signal_ago=0.1), "ctrl-c-flood", "medium"),
    ("exit long after Ctrl-C", Evidence(exitcode=1, ready=True, group_signal="SIGINT", group_signal_ago=60.0), "exited-by-itself", "high"),
    ("SIGTERM for one", died("SIGTERM"), "killed-from-outside", "medium"),
    ("SIGTERM for several", died("SIGTERM", siblings=2), "group-sigterm", "medium"),
    ("Ctrl-C", died("SIGINT", group_signal="SIGINT"), "ctrl-c-flood", "high"),
    # -- exits
    ("os._exit(3)", Evidence(exitcode=3, ready=True), "exited-by-itself", "high"),
    ("a library that gives up, and says why", Evidence(exitcode=1, ready=True, stderr="OpenBLAS blas_thread_init: pthread_create failed for thread 3 of 8: Resource temporarily unavailable\n"), "task-limit", "medium"),
    ("words that need not be the reason", Evidence(exitcode=3, ready=True, stderr="OSError: image file is truncated (14 bytes not processed)\n"), "exited-by-itself", "high"),
    ("words of long ago", Evidence(exitcode=1, ready=True, stderr="OpenBLAS blas_thread_init: pthread_create failed for thread 3\n" + "fine\n" * 20), "exited-by-itself", "high"),
    ("os._exit(0)", Evidence(exitcode=0, ready=True), "exited-by-itself", "high"),
    ("status 1 before ready", Evidence(exitcode=1, ready=False), "exited-by-itself", "medium"),
    ("status 1 before ready, and why", Evidence(exitcode=1, ready=False, findings=find("before the\n current process has finished its bootstrapping phase")), "spawn-bootstrap", "high"),
    # -- stalls
    ("stopped", stalled("T", "do_signal_stop"), "stopped", "high"),
    ("traced", stalled("t", "ptrace_stop"), "stopped", "high"),
    ("frozen, v1", stalled("D", "__refrigerator"), "stopped", "high"),
    ("frozen, v2", stalled("S", "do_freezer_trap"), "stopped", "high"),
    ("NFS", stalled("D", "nfs_wait_bit_killable"), "storage-stall", "high"),
    ("D, unknown place", stalled("D", None), "storage-stall", "medium"),
    ("FUSE, interruptible", stalled("S", "request_wait_answer_fuse"), "storage-stall", "medium"),
    ("spinning", stalled("R", None, True), "endless-loop", "medium"),
    ("running, hardly", stalled("R", None, False), "endless-loop", "low"),
    ("asleep between bursts", stalled("S", "hrtimer_nanosleep", True), "endless-loop", "medium"),
    ("sleeping", stalled("S", "hrtimer_nanosleep"), "silent-stall", "high"),
    ("reading a pipe", stalled("S", "anon_pipe_read"), "silent-stall", "high"),
    ("a lock", stalled("S", "futex_do_wait"), "silent-stall", "medium"),
    ("a lock in cv2 after a fork with threads", stalled("S", "futex_do_wait", stack=CV2, start_method="fork", threads_at_fork=5), "fork-lock-deadlock", "medium"),
    ("a lock in cv2 under spawn", stalled("S", "futex_do_wait", stack=CV2, start_method="spawn", threads_at_fork=5), "silent-stall", "medium"),
    ("fsspec", stalled("S", "futex_do_wait", stack='  File "/x/fsspec/asyn.py", line 9 in sync\n'), "async-storage-after-fork", "medium"),
    ("no /proc", replace(stalled("S", None), activity=None), "silent-stall", "low"),
    # -- not forked
    ("no memory to fork", Evidence(forked=False, errno=12), "fork-enomem", "high"),
    ("no task to fork", Evidence(forked=False, errno=11, pids_max=10, pids_current=10), "task-limit", "high"),
    ("another errno", Evidence(forked=False, errno=38), UNKNOWN, "low"),
    # -- only words, or nothing
    ("only words", Evidence(findings=(Finding("fd-exhaustion", "high", 3, "[Errno 24]"),)), "fd-exhaustion", "high"),
    ("nothing", Evidence(), UNKNOWN, "low"),
]  # fmt: skip


def test_the_table() -> None:
    wrong = []
    for name, evidence, cause, confidence in TABLE:
        verdict = judge(evidence)
        if (verdict.cause, verdict.confidence) != (cause, confidence):
            wrong.append(
                f"{name}: {verdict.cause} ({verdict.confidence}), not {cause} ({confidence})"
            )
        assert verdict.because, name
    assert not wrong, "\n".join(wrong)


def test_whatever_is_not_sure_says_what_else_it_may_be_or_why() -> None:
    for name, evidence, cause, _ in TABLE:
        verdict = judge(evidence)
        assert cause not in verdict.perhaps, name
        if verdict.confidence == "low" and cause != UNKNOWN:
            assert verdict.perhaps, name


def test_a_verdict_names_the_sample_and_the_group() -> None:
    memory = (MemorySample(1.0, usage=40 << 20, limit=40 << 20, available=1 << 30),)
    verdict = judge(
        killed(
            kills=Kills(1, "/sys/fs/cgroup/memory/job"), sample=18233, memory=memory, oom_group=True
        )
    )
    assert verdict.sample == 18233
    said = "\n".join(verdict.because)
    assert "/sys/fs/cgroup/memory/job" in said
    assert "40 MiB of 40 MiB" in said
    assert "memory.oom.group" in said


def test_remedies_are_those_of_this_place() -> None:
    def commands(place: str) -> str:
        return " ".join(
            str(one)
            for one in judge(killed(kills=Kills(1, "/g")), MachineFacts(place=place)).remedies
        )

    assert "#SBATCH" in commands("slurm")
    assert "docker" not in commands("slurm")
    assert "resources:" in commands("kubernetes")
    assert "docker run" not in commands("")


HANGS = stalled("S", "futex_wait_queue", stack='  File "/lib/x.py", line 9 in get\n' + FRAME)


def to_do(evidence: Evidence, run: Run | None) -> str:
    return "\n".join(map(str, judge(evidence, MachineFacts(), run).remedies))


def test_remedies_fit_what_the_run_has() -> None:
    """No logbook is presumed, nor a stack where none was left."""
    without = to_do(HANGS, Run(2, 812))
    assert "print(loader.incidents[-1].stack)" in without
    assert "holdfast incidents" not in without
    within = to_do(HANGS, Run(2, 812, "runs/today"))
    assert "holdfast incidents --stacks runs/today" in within
    assert "print(" not in within
    for run in (Run(2, 812), Run(2, 812, "runs/today")):
        told = to_do(replace(HANGS, stack=""), run)
        assert told
        assert "stack it left" not in told
    of_anybody = judge(HANGS).remedies  # a text from elsewhere: each says what it is for
    assert [one.where for one in of_anybody][:2] == [
        "[holdfast with logbook=] ",
        "[holdfast without logbook=] ",
    ]


def test_remedies_are_those_for_the_loader_that_is_used() -> None:
    """To keep batches costs descriptors with torch's loader, and none with holdfast."""
    full = Evidence(forked=False, errno=24)
    ours = to_do(full, Run(8, 812))
    assert "clone()" not in ours
    assert "DataLoader(..., num_workers=4)" in ours
    assert "/proc/812/fd" in ours
    given = {str(one): one.given for one in judge(full, MachineFacts()).remedies}
    assert [kind for told, kind in given.items() if "clone()" in told] == ["torch's loader"]
    assert [kind for told, kind in given.items() if "num_workers" in told] == ["holdfast"]


def test_remedies_for_a_sample_are_not_given_where_there_was_none() -> None:
    """A crash in a start has nothing to do with samples, and the other way round."""
    starting = replace(died("SIGSEGV", stack=FRAME), ready=False)
    assert "worker_init_fn(0)" in to_do(starting, Run(2, 812))
    assert "dataset[" not in to_do(starting, Run(2, 812))
    assert "on_bad_sample" not in to_do(starting, Run(2, 812))
    loading = died("SIGSEGV", stack=FRAME, sample=7)
    assert "dataset[7]" in to_do(loading, Run(2, 812))
    assert "worker_init_fn" not in to_do(loading, Run(2, 812))


def test_more_or_less_patience_is_measured_by_what_there_is() -> None:
    run = Run(2, 812, stall_timeout=40.0)
    assert "stall_timeout=20)" in to_do(HANGS, run)
    assert "stall_timeout=160)" in to_do(stalled("R", None, busy=True), run)


def test_a_stall_names_the_line_of_the_users_own_that_led_to_it() -> None:
    library = stalled("S", "futex", stack=CV2)
    assert (
        'ends in File "/lib/python3/site-packages/cv2/__init__.py", line 3 in resize, called from '
        'File "/home/me/data.py", line 3 in __getitem__'
    ) in "\n".join(judge(library).because)


_signals = st.sampled_from(
    [
        None,
        "SIGKILL",
        "SIGSEGV",
        "SIGBUS",
        "SIGABRT",
        "SIGTERM",
        "SIGINT",
        "SIGXCPU",
        "SIGFPE",
        "SIGUSR2",
    ]
)
_counts = st.sampled_from([None, 0, 1, 2])


@given(
    signal=_signals,
    ours=st.booleans(),
    group=_counts,
    machine=_counts,
    deaths=st.integers(1, 3),
    shm=st.sampled_from([None, FULL, ROOMY, SMALL]),
    stack=st.sampled_from(["", FRAME, FRAME * 50, CV2, MEMMAP]),
    line=st.sampled_from([(), (NAMED,)]),
    exitcode=st.sampled_from([None, 0, 1, -9]),
)
def test_no_death_is_called_out_of_memory_without_a_counter_or_the_kernels_word(
    signal: str | None, ours: bool, group: int | None, machine: int | None, deaths: int, shm: Fill | None,
    stack: str, line: tuple[str, ...], exitcode: int | None,
) -> None:  # fmt: skip
    evidence = Evidence(
        signal=signal, exitcode=exitcode, pid=7, sent_by_us=ours, ready=True, shm=shm, stack=stack,
        kills=Kills(group, "/g", machine, deaths), kernel_lines=line, kernel_readable=bool(line),
    )  # fmt: skip
    verdict = judge(evidence)
    assert verdict.cause == UNKNOWN or verdict.cause in CATALOGUE
    assert verdict.confidence in get_args(Confidence)
    if verdict.cause == "oom-killed":
        assert group or machine or line
        if verdict.confidence == "high":
            assert line or (group or 0) >= deaths
    if verdict.cause == "killed-from-outside" and signal == "SIGKILL" and not ours:
        assert not group
        assert not machine or group == 0  # a kill in another control group
    if ours:
        assert verdict.cause != "oom-killed"


@pytest.mark.parametrize(
    "evidence", [row[1] for row in TABLE[:12]], ids=[row[0] for row in TABLE[:12]]
)
def test_evidence_goes_into_a_logbook(evidence: Evidence) -> None:
    import json

    told = json.loads(json.dumps(evidence.to_json()))
    assert told.get("signal") == evidence.signal
    assert "stack" not in told


def test_what_became_of_the_process_that_starts_workers_is_said_as_it_was() -> None:
    def because(**known: str) -> str:
        return "\n".join(judge(Evidence(disappeared=True, **known)).because)

    assert "raised\n        Traceback …\n        OSError: 1" in because(
        nursery_error="Traceback …\nOSError: 1\n"
    )
    assert "crashed with a segmentation fault" in because(
        nursery_end="crashed with a segmentation fault (SIGSEGV)"
    )
    assert "is gone, and the workers ended with it" in because()
    assert "killed" not in because() + because(nursery_end="exited by itself with code 1")


def test_that_a_handler_was_replaced_is_only_said_where_that_was_seen() -> None:
    def said(handlers: bool | None) -> str:
        return " ".join(judge(Evidence(signal="SIGSEGV", handlers=handlers)).because)

    assert "had replaced the handler" in said(False)
    assert "had replaced the handler" not in said(None)
    assert "left no stack" in said(None)
