"""What the user reads when replacing workers is over: what happened, why, and what to do now."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from holdfast.autopsy.clues import find
from holdfast.autopsy.incident import Incident
from holdfast.autopsy.verdict import remedies_for
from holdfast.engine import machine as m
from holdfast.engine import vocabulary as v
from holdfast.engine.answers import Refused
from holdfast.engine.obituaries import Obituaries
from holdfast.errors import PoisonSample, RestartLimitExceeded, WorkerLost, WorkerStartError
from holdfast.samples.substitute import position_of, sample_of

__all__ = ["cannot_start", "gave_up", "poisoned"]

_SHOWN = 10


def gave_up(
    failure: v.GaveUp, policy: v.RestartPolicy, obituaries: Obituaries
) -> WorkerLost | WorkerStartError:
    """The error for a machine that does not replace workers any more."""
    mine = [one for one in obituaries.all() if one.worker_id == failure.worker]
    if failure.reason == "shortage":
        return _no_room(failure, mine)
    if failure.reason == "cannot-start":
        return _never_ready(failure, mine)
    count = len(failure.deaths)
    counted = obituaries.of(failure.deaths)  # and not those that a bad sample was to blame for
    pids = ", ".join(str(one.pid) for one in counted)
    return RestartLimitExceeded(
        f"DataLoader worker (pid(s) {pids}) exited unexpectedly: {count} deaths within "
        f"{policy.period:g} s are more than max_restarts allows ({policy.intensity}).\n"
        + _list(counted)
        + "\nWhat to do: if these are one and the same cause, mend that; if the machine is simply "
        f"rough, allow more, for example max_restarts=({max(20, 4 * count)}, {policy.period:g})."
    )


def _never_ready(failure: v.GaveUp, mine: Sequence[Incident]) -> WorkerStartError:
    """The error for a worker that ended in every start."""
    pid = mine[-1].pid if mine else "unknown"
    if failure.deaths[-1].perhaps_from_outside:
        deaths = mine[-m.KILLED_STARTS :]
        advice = (
            "it did not end by itself, so see above what kills it. If that is memory, it has to "
            "need less, or get more, before it can start; if somebody else does it and will stop, "
            "max_restarts=None goes on for as long as it takes."
        )
    else:
        deaths = mine[-m.FAILED_STARTS :]
        advice = (
            "run worker_init_fn and one sample of the dataset by hand in a fresh Python; a library "
            "that exits or crashes when it is loaded shows there too."
        )
    return WorkerStartError(
        f"DataLoader worker (pid(s) {pid}) exited unexpectedly: worker {failure.worker} died "
        "again and again while it was starting, so it is not started again.\n"
        f"{_list(deaths)}\nWhat to do: {advice}"
    )


def _no_room(failure: v.GaveUp, mine: Sequence[Incident]) -> WorkerStartError:
    """The error for a worker that the system had no room for, again and again."""
    pid = next((one.pid for one in reversed(mine) if one.pid is not None), "none")
    errors = Counter(death.evidence.errno for death in failure.deaths)
    said = "; ".join(
        f"{errno.errorcode.get(number, number)} ({os.strerror(number)}), {count} times"
        for number, count in errors.most_common()
    )
    seconds = failure.deaths[-1].at - failure.deaths[0].at
    return WorkerStartError(
        f"DataLoader worker (pid(s) {pid}) exited unexpectedly: worker {failure.worker} could not "
        f"be started in {len(failure.deaths)} tries within {seconds:.0f} s. "
        f"The system says: {said}.\n"
        + _list(mine)
        + "\nWhat to do: free what is short, or raise the limit on it (ulimit -u for processes, "
        "ulimit -n for descriptors, pids.max and memory.max of the container), or use fewer "
        "workers."
    )


def poisoned(
    verdict: v.Poisoned, obituaries: Sequence[Incident], *, past_it: bool = False
) -> PoisonSample:
    """The error for a sample that ended several workers in a row.

    `past_it` if the user wants to go on without bad samples, and that is not possible here.
    """
    task, position = verdict.task, position_of(verdict.position)
    deaths = [
        one
        for one in obituaries
        if one.worker_id == task.worker and (one.batch, one.position) == (task.number, position)
    ][-len(verdict.deaths) :]
    sample = sample_of(task.keys, task.brief, verdict.position)
    name = f"sample {sample!r}" if sample is not None else "a sample"
    where = f"batch {task.number}"
    if position is not None:
        where = f"position {position} of {where}"
    named = next((one.sample_name for one in deaths if one.sample_name is not None), None)
    if named is not None:
        where = f"{named}; {where}"
    pids = ", ".join(str(one.pid) for one in deaths)
    error = PoisonSample(
        f"DataLoader worker (pid(s) {pids}) exited unexpectedly: {name} ({where}) ended "
        f"{len(verdict.deaths)} workers in a row.\n"
        + _list(deaths)
        + _why_not_past_it(verdict, past_it)
        + f"\nWhat to do: load dataset[{sample!r}] by itself in a separate Python process to see "
        "it fail, then mend that sample"
        + ("." if past_it else ', or go on without it: DataLoader(..., on_bad_sample="skip").')
    )
    error.sample = sample
    return error


def _why_not_past_it(verdict: v.Poisoned, past_it: bool) -> str:
    if not past_it:
        return ""
    if verdict.acquittals:
        return (
            f"\nTried alone ({verdict.acquittals} times for this batch), samples did not end their "
            "worker, so none is left out: what ends it is their being loaded one after another, "
            "most often memory that is not given back, or a library that an earlier one broke."
        )
    return (
        "\non_bad_sample cannot leave it out: an IterableDataset has no way past an element but "
        "through it."
    )


def cannot_start(refused: Refused) -> WorkerStartError:
    """The error for a worker whose main module or arguments did not load."""
    failure = refused.failure
    advice = ""
    found = find(failure.text)
    if found:
        cause = found[0].slug
        to_do = [f"    {remedy}" for remedy in remedies_for(cause, None)[:2]]
        advice = "\n".join(["", f"What to do (more: holdfast explain {cause}):", *to_do])
    return WorkerStartError(
        f"DataLoader worker (pid(s) {refused.pid}) exited unexpectedly: worker {refused.worker} "
        f"could not start. It says:\n\n{_indented(failure.text)}{advice}"
    )


def _list(deaths: Sequence[Incident]) -> str:
    lines: list[str] = []
    told = ""
    for one in deaths[-_SHOWN:]:
        how = one.what() + one.where()
        lines.append(f"  {one}" if how != told else f"  {one.who()} likewise; {one.action}")
        told = how
    if len(deaths) > _SHOWN:
        lines.insert(0, f"  … {len(deaths) - _SHOWN} more before these")
    if deaths:
        lines += [line[2:] for line in deaths[-1].report().splitlines()[1:]]
    stack = next((one.stack for one in reversed(deaths) if one.stack), "")
    if stack:
        lines.append("The last stack that a worker left:")
        lines.append(_indented(stack.strip()))
    return "\n".join(lines)


def _indented(text: Any) -> str:
    return "\n".join(f"    {line}" for line in str(text).splitlines())
