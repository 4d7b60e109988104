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
from holdfast.engine import vocabulary as v
from holdfast.engine.answers import Refused
from holdfast.engine.continuation import RAISED_AGAIN
from holdfast.engine.machine import RAISES
from holdfast.engine.obituaries import Obituaries
from holdfast.errors import (
    PoisonSample,
    RestartLimitExceeded,
    StreamLost,
    WorkerLost,
    WorkerStartError,
)
from holdfast.origin import Origin
from holdfast.samples.substitute import Brief, position_of, sample_of

__all__ = ["cannot_start", "gave_up", "poisoned"]

_SHOWN = 10


def gave_up(
    failure: v.GaveUp, policy: v.RestartPolicy, limits: v.Limits, obituaries: Obituaries
) -> WorkerLost | WorkerStartError:
    """The error for a machine that does not replace workers any more."""
    mine = [one for one in obituaries.all() if one.worker_id == failure.worker]
    if failure.reason == "shortage":
        return _no_room(failure, mine, obituaries.origin)
    if failure.reason == "cannot-start":
        return _never_ready(failure, mine[-limits.failed_starts :], obituaries.origin)
    if failure.reason == "cannot-catch-up":
        return _never_caught_up(failure, mine[-limits.failed_starts :], obituaries.origin)
    if failure.reason == "stream":
        return _not_continued(failure, mine, obituaries)
    count = len(failure.deaths)
    counted = obituaries.of(failure.deaths)  # and not those that a bad sample was to blame for
    pids = ", ".join(str(one.pid) for one in counted)
    whose = obituaries.origin.prefix
    return RestartLimitExceeded(
        f"DataLoader worker (pid(s) {pids}) exited unexpectedly: {whose}{count} deaths within "
        f"{policy.period:g} s are more than max_restarts allows ({policy.intensity}).\n"
        + _list(counted)
        + "\nWhat to do: if these are one and the same cause, mend that; if the machine is simply "
        f"rough, allow more, for example max_restarts=({max(20, 4 * count)}, {policy.period:g}), "
        "or None to go on for as long as it takes."
    )


def _never_ready(failure: v.GaveUp, mine: Sequence[Incident], origin: Origin) -> WorkerStartError:
    """The error for a worker that ended in every start."""
    pid = mine[-1].pid if mine else "unknown"
    if mine and mine[-1].cause == "nursery-failed":
        advice = "see the traceback above: it is of the process that starts the workers."
    else:
        advice = (
            "run worker_init_fn and one sample of the dataset by hand in a fresh Python; a library "
            "that exits or crashes when it is loaded shows there too."
        )
    return WorkerStartError(
        f"DataLoader worker (pid(s) {pid}) exited unexpectedly: {origin.prefix}worker "
        f"{failure.worker} died again and again while it was starting, so it is not started "
        "again.\n"
        f"{_list(mine)}\nWhat to do: {advice}"
    )


def _never_caught_up(
    failure: v.GaveUp, mine: Sequence[Incident], origin: Origin
) -> WorkerStartError:
    """The error for a worker that ended whenever it had to go to where its predecessor was."""
    pid = mine[-1].pid if mine else "unknown"
    return WorkerStartError(
        f"DataLoader worker (pid(s) {pid}) exited unexpectedly: {origin.prefix}worker "
        f"{failure.worker} died again and again while it was catching up with its predecessor, so "
        f"it is not started again.\n{_list(mine)}\n"
        "What to do: run through the dataset's iterator by hand in a fresh Python, as far as the "
        "batch above; if it has load_state_dict(), load a state there and go on from it."
    )


def _not_continued(
    failure: v.GaveUp, mine: Sequence[Incident], obituaries: Obituaries
) -> StreamLost:
    """The error for a stream that no other process goes on with."""
    origin, recovery = obituaries.origin, obituaries.recovery
    pid = mine[-1].pid if mine else "unknown"
    if recovery == "state":
        advice = (
            "see that state_dict() gives a state that load_state_dict() takes in another process; "
            'or have what was delivered drawn again and compared: iterable_recovery="auto".'
        )
    elif failure.why == RAISES:
        advice = (
            'iterable_recovery="auto" has streams continued by another process, and says whether '
            "that was exact."
        )
    elif RAISED_AGAIN in failure.why:
        advice = (
            "see to what it raised: after a death a stream is drawn again from its start, so its "
            "source has to answer then too. With state_dict() and load_state_dict() it need not "
            "be drawn again."
        )
    else:
        found = remedies_for("stream-not-repeatable", None)
        advice = "\n" + "\n".join(f"    {remedy}" for remedy in found)
        advice += "\n    More: holdfast explain stream-not-repeatable"
    return StreamLost(
        f"DataLoader worker (pid(s) {pid}) exited unexpectedly: {origin.prefix}the stream of "
        f"worker {failure.worker} is not continued: {failure.why}. With a shorter epoch "
        "other ranks would wait for batches that never come.\n"
        f"{_list(mine[-1:])}\nWhat to do: {advice}"
    )


