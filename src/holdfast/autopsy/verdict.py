"""From evidence to a cause, and how certain it is.

A pure function: no file, no clock, no process. The rules are those of a careful post-mortem, in
this order: did holdfast end the worker itself; did the worker ever start; which signal or status;
which counters moved; which messages were printed. Two errors are worse than "unknown" here: saying
"out of memory" without a counter, and being certain and wrong. So a verdict with another possible
explanation is at most "medium", and names that explanation.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from textwrap import indent
from typing import Any

from holdfast.authors import of_file
from holdfast.autopsy.catalogue import CATALOGUE, UNKNOWN
from holdfast.autopsy.cause import Confidence, Remedy
from holdfast.autopsy.clues import Finding, find
from holdfast.autopsy.evidence import Evidence, Neighbour
from holdfast.autopsy.machine import Machine, in_words
from holdfast.autopsy.stack import file_of, frames, innermost, users

__all__ = ["Run", "Verdict", "judge", "remedies_for"]

_AT_ONCE = 5.0  # seconds after a signal to the process group in which a death may be due to it
_SMALL_SHM = 256 << 20  # bytes: a container's default /dev/shm, and a little more
_STORAGE = re.compile(
    r"nfs|rpc_|fuse|request_wait_answer|ceph|cifs|smb|lustre|ptlrpc|gpfs|beegfs|9p|p9_|io_schedule|wait_on_page|folio_wait|"
    r"blk_|jbd2|xfs_|ext4_|btrfs|submit_bio|wait_on_buffer|netfs"
)
_FROZEN = re.compile(r"refrigerator|freezer|do_freezer_trap")
_LOCK = re.compile(r"futex")
_MAPPED = re.compile(r"memmap|lmdb|mmap|safetensors|pyarrow|hdf5|h5py", re.IGNORECASE)
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
_CRASHES = {"SIGSEGV": "native-segv", "SIGFPE": "native-segv", "SIGILL": "illegal-instruction"}


@dataclass(frozen=True)
class Verdict:
    """A cause, how certain it is, and why."""

    cause: str
    confidence: Confidence
    sample: Any = None
    because: tuple[str, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    perhaps: tuple[str, ...] = ()
    """What else it may be."""

    @property
    def title(self) -> str:
        if self.cause == UNKNOWN:
            return "ended for an unknown reason"
        return CATALOGUE[self.cause].title


@dataclass(frozen=True)
class Run:
    """The run it happened in, if that run used holdfast."""

    workers: int
    trainer: int  # its pid
    logbook: str | None = None  # as the user gave it
    stall_timeout: float | None = None


def judge(evidence: Evidence, machine: Machine | None = None, run: Run | None = None) -> Verdict:
    """The verdict on one death, stall or failed start."""
    draft = next(found for rule in _RULES if (found := rule(evidence)) is not None)
    because = draft.because + tuple(_asides(evidence, draft))
    facts: dict[str, object] = {"pid": evidence.pid, "sample": _shown(evidence.sample)}
    remedies = remedies_for(
        draft.cause,
        machine,
        run,
        stack=bool(evidence.stack),
        starting=evidence.ready is False,
        **facts,
    )
    return Verdict(draft.cause, draft.confidence, evidence.sample, because, remedies, draft.perhaps)


def remedies_for(
    slug: str,
    machine: Machine | None,
    run: Run | None = None,
    *,
    stack: bool = True,
    starting: bool = False,
    **facts: object,
) -> tuple[Remedy, ...]:
    """A cause's remedies with this machine's figures, without those for other places; if the run is
    known, also without those that do not apply to it."""
    if slug == UNKNOWN:
        return ()
    if run is not None:
        facts |= {"logbook": run.logbook, "trainer": run.trainer}
        if run.stall_timeout is not None:
            facts["stall_sooner"] = f"{run.stall_timeout / 2:g}"
            facts["stall_later"] = f"{run.stall_timeout * 4:g}"
    known = (machine or Machine()).facts(workers=None if run is None else run.workers, **facts)
    found = [
        remedy.filled(known)
        for remedy in CATALOGUE[slug].remedies
        if machine is None or remedy.place in ("", machine.place)
    ]
    if run is None:
        return tuple(found)
    kept = "holdfast with logbook=" if run.logbook is not None else "holdfast without logbook="
    fitting = {"", "holdfast"}
    fitting |= {kept} if stack else set()
    fitting |= {"a start"} if starting else {"a sample"} if facts.get("sample") else set()
    return tuple(replace(one, given="") for one in found if one.given in fitting)


def _verdict(
    cause: str, confidence: Confidence, *because: str, perhaps: tuple[str, ...] = ()
) -> Verdict:
    return Verdict(cause, confidence, None, because, (), perhaps)


# -- the rules, in order -------------------------------------------------------------------


def _not_born(e: Evidence) -> Verdict | None:
    if e.born:
        return None
    said = f"fork() failed: {os.strerror(e.errno or 0)} (errno {e.errno})"
    if e.errno == errno.ENOMEM:
        return _verdict("fork-enomem", "high", said)
    if e.errno == errno.EAGAIN:
        return _verdict("task-limit", "high", said, *_tasks(e))
    said = f"its start failed: {os.strerror(e.errno or 0)} (errno {e.errno})"
    if e.errno in (errno.EMFILE, errno.ENFILE):
        return _verdict("fd-exhaustion", "high", said)
    return _verdict(UNKNOWN, "low", said)


def _stall(e: Evidence) -> Verdict | None:
    """We killed it for lack of progress: what it was doing before that says why."""
    if not e.stalled:
        return None
    seen = e.activity
    if seen is None:
        said = "it made no progress; what it was doing could not be read"
        return _verdict(
            "silent-stall",
            "low" if not e.stack else "medium",
            said,
            *_where(e.stack),
            perhaps=("stopped", "storage-stall", "endless-loop"),
        )
    where = f", in the kernel's {seen.wchan}" if seen.wchan else ""
    state = _STATES.get(seen.state, f"in state {seen.state}")
    said = f"before it was killed it was {state}{where}"
    if seen.wchan and _FROZEN.search(seen.wchan):
        return _verdict("stopped", "high", said, "that is the kernel's freezer")
    if seen.state in "Tt":
        return _verdict("stopped", "high", said, "state T is a stopped process")
    if seen.state == "D":
        storage = seen.wchan is not None and _STORAGE.search(seen.wchan)
        return _verdict(
            "storage-stall",
            "high" if storage else "medium",
            said,
            "a process in state D waits inside the kernel, usually for a disk or a file server",
            perhaps=() if storage else ("stopped",),
        )
    if seen.wchan and _STORAGE.search(seen.wchan):
        return _verdict(
            "storage-stall",
            "high" if e.survived_sigkill else "medium",
            said,
            "that function waits for a file system to answer",
            *_where(e.stack),
            perhaps=() if e.survived_sigkill else ("silent-stall",),
        )
    if e.busy or (seen.state == "R" and e.busy is not False):
        return _verdict(
            "endless-loop",
            "medium" if seen.state == "R" or e.busy else "low",
            said,
            "it used CPU time all the while",
            *_where(e.stack),
            perhaps=("silent-stall",),
        )
    if seen.state == "R":
        return _verdict(
            "endless-loop",
            "low",
            said,
            "but used little CPU time",
            *_where(e.stack),
            perhaps=("silent-stall",),
        )
    said_too = "it used no CPU time" if e.busy is False else ""
    reasons = tuple(filter(None, (said, said_too, *_where(e.stack))))
    if seen.wchan and _LOCK.search(seen.wchan):
        return _lock(e, reasons)
    return _verdict(
        "silent-stall", "high" if e.busy is False and seen.wchan else "medium", *reasons
    )


def _lock(e: Evidence, reasons: tuple[str, ...]) -> Verdict:
    """It waits for a lock: after a fork from a process with threads there is a likely reason."""
    forked = e.start_method == "fork" and (e.threads_at_fork or 1) > 1
    if re.search(r"fsspec[/.]asyn", e.stack):
        return _verdict(
            "async-storage-after-fork",
            "medium",
            *reasons,
            "its stack is in fsspec's event loop",
            perhaps=("silent-stall",),
        )
    if forked and _FORK_UNSAFE.search(e.stack):
        return _verdict(
            "fork-lock-deadlock",
            "medium",
            *reasons,
            f"it was forked from a process with {e.threads_at_fork} threads, and its stack is in a "
            "library that has its own locks",
            perhaps=("silent-stall", "openmp-after-use"),
        )
    if e.alone is not False and (lost := _lost_holder(e)) is not None:
        return _verdict(
            "fork-lock-deadlock",
            "medium",
            *reasons,
            f"when it was forked, the trainer's thread {lost[0].name!r} was in the same file: "
            f"{lost[1]}; if that thread held the lock, it can never be released in the worker",
            perhaps=("silent-stall",),
        )
    perhaps = ("fork-lock-deadlock",) if forked else ()
    return _verdict(
        "silent-stall",
        "medium",
        *reasons,
        "it waits for a lock that another thread holds, or for a queue or an event",
        perhaps=perhaps,
    )


def _lost_holder(e: Evidence) -> tuple[Neighbour, str] | None:
    """A trainer's thread that was, at the fork, in a file that the worker now waits in; and its
    frame there."""
    mine = {file_of(one) for one in frames(e.stack)}
    for thread in e.neighbours:
        for frame in thread.frames:
            file = file_of(frame)
            if file in mine and of_file(file) in ("user", "library"):
                return thread, frame
    return None


def _start(e: Evidence) -> Verdict | None:
    """It never became ready, and said why."""
    if e.ready is not False or e.signal is not None or not e.findings:
        return None
    best = e.findings[0]
    return _said(best, f"it ended with status {e.exitcode} before it was ready")


def _by_itself(e: Evidence) -> Verdict | None:
    if not e.sent_by_itself:
        return None
    said = f"it sent {e.signal} to itself, by os.kill() with its own pid or the like"
    return _verdict("exited-by-itself", "high", said)


def _sigkill(e: Evidence) -> Verdict | None:
    if e.signal != "SIGKILL" or e.sent_by_us:
        return None
    return _named_by_kernel(e) or _spent(e) or _counted(e) or _not_counted(e)


def _named_by_kernel(e: Evidence) -> Verdict | None:
    named = [line for line in e.kernel_lines if re.search(r"[Kk]ill(ed)? process|oom-kill", line)]
    if not named:
        return None
    return _oom(e, "high", f"the kernel's log says: {named[-1]}")


def _spent(e: Evidence) -> Verdict | None:
    """At the hard limit on CPU time the kernel kills the process; no counter shows it."""
    if e.cpu_limit is None or e.cpu_seconds is None:
        return None
    # The limit counts ticks, `cpu_seconds` is measured; on a busy machine the two differ.
    if e.cpu_seconds < e.cpu_limit - max(0.25, e.cpu_limit / 100):
        return None
    said = f"it had used {e.cpu_seconds:.1f} s of CPU time, and {e.cpu_limit:g} s is its hard limit"
    if e.cpu_seconds > e.cpu_limit + max(1.0, e.cpu_limit / 100):  # no process lives that long
        return _verdict(
            "cpu-limit",
            "medium",
            said,
            "so a part of it was used by its child processes, which does not count",
            perhaps=("killed-from-outside", "oom-killed"),
        )
    return _verdict("cpu-limit", "high", said, "the kernel sends SIGKILL at that limit")


def _counted(e: Evidence) -> Verdict | None:
    kills = e.kills
    if not kills.group and not kills.machine:
        return None
    count = kills.group or kills.machine or 0
    others = [pid for pid in e.kernel_victims if pid != e.pid]
    if e.kernel_readable and len(others) >= count:
        # The kernel logs each victim before it kills it: the log explains the whole count.
        return _verdict(
            "killed-from-outside",
            "medium",
            "SIGKILL that holdfast did not send",
            f"the kernel killed {count} for memory, but its log names pid {others[-1]}, not this",
            "so a process sent it, perhaps the worker itself; a signal does not name its sender",
            perhaps=("oom-killed",),
        )
    if kills.group:
        said = f"oom_kill in {kills.group_path} went up by {kills.group}"
        if kills.group >= kills.deaths:
            return _oom(e, "high", said)
        return _oom(
            e,
            "low",
            said,
            f"but {kills.deaths} workers died in that time, so that may have been another one",
            perhaps=("killed-from-outside",),
        )
    said = f"oom_kill in /proc/vmstat went up by {kills.machine}, which counts the whole machine"
    if kills.group == 0:
        return _verdict(
            "killed-unexplained",
            "low",
            said,
            "the counter of this worker's control group did not move",
            perhaps=("oom-killed", "killed-from-outside"),
        )
    enough = (kills.machine or 0) >= kills.deaths
    return _oom(e, "medium" if enough else "low", said, perhaps=("killed-from-outside",))


def _not_counted(e: Evidence) -> Verdict:
    kills = e.kills
    if kills.group is None and kills.machine is None:
        return _verdict(
            "killed-unexplained",
            "medium" if not e.findings else "low",
            "SIGKILL that holdfast did not send; no counter and no kernel log could be read",
            perhaps=("oom-killed", "killed-from-outside"),
        )
    said = [
        "SIGKILL that holdfast did not send",
        "no oom_kill counter moved: "
        + " and ".join(
            name
            for name, known in (("control groups", kills.group), ("/proc/vmstat", kills.machine))
            if known is not None
        ),
    ]
    if e.group_signal == "SIGTERM":
        return _verdict(
            "group-sigterm",
            "medium",
            *said,
            f"{_to_all(e)}, as batch systems do before they kill",
            perhaps=("killed-from-outside",),
        )
    said.append(
        "so a process sent it, perhaps the worker itself; a signal does not name its sender"
    )
    return _verdict("killed-from-outside", "medium", *said)


def _oom(
    e: Evidence, confidence: Confidence, *because: str, perhaps: tuple[str, ...] = ()
) -> Verdict:
    said = [*because, *_memory(e)]
    if e.oom_group:
        said.append("memory.oom.group is set: next time the kernel may kill the whole container")
    return _verdict("oom-killed", confidence, *said, perhaps=perhaps)


def _bus(e: Evidence) -> Verdict | None:
    if e.signal != "SIGBUS":
        return None
    shm = e.shm
    mapped = next((line.strip() for line in e.stack.splitlines() if _MAPPED.search(line)), "")
    if shm is None:
        likely, other = ("sigbus-not-shm", "shm-exhausted")[:: 1 if mapped else -1]
        return _verdict(likely, "low", "SIGBUS; /dev/shm could not be looked at", perhaps=(other,))
    said = f"/dev/shm has {in_words(shm.free)} free of {in_words(shm.total)}"
    if shm.nearly_full:
        return _verdict(
            "shm-exhausted",
            "high" if not mapped else "medium",
            "SIGBUS",
            said,
            *_where(e.stack),
            perhaps=("sigbus-not-shm",) if mapped else (),
        )
    if shm.total <= _SMALL_SHM and not mapped:
        return _verdict(
            "shm-exhausted",
            "low",
            "SIGBUS",
            said + " now, but what the worker had there was freed when it died",
            perhaps=("sigbus-not-shm",),
        )
    reasons = ["SIGBUS", said + ", so shared memory was not the reason"]
    reasons += [f"its stack is in {mapped}"] if mapped else _where(e.stack)
    return _verdict(
        "sigbus-not-shm",
        "high" if mapped else "medium",
        *reasons,
        perhaps=() if mapped else ("shm-exhausted",),
    )


def _abort(e: Evidence) -> Verdict | None:
    if e.signal != "SIGABRT" or e.sent_by_us:
        return None
    said = "SIGABRT that holdfast did not send"
    if e.stderr is None:
        silent = "what it wrote to standard error was not kept: look for it there"
        return _verdict("abort", "medium", said, silent, perhaps=("allocation-failed",))
    for finding in find(_end_of(e.stderr)):
        if finding.slug in ("allocation-failed", "file-system-strategy", "shm-exhausted"):
            return _verdict(
                finding.slug,
                "medium",
                said,
                f"standard error says: {finding.text}",
                perhaps=("abort",),
            )
        if finding.slug == "abort":
            words = f"standard error says: {finding.text}"
            return _verdict("abort", "high", said, words, *_where(e.stack))
    return _verdict("abort", "high", said, *_where(e.stack))


def _crash(e: Evidence) -> Verdict | None:
    slug = _CRASHES.get(e.signal or "")
    if slug is None:
        return None
    said = [f"it died of {e.signal}"]
    said += [f"the kernel's log says: {line}" for line in e.kernel_lines[-1:]]
    if e.signal == "SIGSEGV":
        frame, count = _repeated(e.stack)
        if count >= _RECURSION:
            return _verdict(
                "stack-overflow",
                "medium",
                *said,
                f"one frame is {count} times in its stack: {frame}",
                perhaps=("native-segv",),
            )
        near = _fault_by_the_stack(e.kernel_lines)
        if near is not None or (not e.stack and e.handlers and not e.kernel_lines):
            return _verdict(
                "stack-overflow",
                "medium",
                *said,
                near
                or "it left no stack although its signal handlers were installed: they could not "
                "run, as when a thread's stack overflows",
                perhaps=("native-segv",),
            )
        if not e.stack:
            missing = e.handlers is False
            return _verdict(
                "native-segv",
                "medium",
                *said,
                "it left no stack"
                + (": something had replaced the handler that writes it" if missing else ""),
                perhaps=("stack-overflow",),
            )
    return _verdict(slug, "high", *said, *_where(e.stack))


_RECURSION = 20
_BY_THE_STACK = 64 << 10  # bytes


def _fault_by_the_stack(lines: tuple[str, ...]) -> str | None:
    """What the kernel's log says of a fault at the end of a stack."""
    for line in lines:
        match = re.search(r"segfault at ([0-9a-f]+) ip \S+ sp ([0-9a-f]+)", line)
        if match and abs(int(match[1], 16) - int(match[2], 16)) < _BY_THE_STACK:
            return "the address of the fault is close to its stack pointer"
    return None


