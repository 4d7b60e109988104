"""Why a worker did not start, or ended without a signal: from its status and from texts."""

from __future__ import annotations

import errno
import os
from textwrap import indent

from holdfast.autopsy.catalogue import CATALOGUE, UNKNOWN
from holdfast.autopsy.evidence import Evidence
from holdfast.autopsy.verdict.draft import AT_ONCE, Verdict, end_of, to_all, verdict
from holdfast.explain.clues import Finding, find


def lost_by_ray(e: Evidence) -> Verdict | None:
    """An actor of a Ray cluster: Ray knows best."""
    if not e.ray_cause:
        return None
    where = [f"it was actor {e.actor} on node {e.node}"] if e.node else []
    return verdict(e.ray_cause, "high", f"Ray says: {e.said_by_ray}", *where)


def not_forked(e: Evidence) -> Verdict | None:
    if e.forked:
        return None
    said = f"fork() failed: {os.strerror(e.errno or 0)} (errno {e.errno})"
    if e.errno == errno.ENOMEM:
        return verdict("fork-enomem", "high", said)
    if e.errno == errno.EAGAIN:
        return verdict("task-limit", "high", said, *_task_count(e))
    said = f"its start failed: {os.strerror(e.errno or 0)} (errno {e.errno})"
    if e.errno in (errno.EMFILE, errno.ENFILE):
        return verdict("fd-exhaustion", "high", said)
    return verdict(UNKNOWN, "low", said)


def _task_count(e: Evidence) -> list[str]:
    if e.pids_max is None:
        return []
    return [f"its control group has {e.pids_current} of {e.pids_max} tasks"]


def failed_start(e: Evidence) -> Verdict | None:
    """It never became ready, and said why."""
    if e.ready is not False or e.signal is not None or not e.findings:
        return None
    best = e.findings[0]
    return _said(best, f"it ended with status {e.exitcode} before it was ready")


def exit_status(e: Evidence) -> Verdict | None:
    if e.exitcode is None:
        return None
    said = f"it ended with status {e.exitcode} and did not say why"
    if e.group_signal == "SIGINT" and e.group_signal_ago <= AT_ONCE:
        return verdict("ctrl-c-flood", "medium", said, to_all(e))
    for finding in find(end_of(e.stderr)):
        # A library that gives up prints the reason and exits.
        if finding.confidence == "high" and e.exitcode != 0:
            return verdict(
                finding.slug,
                "medium",
                said,
                f"standard error says: {finding.text}",
                perhaps=("exited-by-itself",),
            )
    if e.ready is False and e.exitcode == 1:
        return verdict(
            "exited-by-itself",
            "medium",
            said,
            "before it was ready",
            perhaps=("spawn-bootstrap", "worker-import-error"),
        )
    return verdict("exited-by-itself", "high", said)


def lost(e: Evidence) -> Verdict | None:
    if not e.disappeared:
        return None
    process = "the process that starts the workers"
    if e.nursery_error:
        told = indent(e.nursery_error.strip(), " " * 8)
        return verdict("nursery-failed", "high", f"{process} raised\n{told}")
    if e.nursery_end.startswith("exited") or e.nursery_end.endswith("was ended"):  # by us
        return verdict("nursery-failed", "high", f"{process} {e.nursery_end}")
    return verdict(
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


def only_said(e: Evidence) -> Verdict | None:
    return _said(e.findings[0]) if e.findings else None


def no_known_cause(e: Evidence) -> Verdict:
    return verdict(UNKNOWN, "low", "no known cause fits")


def _said(finding: Finding, *before: str) -> Verdict:
    see = CATALOGUE[finding.slug].see if finding.confidence != "high" else ()
    file = f" of {finding.source}" if finding.source else ""
    where = f"line {finding.line}{file} says: " if finding.line else "it says: "
    said = [*before, where + finding.text[:200], *filter(None, [finding.note])]
    return verdict(finding.slug, finding.confidence, *said, perhaps=see)