def _no_room(failure: v.GaveUp, mine: Sequence[Incident], origin: Origin) -> WorkerStartError:
    """The error for a worker that the system had no room for, again and again."""
    pid = next((one.pid for one in reversed(mine) if one.pid is not None), "none")
    errors = Counter(death.errno for death in failure.deaths if death.errno is not None)
    said = "; ".join(
        f"{errno.errorcode.get(number, number)} ({os.strerror(number)}), {count} times"
        for number, count in errors.most_common()
    )
    seconds = failure.deaths[-1].at - failure.deaths[0].at
    return WorkerStartError(
        f"DataLoader worker (pid(s) {pid}) exited unexpectedly: {origin.prefix}worker "
        f"{failure.worker} could not be started in {len(failure.deaths)} tries within "
        f"{seconds:.0f} s. The system says: {said}.\n"
        + _list(mine)
        + "\nWhat to do: free what is short, or raise the limit on it (ulimit -u for processes, "
        "ulimit -n for descriptors, pids.max and memory.max of the container), or use fewer "
        "workers."
    )


def poisoned(
    verdict: v.Poisoned, obituaries: Obituaries, hint: Brief | None = None, *, past_it: bool = False
) -> PoisonSample:
    """The error for a sample that ended several workers in a row.

    `past_it` if the user wants to go on without bad samples, and that is not possible here.
    """
    task, position = verdict.task, position_of(verdict.position)
    deaths = [
        one
        for one in obituaries.all()
        if one.worker_id == task.worker and (one.batch, one.position) == (task.number, position)
    ][-len(verdict.deaths) :]
    sample = sample_of(task.keys, hint, verdict.position)
    name = f"sample {sample!r}" if sample is not None else "a sample"
    where = f"batch {task.number}"
    if position is not None:
        where = f"position {position} of {where}"
    named = next((one.sample_name for one in deaths if one.sample_name is not None), None)
    if named is not None:
        where = f"{named}; {where}"
    pids = ", ".join(str(one.pid) for one in deaths)
    error = PoisonSample(
        f"DataLoader worker (pid(s) {pids}) exited unexpectedly: {obituaries.origin.prefix}{name} "
        f"({where}) ended {len(verdict.deaths)} workers in a row{_alone(verdict)}.\n"
        + _list(deaths)
        + _why_not_past_it(verdict, past_it)
        + f"\nWhat to do: load dataset[{sample!r}] by itself in a separate Python process to see "
        "it fail, then mend that sample"
        + ("." if past_it else ', or go on without it: DataLoader(..., on_bad_sample="skip").')
    )
    error.sample = sample
    return error


def _alone(verdict: v.Poisoned) -> str:
    """How we know that it was the sample."""
    if not verdict.alone:
        return ""
    what = "it" if verdict.position is not None else "the batch"
    times = "once" if verdict.alone == 1 else f"{verdict.alone} times"
    return f", {times} when {what} was loaded alone by a fresh one"


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


def cannot_start(refused: Refused, origin: Origin) -> WorkerStartError:
    """The error for a worker whose main module or arguments did not load."""
    failure = refused.failure
    advice = ""
    found = find(failure.text)
    if found:
        cause = found[0].slug
        to_do = [f"    {remedy}" for remedy in remedies_for(cause, None)[:2]]
        advice = "\n".join(["", f"What to do (more: holdfast explain {cause}):", *to_do])
    return WorkerStartError(
        f"DataLoader worker (pid(s) {refused.pid}) exited unexpectedly: {origin.prefix}worker "
        f"{refused.worker} could not start. It says:\n\n{_indented(failure.text)}{advice}"
    )


def _list(deaths: Sequence[Incident]) -> str:
    lines: list[str] = []
    told = ""
    for one in deaths[-_SHOWN:]:
        how = one.what() + one.where()
        again = f"{one.who()} likewise; {one.action}"
        lines.append(f"  {one.sentence() if how != told else again}")
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