def _repeated(stack: str) -> tuple[str, int]:
    frames = [line.strip() for line in stack.splitlines() if line.startswith("  File")]
    best = max(frames, key=frames.count, default="")
    return best, frames.count(best)


def _limit(e: Evidence) -> Verdict | None:
    if e.signal == "SIGXCPU":
        return _verdict(
            "cpu-limit", "high", "SIGXCPU: the kernel sends it when CPU time is used up"
        )
    return None


def _told(e: Evidence) -> Verdict | None:
    if e.signal not in ("SIGTERM", "SIGHUP", "SIGINT"):
        return None
    said = f"it ended by {e.signal}"
    if e.group_signal is not None and e.group_signal_ago <= _AT_ONCE:
        return _verdict(
            "ctrl-c-flood" if e.group_signal == "SIGINT" else "group-sigterm",
            "high" if e.group_signal == e.signal else "medium",
            said,
            _to_all(e),
        )
    if e.signal == "SIGINT":
        return _verdict("ctrl-c-flood", "medium", said, perhaps=("killed-from-outside",))
    if e.siblings:
        also = f"{e.siblings} other workers died at the same moment"
        return _verdict("group-sigterm", "medium", said, also, perhaps=("killed-from-outside",))
    return _verdict(
        "killed-from-outside",
        "medium",
        said,
        "neither the trainer nor another worker got it, so it was meant for this one",
        "a process sent it, perhaps the worker itself; a signal does not name its sender",
        perhaps=("group-sigterm",),
    )


