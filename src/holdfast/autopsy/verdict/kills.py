"""Why a worker got SIGKILL: from counters, the kernel's log and limits."""

from __future__ import annotations

import re

from holdfast.autopsy.cause import Confidence
from holdfast.autopsy.evidence import Evidence
from holdfast.autopsy.machine_facts import in_words
from holdfast.autopsy.verdict.draft import Verdict, to_all, verdict

_NOT_BY_US = "SIGKILL that holdfast did not send"
_BY_A_PROCESS = "so a process sent it, perhaps the worker itself; a signal does not name its sender"


def sigkill(e: Evidence) -> Verdict | None:
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
        return verdict(
            "cpu-limit",
            "medium",
            said,
            "so a part of it was used by its child processes, which does not count",
            perhaps=("killed-from-outside", "oom-killed"),
        )
    return verdict("cpu-limit", "high", said, "the kernel sends SIGKILL at that limit")


def _counted(e: Evidence) -> Verdict | None:
    kills = e.kills
    if not kills.group and not kills.machine:
        return None
    count = kills.group or kills.machine or 0
    others = [pid for pid in e.kernel_victims if pid != e.pid]
    if e.kernel_readable and len(others) >= count:
        # The kernel logs each victim before it kills it: the log explains the whole count.
        return verdict(
            "killed-from-outside",
            "medium",
            _NOT_BY_US,
            f"the kernel killed {count} for memory, but its log names pid {others[-1]}, not this",
            _BY_A_PROCESS,
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
        # The kernel counts a victim in its own group before it sends the signal, whichever limit
        # was met: what moved the machine's counter was a process of another group.
        return verdict(
            "killed-from-outside",
            "low",
            _NOT_BY_US,
            f"{said}, but the counter of this worker's control group did not move",
            _BY_A_PROCESS,
            perhaps=("oom-killed",),
        )
    enough = (kills.machine or 0) >= kills.deaths
    return _oom(e, "medium" if enough else "low", said, perhaps=("killed-from-outside",))


def _not_counted(e: Evidence) -> Verdict:
    kills = e.kills
    if kills.group is None and kills.machine is None:
        return verdict(
            "killed-unexplained",
            "medium" if not e.findings else "low",
            f"{_NOT_BY_US}; no counter and no kernel log could be read",
            perhaps=("oom-killed", "killed-from-outside"),
        )
    said = [
        _NOT_BY_US,
        "no oom_kill counter moved: "
        + " and ".join(
            name
            for name, known in (("control groups", kills.group), ("/proc/vmstat", kills.machine))
            if known is not None
        ),
    ]
    if e.group_signal == "SIGTERM":
        return verdict(
            "group-sigterm",
            "medium",
            *said,
            f"{to_all(e)}, as batch systems do before they kill",
            perhaps=("killed-from-outside",),
        )
    return verdict("killed-from-outside", "medium", *said, _BY_A_PROCESS)


def _oom(
    e: Evidence, confidence: Confidence, *because: str, perhaps: tuple[str, ...] = ()
) -> Verdict:
    said = [*because, *_memory(e)]
    if e.oom_group:
        said.append("memory.oom.group is set: next time the kernel may kill the whole container")
    return verdict("oom-killed", confidence, *said, perhaps=perhaps)


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
