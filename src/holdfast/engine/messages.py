"""The errors that end a run: what happened, why, and what to do."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from holdfast.autopsy.catalogue import SHARED_REMEDIES, UNKNOWN
from holdfast.autopsy.cause import Remedy
from holdfast.autopsy.incident import Incident
from holdfast.autopsy.verdict import remedies_for
from holdfast.engine import events as ev
from holdfast.engine.continuation import RAISED_AGAIN
from holdfast.engine.deaths import Deaths
from holdfast.engine.epoch import StartRefused
from holdfast.engine.machine import RAISES
from holdfast.errors import (
    PoisonSample,
    RestartLimitExceeded,
    StreamLost,
    WorkerLost,
    WorkerStartError,
)
from holdfast.explain.clues import find
from holdfast.loader_identity import LoaderIdentity
from holdfast.samples.substitute import BatchHints, position_of, sample_of

_SHOWN_DEATHS = 10  # deaths
_STREAM_CAUSE = "stream-not-repeatable"
SAME_SAMPLE_DEATHS = 3  # from this many on, the error says that all were at one sample,
SAME_BATCH_DEATHS = 2  # or at one batch
_SHOWN_INDICES = 20


def gave_up(
    failure: ev.GaveUp, policy: ev.RestartPolicy, limits: ev.Limits, deaths: Deaths
) -> WorkerLost | WorkerStartError:
    """The error when workers are no longer replaced."""
    mine = [one for one in deaths.all() if one.worker_id == failure.worker]
    if failure.reason == "shortage":
        return _no_resource(failure, mine, deaths.origin)
    if failure.reason == "cannot-start":
        return _never_ready(failure, mine[-limits.failed_starts :], deaths.origin)
    if failure.reason == "cannot-catch-up":
        return _never_caught_up(failure, mine[-limits.failed_starts :], deaths.origin)
    if failure.reason == "stuck":
        return _too_many_stuck(failure, deaths.all(), limits, deaths.origin)
    if failure.reason == "lost":
        return WorkerLost(
            f"DataLoader worker (pid(s) none) exited unexpectedly: {deaths.origin.prefix}"
            f"{failure.why}"
        )
    if failure.reason == "stream":
        return _not_continued(failure, mine, deaths)
    count = len(failure.deaths)
    counted = deaths.incidents_of(failure.deaths)  # without those that a bad sample has caused
    prefix = deaths.origin.prefix
    return RestartLimitExceeded(
        f"DataLoader worker ({_pids(counted)}) exited unexpectedly: {prefix}{count} deaths within "
        f"{policy.period:g} s are more than max_restarts allows ({policy.intensity})."
        f"{_all_at_one(counted, count) or _at_batch(failure, counted)}\n"
        + _details(counted, *_after_too_many(failure, counted, policy.period))
    )


def _pids(deaths: Iterable[Incident | StartRefused]) -> str:
    """In torch's words. A thread has none, and of an actor that has not started it is not known."""
    known = [str(one.pid) for one in deaths if one.pid is not None]
    return f"pid(s) {', '.join(known) or 'none known'}"


def _at_one(deaths: Sequence[Incident], count: int) -> Incident | None:
    """One of the deaths, if all of them were at the same sample or element."""
    places = {(one.worker_id, one.batch, one.position) for one in deaths}
    steps = {one.step for one in deaths}
    if (
        len(deaths) < min(count, SAME_SAMPLE_DEATHS)
        or len(places) != 1
        or not steps <= {"fetch", "transform"}
    ):
        return None
    return deaths[-1] if deaths[-1].position is not None else None


def _all_at_one(deaths: Sequence[Incident], count: int) -> str:
    one = _at_one(deaths, count)
    if one is None:
        return ""
    name = "the same element" if one.sample is None else f"the same sample, {one.sample!r}"
    place = f"worker {one.worker_id}, batch {one.batch}, position {one.position}"
    return f" All of them were at {name} ({place}). Look at that first."


def _batch_of(failure: ev.GaveUp, deaths: Sequence[Incident]) -> int:
    """How many of the deaths were at the batch of the last one, if no batch is known of the others;
    else 0."""
    task = failure.task
    known = [one for one in deaths if one.step != "unknown"]
    places = {(one.worker_id, one.batch, one.step) for one in known}
    if task is None or places != {(failure.worker, task.number, "fetch")}:
        return 0
    return len(known) if len(known) >= SAME_BATCH_DEATHS else 0