def _other_signal(e: Evidence) -> Verdict | None:
    if e.signal is None:
        return None
    if e.sent_by_us:
        return _verdict(
            "ended-on-request",
            "high",
            f"{e.signal} was sent because the program asked for it: terminate() or kill() on the "
            "loader's process handle",
        )
    if e.signal == "SIGTRAP":
        return _verdict("macos-trap", "low", "it died of SIGTRAP", perhaps=("native-segv",))
    return _verdict("stray-signal", "high", f"it died of {e.signal}")


def _exit(e: Evidence) -> Verdict | None:
    if e.exitcode is None:
        return None
    said = f"it ended with status {e.exitcode} and did not say why"
    if e.group_signal == "SIGINT" and e.group_signal_ago <= _AT_ONCE:
        return _verdict("ctrl-c-flood", "medium", said, _to_all(e))
    for finding in find(_end_of(e.stderr)):
        # A library that gives up prints the reason and exits.
        if finding.confidence == "high" and e.exitcode != 0:
            return _verdict(
                finding.slug,
                "medium",
                said,
                f"standard error says: {finding.text}",
                perhaps=("exited-by-itself",),
            )
    if e.ready is False and e.exitcode == 1:
        return _verdict(
            "exited-by-itself",
            "medium",
            said,
            "before it was ready",
            perhaps=("spawn-bootstrap", "worker-import-error"),
        )
    return _verdict("exited-by-itself", "high", said)


