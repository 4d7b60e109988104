"""From evidence to a cause, and how certain it is.

A pure function: no file, no clock, no process. The rules are those of a careful post-mortem, in
this order: did holdfast end the worker itself; did the worker ever start; which signal or status;
which counters moved; which messages were printed. Two errors are worse than "unknown" here: saying
"out of memory" without a counter, and being certain and wrong. So a verdict with another possible
explanation is at most "medium", and names that explanation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from holdfast.autopsy.catalogue import CATALOGUE, UNKNOWN
from holdfast.autopsy.cause import Remedy
from holdfast.autopsy.evidence import Evidence
from holdfast.autopsy.machine_facts import MachineFacts
from holdfast.autopsy.verdict.crashes import abort, bus_error, crash
from holdfast.autopsy.verdict.draft import Verdict, end_of
from holdfast.autopsy.verdict.kills import sigkill
from holdfast.autopsy.verdict.sent_signals import by_itself, cpu_limit, other_signal, told_to_end
from holdfast.autopsy.verdict.stalls import stall
from holdfast.autopsy.verdict.starts_and_exits import (
    exit_status,
    failed_start,
    lost,
    lost_by_ray,
    no_known_cause,
    not_forked,
    only_said,
)

__all__ = ["Run", "Verdict", "judge", "remedies_for"]

_RULES: tuple[Callable[[Evidence], Verdict | None], ...] = (
    lost_by_ray,
    not_forked,
    stall,
    failed_start,
    by_itself,
    sigkill,
    bus_error,
    abort,
    crash,
    cpu_limit,
    told_to_end,
    other_signal,
    exit_status,
    lost,
    only_said,
    no_known_cause,
)
"""In this order: the first that knows something decides."""


@dataclass(frozen=True)
class Run:
    """The run it happened in, if that run used holdfast."""

    workers: int
    trainer: int  # its pid
    logbook: str | None = None  # as the user gave it
    stall_timeout: float | None = None


def judge(
    evidence: Evidence, machine: MachineFacts | None = None, run: Run | None = None
) -> Verdict:
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
    machine: MachineFacts | None,
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
    known = (machine or MachineFacts()).facts(workers=None if run is None else run.workers, **facts)
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
    last = end_of(e.stderr, 1)[:200]
    if last and not any(last in reason for reason in verdict.because):
        said.append(f"its last line on standard error: {last}")
    return said


def _shown(sample: Any) -> str | None:
    return None if sample is None else repr(sample)