def _at_batch(failure: ev.GaveUp, deaths: Sequence[Incident]) -> str:
    count, task = _batch_of(failure, deaths), failure.task
    if not count or task is None:
        return ""
    indices = [one for one in task.keys if one is not None]
    named = f", indices {_listed(indices)}" if indices else ""
    whole = count == len(deaths)
    return (
        f" {'All' if whole else count} of them were at batch {task.number} (worker {task.worker}"
        f"{named}){'' if whole else ', and no other batch is known'}. Look at its samples first."
    )


def _listed(indices: Sequence[Any]) -> str:
    shown = ", ".join(map(repr, indices[:_SHOWN_INDICES]))
    more = len(indices) - _SHOWN_INDICES
    return f"{shown}, … and {more} more" if more > 0 else shown


def _load_batch(task: ev.Task, deaths: Sequence[Incident]) -> list[Remedy]:
    advice = [Remedy(f"Load the samples of batch {task.number} in a separate Python process")]
    if any(one.evidence.get("ray_cause") for one in deaths):
        advice.append(
            Remedy(
                "Or use worker processes: they find out which sample it is, and can go on without",
                'DataLoader(..., worker_method="multiprocessing", on_bad_sample="skip")',
            )
        )
    return advice


def _after_too_many(failure: ev.GaveUp, deaths: Sequence[Incident], period: float) -> list[Remedy]:
    count = len(failure.deaths)
    one = _at_one(deaths, count)
    allow = f"max_restarts=({max(20, 4 * count)}, {period:g})"
    batch = failure.task if one is None and _batch_of(failure, deaths) else None
    if one is None and batch is None:
        return [
            Remedy("If all deaths have the same cause, fix that"),
            Remedy(
                f"If workers die for reasons outside of the program, allow more, for example "
                f"{allow}, or None for no limit"
            ),
        ]
    if one is None:
        assert batch is not None
        advice = _load_batch(batch, deaths)
    else:
        advice = _find_element(one.worker_id) if one.sample is None else _load_alone(one.sample)
    return [
        *advice,
        Remedy(
            "Allow more restarts only if it does not fail there: if it kills its worker, "
            "max_restarts=None would start workers for ever"
        ),
    ]


def _load_alone(sample: Any) -> list[Remedy]:
    return [
        Remedy(
            f"Load dataset[{sample!r}] by itself in a separate Python process to see it fail, then "
            "fix that sample",
            f'python -X faulthandler -c "import mydata; mydata.dataset[{sample!r}]"',
        )
    ]


def _find_element(worker: int) -> list[Remedy]:
    return [
        Remedy(
            f"Find the element: iterate the dataset in one process as worker {worker} does. It is "
            "the one after the last number that is printed",
            "import types, torch.utils.data._utils.worker as worker\n"
            f"worker._worker_info = types.SimpleNamespace(id={worker}, num_workers=NUM_WORKERS, "
            "seed=0, dataset=dataset)   # for get_worker_info()\n"
            "for number, element in enumerate(dataset): print(number, flush=True)",
        ),
        Remedy("Then fix that element, or leave it out in the dataset's __iter__"),
    ]


def _never_ready(
    failure: ev.GaveUp, mine: Sequence[Incident], origin: LoaderIdentity
) -> WorkerStartError:
    """The error for a worker that died in every start."""
    if mine and mine[-1].cause == "nursery-failed":
        advice = "See the traceback above: it is from the process that starts the workers"
    else:
        advice = (
            "Run worker_init_fn and load one sample of the dataset by hand in a fresh Python "
            "process; a library that exits or crashes when it is loaded does so there too"
        )
    return _not_started_again(failure, mine, origin, "starting", advice)


def _never_caught_up(
    failure: ev.GaveUp, mine: Sequence[Incident], origin: LoaderIdentity
) -> WorkerStartError:
    """The error for a worker that died each time before it reached its predecessor's position."""
    advice = (
        "Iterate over the dataset by hand in a fresh Python process, as far as the batch above; if "
        "it has load_state_dict(), load a state there and go on from it"
    )
    doing = "catching up with its predecessor"
    return _not_started_again(failure, mine, origin, doing, advice)