def _lost(e: Evidence) -> Verdict | None:
    if not e.disappeared:
        return None
    process = "the process that starts the workers"
    if e.nursery_error:
        told = indent(e.nursery_error.strip(), " " * 8)
        return _verdict("nursery-failed", "high", f"{process} raised\n{told}")
    if e.nursery_end.startswith("exited") or e.nursery_end.endswith("was ended"):  # by us
        return _verdict("nursery-failed", "high", f"{process} {e.nursery_end}")
    return _verdict(
        "killed-unexplained",
        "low",
        f"{process} {e.nursery_end or 'is gone'}, and the workers ended with it",
        *(
            [f"oom_kill went up by {e.kills.group or e.kills.machine}"]
            if e.kills.group or e.kills.machine
            else []
        ),
        perhaps=("oom-killed", "killed-from-outside"),
    )


def _only_said(e: Evidence) -> Verdict | None:
    return _said(e.findings[0]) if e.findings else None


def _nothing(e: Evidence) -> Verdict:
    return _verdict(UNKNOWN, "low", "no known cause fits")


_RULES: tuple[Callable[[Evidence], Verdict | None], ...] = (
    _not_born,
    _stall,
    _start,
    _by_itself,
    _sigkill,
    _bus,
    _abort,
    _crash,
    _limit,
    _told,
    _other_signal,
    _exit,
    _lost,
    _only_said,
    _nothing,
)


