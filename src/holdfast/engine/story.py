"""What the user reads when replacing workers is over: what happened, why, and what to do now."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from holdfast.autopsy.catalogue import UNKNOWN
from holdfast.autopsy.cause import Remedy
from holdfast.autopsy.causes.crashes import ALONE
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
_STREAM = "stream-not-repeatable"
SAME = 3  # deaths at one sample or element that are worth a word


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
        f"{policy.period:g} s are more than max_restarts allows ({policy.intensity})."
        f"{_all_at_one(counted, count)}\n"
        + _told(counted, *_after_too_many(counted, count, policy.period))
    )


def _at_one(deaths: Sequence[Incident], count: int) -> Incident | None:
    """One of the deaths, if all of them were at the same sample or element."""
    places = {(one.worker_id, one.batch, one.position) for one in deaths}
    steps = {one.step for one in deaths}
    if len(deaths) < min(count, SAME) or len(places) != 1 or not steps <= {"fetch", "transform"}:
        return None
    return deaths[-1] if deaths[-1].position is not None else None


def _all_at_one(deaths: Sequence[Incident], count: int) -> str:
    one = _at_one(deaths, count)
    if one is None:
        return ""
    name = "the same element" if one.sample is None else f"the same sample, {one.sample!r}"
    place = f"worker {one.worker_id}, batch {one.batch}, position {one.position}"
    return f" All of them were at {name} ({place}). Look at that first."


def _after_too_many(deaths: Sequence[Incident], count: int, period: float) -> list[Remedy]:
    one = _at_one(deaths, count)
    allow = f"max_restarts=({max(20, 4 * count)}, {period:g})"
    if one is None:
        return [
            Remedy("If these are one and the same cause, mend that"),
            Remedy(
                f"If the machine is simply rough, allow more, for example {allow}, or None to go "
                "on for as long as it takes"
            ),
        ]
    look = _find_element(one.worker_id) if one.sample is None else _load_alone(one.sample)
    return [
        *look,
        Remedy(
            "Allow more restarts only if it does not fail there: if it is what kills its worker, "
            "max_restarts=None would start workers for ever"
        ),
    ]


def _load_alone(sample: Any) -> list[Remedy]:
    return [
        Remedy(
            f"Load dataset[{sample!r}] by itself in a separate Python process to see it fail, then "
            "mend that sample",
            f'python -X faulthandler -c "import mydata; mydata.dataset[{sample!r}]"',
        )
    ]


def _find_element(worker: int) -> list[Remedy]:
    return [
        Remedy(
            f"Find the element: iterate the dataset in one process as worker {worker} does. What "
            "follows the last number that is printed is the one",
            "import types, torch.utils.data._utils.worker as worker\n"
            f"worker._worker_info = types.SimpleNamespace(id={worker}, num_workers=NUM_WORKERS, "
            "seed=0, dataset=dataset)   # for get_worker_info()\n"
            "for number, element in enumerate(dataset): print(number, flush=True)",
        ),
        Remedy("Then mend that element, or leave it out in the dataset's __iter__"),
    ]


def _never_ready(failure: v.GaveUp, mine: Sequence[Incident], origin: Origin) -> WorkerStartError:
    """The error for a worker that ended in every start."""
    pid = mine[-1].pid if mine else "unknown"
    if mine and mine[-1].cause == "nursery-failed":
        advice = "See the traceback above: it is of the process that starts the workers"
    else:
        advice = (
            "Run worker_init_fn and one sample of the dataset by hand in a fresh Python; a library "
            "that exits or crashes when it is loaded shows there too"
        )
    return WorkerStartError(
        f"DataLoader worker (pid(s) {pid}) exited unexpectedly: {origin.prefix}worker "
        f"{failure.worker} died again and again while it was starting, so it is not started "
        f"again.\n{_told(mine, Remedy(advice))}"
    )


def _never_caught_up(
    failure: v.GaveUp, mine: Sequence[Incident], origin: Origin
) -> WorkerStartError:
    """The error for a worker that ended whenever it had to go to where its predecessor was."""
    pid = mine[-1].pid if mine else "unknown"
    return WorkerStartError(
        f"DataLoader worker (pid(s) {pid}) exited unexpectedly: {origin.prefix}worker "
        f"{failure.worker} died again and again while it was catching up with its predecessor, so "
        "it is not started again.\n"
        + _told(
            mine,
            Remedy(
                "Run through the dataset's iterator by hand in a fresh Python, as far as the batch "
                "above; if it has load_state_dict(), load a state there and go on from it"
            ),
        )
    )


def _not_continued(
    failure: v.GaveUp, mine: Sequence[Incident], obituaries: Obituaries
) -> StreamLost:
    """The error for a stream that no other process goes on with."""
    origin, recovery = obituaries.origin, obituaries.recovery
    pid = mine[-1].pid if mine else "unknown"
    why = ""
    if recovery == "state":
        advice = [
            Remedy(
                "Have what was delivered drawn again and compared, if the state does not lead "
                "there",
                'DataLoader(..., iterable_recovery="auto")',
            ),
            Remedy(
                "Or see that state_dict() gives a state that load_state_dict() takes in another "
                "process"
            ),
        ]
    elif failure.why == RAISES:
        advice = [
            Remedy(
                "Have streams continued by another process, which says whether that was exact",
                'DataLoader(..., iterable_recovery="auto")',
            )
        ]
    elif RAISED_AGAIN in failure.why:
        advice = [
            Remedy(
                "See to what it raised: after a death a stream is drawn again from its start, so "
                "its source has to answer then too"
            ),
            Remedy("With state_dict() and load_state_dict() it need not be drawn again"),
        ]
    else:
        why = (
            " The epoch is not delivered without the rest: it would be too short, and other ranks "
            "would wait for batches that never come."
        )
        advice = [*remedies_for(_STREAM, None)]
    return StreamLost(
        f"DataLoader worker (pid(s) {pid}) exited unexpectedly: {origin.prefix}the stream of "
        f"worker {failure.worker} is not continued: {failure.why}.{why}\n"
        + _told(mine[-1:], *advice, cause=_STREAM)
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
        + _told(
            mine,
            Remedy(
                "Free what is short, or raise the limit on it (ulimit -u for processes, ulimit -n "
                "for descriptors, pids.max and memory.max of the container), or use fewer workers"
            ),
        )
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
    stream = task.index is None or (bool(task.keys) and all(key is None for key in task.keys))
    if stream:
        name, where = "an element of the stream", f"{where}, worker {task.worker}"
        advice = _find_element(task.worker)
    elif sample is not None:
        advice = _load_alone(sample)
    else:
        advice = [Remedy(f"Load the samples of batch {task.number} in a separate Python process")]
    if not stream and not past_it:
        advice.append(Remedy("Or go on without it", 'DataLoader(..., on_bad_sample="skip")'))
    convicted = _convicted(verdict)
    if convicted:
        deaths = [_without_a_sender(one) for one in deaths]
    pids = ", ".join(str(one.pid) for one in deaths)
    error = PoisonSample(
        f"DataLoader worker (pid(s) {pids}) exited unexpectedly: {obituaries.origin.prefix}{name} "
        f"({where}) ended {len(verdict.deaths)} workers in a row{_alone(verdict)}."
        f"{convicted}{_why_not_past_it(verdict, past_it)}\n{_told(deaths, *advice)}"
    )
    error.sample = sample
    return error


def _convicted(verdict: v.Poisoned) -> str:
    """Why it is to blame for having been killed, if no death says so by itself."""
    alone = verdict.deaths[len(verdict.deaths) - verdict.alone :]
    if not alone or not all(one.unproven for one in alone):
        return ""
    what = "The batch is" if verdict.position is None else "The sample is"
    longest = 1000 * max(one.seconds or 0.0 for one in alone)
    least = min(verdict.pauses, default=0.0)
    return (
        f" {what} to blame: loaded alone {len(alone)} times, each time after a pause of at "
        f"least {least:.1f} s, its worker lived through the pause and was killed within "
        f"{max(1.0, longest):.0f} ms after it had begun to load it."
    )


def _without_a_sender(death: Incident) -> Incident:
    """What was thought of it before its sample was convicted is not true any more."""
    if death.cause not in ("killed-from-outside", "killed-unexplained"):
        return death
    return replace(death, cause=UNKNOWN, confidence="low", because=(), remedies=())


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


def _told(deaths: Sequence[Incident], *advice: Remedy, cause: str = "") -> str:
    """The deaths, why they were, and one list of what to do: the advice first, then what the last
    death suggests. `cause`: to read more of, if that is not the last death's."""
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
        lines += [f"  because: {reason}" for reason in deaths[-1].because]
    stack = next((one.stack for one in reversed(deaths) if one.stack), "")
    if stack:
        lines.append("The last stack that a worker left:")
        lines.append(_indented(stack.strip()))
    lines.append("What to do:")
    more = deaths[-1].advice() if deaths else ()
    said = {one.text for one in advice} | {ALONE.text}
    for remedy in (*advice, *(one for one in more if one.text not in said)):
        lines.append(f"  - {remedy.text}")
        lines += [f"      {line}" for line in remedy.command.splitlines()]
    causes = [cause, deaths[-1].cause if deaths else ""]
    lines += [f"  more: holdfast explain {one}" for one in causes if one not in ("", UNKNOWN)]
    return "\n".join(lines)


def _indented(text: Any) -> str:
    return "\n".join(f"    {line}" for line in str(text).splitlines())