def _not_started_again(
    failure: ev.GaveUp, mine: Sequence[Incident], origin: LoaderIdentity, doing: str, advice: str
) -> WorkerStartError:
    return WorkerStartError(
        f"DataLoader worker ({_pids(mine[-1:])}) exited unexpectedly: {origin.prefix}worker "
        f"{failure.worker} died again and again while it was {doing}, so it is not started "
        f"again.\n{_details(mine, Remedy(advice))}"
    )


def _too_many_stuck(
    failure: ev.GaveUp, known: Sequence[Incident], limits: ev.Limits, origin: LoaderIdentity
) -> WorkerLost:
    """The error for more threads that do not return than may be abandoned."""
    stalled = [one for one in known if one.kind == "unkillable"]
    return WorkerLost(
        f"DataLoader worker (pid(s) none: threads) exited unexpectedly: {origin.prefix}"
        f"{failure.deaths[-1].stuck} worker threads of this program do not return, and "
        f"{limits.stuck} may be abandoned at a time. A thread cannot be killed: each keeps its "
        "memory, its files, and perhaps a lock.\n"
        + _details(
            stalled,
            Remedy("Find out why the samples above do not return; their stacks are in the log"),
            Remedy(
                "Or use worker processes, which can be killed",
                'DataLoader(..., worker_method="multiprocessing")',
            ),
        )
    )


def _not_continued(failure: ev.GaveUp, mine: Sequence[Incident], deaths: Deaths) -> StreamLost:
    """The error for a stream that is not continued."""
    origin, recovery = deaths.origin, deaths.recovery
    why = ""
    if recovery == "state":
        advice = [
            Remedy(
                "If the state does not lead to the same batches, have the stream drawn again and "
                "compared",
                'DataLoader(..., iterable_recovery="auto")',
            ),
            Remedy(
                "Or make sure that load_state_dict() accepts the state of state_dict() in another "
                "process"
            ),
        ]
    elif failure.why == RAISES:
        advice = [
            Remedy(
                "Have streams continued by another process; the log says whether that was exact",
                'DataLoader(..., iterable_recovery="auto")',
            )
        ]
    elif RAISED_AGAIN in failure.why:
        advice = [
            Remedy(
                "Fix the cause of that exception: after a death a stream is drawn again from its "
                "start, so its source must be available then too"
            ),
            Remedy("With state_dict() and load_state_dict() it need not be drawn again"),
        ]
    else:
        why = (
            " The epoch is not delivered without the rest: it would be too short, and other ranks "
            "would wait for batches that never come."
        )
        advice = [*remedies_for(_STREAM_CAUSE, None)]
    return StreamLost(
        f"DataLoader worker ({_pids(mine[-1:])}) exited unexpectedly: {origin.prefix}the stream of "
        f"worker {failure.worker} is not continued: {failure.why}.{why}\n"
        + _details(mine[-1:], *advice, cause=_STREAM_CAUSE)
    )


def _no_resource(
    failure: ev.GaveUp, mine: Sequence[Incident], origin: LoaderIdentity
) -> WorkerStartError:
    """The error for a worker that could not be started for lack of a resource."""
    last = [one for one in mine if one.pid is not None][-1:]
    errors = Counter(death.errno for death in failure.deaths if death.errno is not None)
    said = "; ".join(
        f"{errno.errorcode.get(number, number)} ({os.strerror(number)}), {count} times"
        for number, count in errors.most_common()
    )
    seconds = failure.deaths[-1].at - failure.deaths[0].at
    return WorkerStartError(
        f"DataLoader worker ({_pids(last)}) exited unexpectedly: {origin.prefix}worker "
        f"{failure.worker} could not be started in {len(failure.deaths)} tries within "
        f"{seconds:.0f} s. The system says: {said}.\n"
        + _details(
            mine,
            Remedy(
                "Free the resource, or raise its limit (ulimit -u for processes, ulimit -n for "
                "descriptors, pids.max and memory.max of the container), or use fewer workers"
            ),
        )
    )