# -- words ---------------------------------------------------------------------------------


def _said(finding: Finding, *before: str) -> Verdict:
    see = CATALOGUE[finding.slug].see if finding.confidence != "high" else ()
    file = f" of {finding.source}" if finding.source else ""
    where = f"line {finding.line}{file} says: " if finding.line else "it says: "
    said = [*before, where + finding.text[:200], *filter(None, [finding.note])]
    return _verdict(finding.slug, finding.confidence, *said, perhaps=see)


def _memory(e: Evidence) -> list[str]:
    said = []
    if e.worker_bytes is not None:
        said.append(f"the worker had {in_words(e.worker_bytes)} when it was last measured")
    last = e.memory[-1] if e.memory else None  # measured after its death
    if last is not None and last.limit is not None and last.usage is not None:
        group = f"its control group used {in_words(last.usage)} of {in_words(last.limit)}"
        said.append(f"after its death {group}")
    if last is not None and last.available is not None:
        said.append(f"the machine had {in_words(last.available)} available")
    return said


def _where(stack: str) -> list[str]:
    """Where it was, and from which line of the user's own code."""
    top, own = innermost(stack), users(stack)
    if not top:
        return []
    return [f"its stack ends in {top}" + (f", called from {own}" if own not in ("", top) else "")]


def _to_all(e: Evidence) -> str:
    if not e.group_signal_ago:
        return f"the trainer got {e.group_signal} too"
    return f"{e.group_signal} was sent to the whole process group {e.group_signal_ago:.1f} s before"


