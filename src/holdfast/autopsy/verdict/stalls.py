"""Why a worker made no progress: from what it was doing before it was killed for that."""

from __future__ import annotations

import re

from holdfast.autopsy.evidence import Evidence, TrainerThread
from holdfast.autopsy.stack import file_of, frames
from holdfast.autopsy.verdict.draft import Verdict, verdict, where
from holdfast.code_origin import of_file

_STORAGE = re.compile(
    r"nfs|rpc_|fuse|request_wait_answer|ceph|cifs|smb|lustre|ptlrpc|gpfs|beegfs|9p|p9_|io_schedule|wait_on_page|folio_wait|"
    r"blk_|jbd2|xfs_|ext4_|btrfs|submit_bio|wait_on_buffer|netfs"
)
_FROZEN = re.compile(r"refrigerator|freezer|do_freezer_trap")
_LOCK = re.compile(r"futex")
_FORK_UNSAFE = re.compile(
    r"/(cv2|fsspec|logging|librosa|numba|sklearn|gomp|mkl|tensorflow|grpc)\b|"
    r'File "[^"]*/(cv2|fsspec|logging|librosa)/',
)
_STATES = {
    "S": "asleep (state S)",
    "D": "stuck in the kernel (state D)",
    "R": "running (state R)",
    "T": "stopped (state T)",
    "t": "stopped by a debugger (state t)",
}


def stall(e: Evidence) -> Verdict | None:
    """We killed it for lack of progress: what it was doing before that says why."""
    if not e.stalled:
        return None
    seen = e.activity
    if seen is None:
        said = "it made no progress; what it was doing could not be read"
        if e.actor:
            silent = "" if e.silent is None else f" for {e.silent:.1f} s"
            said = f"actor {e.actor} on node {e.node or 'unknown'} made no progress{silent}"
        return verdict(
            "silent-stall",
            "low" if not e.stack else "medium",
            said,
            *where(e.stack),
            perhaps=("stopped", "storage-stall", "endless-loop"),
        )
    function = f", in the kernel's {seen.wchan}" if seen.wchan else ""
    state = _STATES.get(seen.state, f"in state {seen.state}")
    end = "given up" if e.start_method == "thread" else "killed"
    said = f"before it was {end} it was {state}{function}"
    if seen.wchan and _FROZEN.search(seen.wchan):
        return verdict("stopped", "high", said, "that is the kernel's freezer")
    if seen.state in "Tt":
        return verdict("stopped", "high", said, "state T is a stopped process")
    if seen.state == "D":
        storage = seen.wchan is not None and _STORAGE.search(seen.wchan)
        return verdict(
            "storage-stall",
            "high" if storage else "medium",
            said,
            "a process in state D waits inside the kernel, usually for a disk or a file server",
            perhaps=() if storage else ("stopped",),
        )
    if seen.wchan and _STORAGE.search(seen.wchan):
        return verdict(
            "storage-stall",
            "high" if e.survived_sigkill else "medium",
            said,
            "that function waits for a file system to answer",
            *where(e.stack),
            perhaps=() if e.survived_sigkill else ("silent-stall",),
        )
    if e.busy or (seen.state == "R" and e.busy is not False):
        return verdict(
            "endless-loop",
            "medium" if seen.state == "R" or e.busy else "low",
            said,
            "it used CPU time all the while",
            *where(e.stack),
            perhaps=("silent-stall",),
        )
    if seen.state == "R":
        return verdict(
            "endless-loop",
            "low",
            said,
            "but used little CPU time",
            *where(e.stack),
            perhaps=("silent-stall",),
        )
    said_too = "it used no CPU time" if e.busy is False else ""
    reasons = tuple(filter(None, (said, said_too, *where(e.stack))))
    if seen.wchan and _LOCK.search(seen.wchan):
        return _lock(e, reasons)
    return verdict("silent-stall", "high" if e.busy is False and seen.wchan else "medium", *reasons)


def _lock(e: Evidence, reasons: tuple[str, ...]) -> Verdict:
    """It waits for a lock: after a fork from a process with threads there is a likely reason."""
    forked = e.start_method == "fork" and (e.threads_at_fork or 1) > 1
    if re.search(r"fsspec[/.]asyn", e.stack):
        return verdict(
            "async-storage-after-fork",
            "medium",
            *reasons,
            "its stack is in fsspec's event loop",
            perhaps=("silent-stall",),
        )
    if forked and _FORK_UNSAFE.search(e.stack):
        return verdict(
            "fork-lock-deadlock",
            "medium",
            *reasons,
            f"it was forked from a process with {e.threads_at_fork} threads, and its stack is in a "
            "library that has its own locks",
            perhaps=("silent-stall", "openmp-after-use"),
        )
    if e.alone is not False and (lost := _lost_holder(e)) is not None:
        return verdict(
            "fork-lock-deadlock",
            "medium",
            *reasons,
            f"when it was forked, the trainer's thread {lost[0].name!r} was in the same file: "
            f"{lost[1]}; if that thread held the lock, it can never be released in the worker",
            perhaps=("silent-stall",),
        )
    perhaps = ("fork-lock-deadlock",) if forked else ()
    return verdict(
        "silent-stall",
        "medium",
        *reasons,
        "it waits for a lock that another thread holds, or for a queue or an event",
        perhaps=perhaps,
    )


def _lost_holder(e: Evidence) -> tuple[TrainerThread, str] | None:
    """A trainer's thread that was, at the fork, in a file that the worker now waits in; and its
    frame there."""
    mine = {file_of(one) for one in frames(e.stack)}
    for thread in e.neighbours:
        for frame in thread.frames:
            file = file_of(frame)
            if file in mine and of_file(file) in ("user", "library"):
                return thread, frame
    return None
