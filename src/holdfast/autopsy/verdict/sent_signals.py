"""Which process sent a signal: from which other processes got it, and what the worker noted."""

from __future__ import annotations

from holdfast.autopsy.evidence import Evidence
from holdfast.autopsy.verdict.draft import AT_ONCE, Verdict, to_all, verdict


def by_itself(e: Evidence) -> Verdict | None:
    if not e.sent_by_itself:
        return None
    said = f"it sent {e.signal} to itself, by os.kill() with its own pid or the like"
    return verdict("exited-by-itself", "high", said)


def cpu_limit(e: Evidence) -> Verdict | None:
    if e.signal == "SIGXCPU":
        return verdict("cpu-limit", "high", "SIGXCPU: the kernel sends it when CPU time is used up")
    return None


def told_to_end(e: Evidence) -> Verdict | None:
    if e.signal not in ("SIGTERM", "SIGHUP", "SIGINT"):
        return None
    said = f"it ended by {e.signal}"
    if e.group_signal is not None and e.group_signal_ago <= AT_ONCE:
        return verdict(
            "ctrl-c-flood" if e.group_signal == "SIGINT" else "group-sigterm",
            "high" if e.group_signal == e.signal else "medium",
            said,
            to_all(e),
        )
    if e.signal == "SIGINT":
        return verdict("ctrl-c-flood", "medium", said, perhaps=("killed-from-outside",))
    if e.siblings:
        also = f"{e.siblings} other workers died at the same moment"
        return verdict("group-sigterm", "medium", said, also, perhaps=("killed-from-outside",))
    return verdict(
        "killed-from-outside",
        "medium",
        said,
        "neither the trainer nor another worker got it, so it was meant for this one",
        "a process sent it, perhaps the worker itself; a signal does not name its sender",
        perhaps=("group-sigterm",),
    )


def other_signal(e: Evidence) -> Verdict | None:
    if e.signal is None:
        return None
    if e.sent_by_us:
        return verdict(
            "ended-on-request",
            "high",
            f"{e.signal} was sent because the program asked for it: terminate() or kill() on the "
            "loader's process handle",
        )
    if e.signal == "SIGTRAP":
        return verdict("macos-trap", "low", "it died of SIGTRAP", perhaps=("native-segv",))
    return verdict("stray-signal", "high", f"it died of {e.signal}")
