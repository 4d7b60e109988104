"""Why each setting is recommended, and what else is to be said, in words. Pure: from the trials."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from holdfast.autopsy.machine_facts import in_words
from holdfast.tuning.limit import BUSY_MACHINE, limit_of, ms, percent
from holdfast.tuning.measurement import Estimate
from holdfast.tuning.search import WORTH_IT, Request, Search

SLOW_START: Final = 1.0  # seconds


def choices(
    search: Search, request: Request, best: Estimate, options: Mapping[str, Any]
) -> list[tuple[str, str, str]]:
    setting = best.setting
    return [
        ("num_workers", str(setting.workers), _why_workers(search, best)),
        ("prefetch_factor", *_why_prefetch(search, best)),
        ("memory_budget", *_why_budget(best, options)),
        ("start method", *_why_start(search, request, best)),
        ("worker method", *_why_method(search, best)),
    ]


def _why_workers(search: Search, best: Estimate) -> str:
    setting = best.setting
    found = search.curve(setting.kind)
    step = search.conditions.step
    if not setting.workers:
        workers = max(
            (one.rate for kind in ("processes", "threads") for one in search.curve(kind).values()),
            default=0.0,
        )
        if step:
            return f"loading a batch takes {ms(1 / best.rate)}, which the step hardly notices"
        return f"loading is quickest in the main process ({_gain(best.rate, workers)})"
    more = [one for count, one in found.items() if count > setting.workers]
    fewer = [one for count, one in found.items() if count < setting.workers]
    if step and best.rate * step >= 1:
        words = f"as few as keep up with a step of {ms(step)}"
        return words + (f"; {_compared(fewer[-1], best)}" if fewer else "")
    parts = [_compared(one, best) for one in (*fewer[-1:], *more[:1])]
    if best.uses_all_processors and not more:
        cores = search.conditions.cores
        parts.append(f"it keeps {'all ' * (cores > 1)}{cores:g} processor{'s' * (cores != 1)} busy")
    return "; ".join(parts) or "no other number was tried"


def _compared(one: Estimate, best: Estimate) -> str:
    return f"{one.setting.workers}: {_gain(one.rate, best.rate)}"


def _gain(rate: float, than: float) -> str:
    if not than:
        return "nothing to compare with"
    change = 100 * (rate / than - 1)
    return "as quick" if abs(change) < 1 else f"{change:+.0f} %"


def _why_prefetch(search: Search, best: Estimate) -> tuple[str, str]:
    setting = best.setting
    if not setting.workers:
        return "–", "has a meaning only with workers"
    parts = []
    for prefetch in (2, 4, 8):
        other = search.known(replace(setting, prefetch=prefetch))
        if prefetch != setting.prefetch and other is not None:
            parts.append(f"{prefetch}: {_gain(other.rate, best.rate)}")
    if not parts:
        step = search.conditions.step
        enough = step and best.rate * step >= 1
        return str(setting.prefetch), "enough for this step" if enough else "no other was tried"
    return str(setting.prefetch), "; ".join(parts)


def _why_budget(best: Estimate, options: Mapping[str, Any]) -> tuple[str, str]:
    setting, trial = best.setting, best.trials[-1]
    if not setting.workers:
        return "auto", "without workers there is one batch at a time"
    need = setting.workers * setting.prefetch * trial.batch_bytes
    words = f"up to {in_words(need)} of batches are in flight"
    if "memory_budget" in options:
        return options["memory_budget"], f'{words}; "auto" does not know the limit given here'
    if trial.budget_bytes is not None:
        words += f", and this allows {in_words(trial.budget_bytes)} here"
    return "auto", words


def _why_start(search: Search, request: Request, best: Estimate) -> tuple[str, str]:
    if best.setting.kind != "processes":
        return "–", "has a meaning only for worker processes"
    parts, seen = [], set()
    for one in search.trials:
        start = one.setting.start
        if one.setting.kind != "processes" or start in seen or one.setting.workers > 2:
            continue
        if one.trouble is not None:
            parts.append(f"{start}: fails ({one.trouble.words})")
        else:
            parts.append(
                f"{start}: first batch after {ms(one.first_batch)}, "
                f"{in_words(one.worker_bytes)} for each worker"
            )
        seen.add(start)
    if request.unpicklable:
        parts.append(f"others are not possible: {request.unpicklable} cannot be pickled")
    return best.setting.start, "; ".join(parts)


def _why_method(search: Search, best: Estimate) -> tuple[str, str]:
    processes, threads = search.enough("processes"), search.enough("threads")
    failed = [one for one in search.trials if one.trouble and one.setting.kind == "threads"]
    name = {"processes": "multiprocessing", "threads": "thread", "main": "–"}[best.setting.kind]
    if threads is None:
        if failed and failed[0].trouble is not None:
            return name, f"{failed[0].setting.words}: {failed[0].trouble.words}"
        return name, "threads were not tried"
    if processes is None:
        return name, "worker processes failed: see below"
    words = f"{threads.setting.words}: {_gain(threads.rate, processes.rate)} against "
    words += processes.setting.words
    if threads.takes_turns:
        words += "; they take turns, because Python's lock is taken"
    elif best.setting.kind == "processes" and threads.rate > processes.rate / WORTH_IT:
        saved = processes.setting.workers * processes.trials[-1].worker_bytes
        words += (
            f', so worker_method="thread" would do if the dataset is thread-safe, and save '
            f"{in_words(saved)}; a sample that crashes ends the program then"
        )
    elif best.setting.kind == "threads":
        words += ". The dataset has to be thread-safe, and a sample that crashes ends the program"
    return name, words


def notes(search: Search, request: Request, best: Estimate) -> list[str]:
    found = []
    busiest = search.busiest()
    if busiest > BUSY_MACHINE:
        found.append(
            f"Other programs were using the processors: workers had none in up to "
            f"{percent(busiest)} of the time. Rates are given without that time."
        )
    if search.is_unfinished(best):
        found.append(
            "There was no time to try more workers, which may be quicker: give it more --seconds."
        )
    bad = max(search.trials, key=lambda one: one.bad_samples)
    if bad.bad_samples:
        found.append(
            f"Some samples are bad and were left out, such as {bad.bad_sample}. "
            "holdfast scan lists all of them."
        )
    if best.setting.kind == "processes" and best.trials[0].first_batch > SLOW_START:
        found.append(
            f"The first batch takes {ms(best.trials[0].first_batch)}: persistent_workers=True "
            "pays that once, and not in every epoch."
        )
    if request.is_loader:
        found.append("The other arguments of the loader stay as they are.")
    if request.untried:
        found.append(
            f"The loader as it is has worker_method={request.untried!r}, which was not tried: what "
            "is recommended is the best of this machine alone."
        )
    now = search.conditions.now
    before = search.known(now) if now is not None else None
    if before is not None and before.setting != best.setting:
        found.append(
            f"The loader as it is ({before.setting.words}): {_gain(before.rate, best.rate)}. "
            f"Its limit: {limit_of(search, before).words}."
        )
    found += [
        f"{one.setting.words}: {one.trouble.words}"
        for one in search.trials
        if one.trouble is not None and one.setting.kind != "threads"
    ]
    return found