def _end_of(stderr: str | None, lines: int = 10) -> str:
    """The last lines that are not empty: errors further up were survived."""
    said = [line.strip() for line in (stderr or "").splitlines() if line.strip()]
    return "\n".join(said[-lines:])


def _tasks(e: Evidence) -> list[str]:
    if e.pids_max is None:
        return []
    return [f"its control group has {e.pids_current} of {e.pids_max} tasks"]


def _asides(e: Evidence, verdict: Verdict) -> list[str]:
    """What does not decide the verdict but should be known."""
    said = []
    for whose, count in (("trainer", e.descriptors), ("worker", e.worker_descriptors)):
        if count is not None and e.descriptor_limit and count > 0.9 * e.descriptor_limit:
            said.append(f"the {whose} had {count} of {e.descriptor_limit} file descriptors open")
    if e.pids_refused:
        said.append(f"its control group refused {e.pids_refused} new tasks")
    if e.survived_sigkill:
        said.append("even SIGKILL did not end it")
    said += [f"before that, {note}" for note in e.thread_notes]
    last = _end_of(e.stderr, 1)[:200]
    if last and not any(last in reason for reason in verdict.because):
        said.append(f"its last line on standard error: {last}")
    return said


def _shown(sample: Any) -> str | None:
    return None if sample is None else repr(sample)