def poisoned(
    verdict: ev.Poisoned,
    known: Deaths,
    hint: BatchHints | None = None,
    *,
    past_it: bool = False,
) -> PoisonSample:
    """The error for a sample that ended several workers in a row.

    `past_it`: the user wants to go on without bad samples, which is not possible here.
    """
    task, position = verdict.task, position_of(verdict.position)
    deaths = [
        one
        for one in known.all()
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
        advice = _load_batch(task, deaths)
    if not stream and not past_it:
        advice.append(Remedy("Or go on without it", 'DataLoader(..., on_bad_sample="skip")'))
    proof = _proof(verdict)
    if proof:
        deaths = [_without_a_sender(one) for one in deaths]
    error = PoisonSample(
        f"DataLoader worker ({_pids(deaths)}) exited unexpectedly: {known.origin.prefix}{name} "
        f"({where}) ended {len(verdict.deaths)} workers in a row{_alone(verdict)}."
        f"{proof}{_why_not_past_it(verdict, past_it)}\n{_details(deaths, *advice)}"
    )
    error.sample = sample
    return error


def _proof(verdict: ev.Poisoned) -> str:
    """The evidence that the sample has killed its workers, if no single death shows it."""
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
    """Remove the verdict of a kill from outside: the sample was the reason."""
    if death.cause not in ("killed-from-outside", "killed-unexplained"):
        return death
    return replace(death, cause=UNKNOWN, confidence="low", because=(), remedies=())


def _alone(verdict: ev.Poisoned) -> str:
    """How often it was loaded alone."""
    if not verdict.alone:
        return ""
    what = "it" if verdict.position is not None else "the batch"
    times = "once" if verdict.alone == 1 else f"{verdict.alone} times"
    return f", {times} when {what} was loaded alone by a fresh one"


def _why_not_past_it(verdict: ev.Poisoned, past_it: bool) -> str:
    if not past_it:
        return ""
    if verdict.tests_passed:
        return (
            f"\nTried alone ({verdict.tests_passed} times for this batch), samples did not end "
            "their worker, so none is left out: the worker ends only if they are loaded one after "
            "another. Most often the reason is memory that is not freed, or a library that an "
            "earlier sample has broken."
        )
    return (
        "\non_bad_sample cannot leave it out: an element of an IterableDataset cannot be skipped."
    )


def cannot_start(refused: StartRefused, origin: LoaderIdentity) -> WorkerStartError:
    """The error for a worker whose main module or arguments did not load."""
    failure = refused.failure
    advice = ""
    found = find(failure.text)
    if found:
        cause = found[0].slug
        to_do = [f"    {remedy}" for remedy in remedies_for(cause, None)[:2]]
        advice = "\n".join(["", f"What to do (more: holdfast explain {cause}):", *to_do])
    return WorkerStartError(
        f"DataLoader worker ({_pids([refused])}) exited unexpectedly: {origin.prefix}worker "
        f"{refused.worker} could not start. It says:\n\n{_indented(failure.text)}{advice}"
    )


def _details(deaths: Sequence[Incident], *advice: Remedy, cause: str = "") -> str:
    """The deaths, their reasons, and one list of what to do: first `advice`, then the remedies for
    the last death. `cause` is a further page of the manual to name."""
    lines: list[str] = []
    told = ""
    for one in deaths[-_SHOWN_DEATHS:]:
        how = one.what() + one.where()
        again = f"{one.who()} likewise; {one.action}"
        lines.append(f"  {one.sentence() if how != told else again}")
        told = how
    if len(deaths) > _SHOWN_DEATHS:
        lines.insert(0, f"  … {len(deaths) - _SHOWN_DEATHS} more before these")
    if deaths:
        lines += [f"  because: {reason}" for reason in deaths[-1].because]
    stack = next((one.stack for one in reversed(deaths) if one.stack), "")
    if stack:
        lines.append("The last stack that a worker left:")
        lines.append(_indented(stack.strip()))
    lines.append("What to do:")
    more = deaths[-1].advice() if deaths else ()
    said = {one.text for one in advice} | {SHARED_REMEDIES["load it alone"].text}
    for remedy in (*advice, *(one for one in more if one.text not in said)):
        lines.append(f"  - {remedy.text}")
        lines += [f"      {line}" for line in remedy.command.splitlines()]
    causes = [cause, deaths[-1].cause if deaths else ""]
    lines += [f"  more: holdfast explain {one}" for one in causes if one not in ("", UNKNOWN)]
    return "\n".join(lines)


def _indented(text: Any) -> str:
    return "\n".join(f"    {line}" for line in str(text).splitlines())
