"""What is recommended, what limits it, and how sure that is. Pure: from the trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from holdfast.autopsy.machine_facts import in_words
from holdfast.limits.shares import shares
from holdfast.tuning.measurement import Estimate, Setting, Trial
from holdfast.tuning.search import KEPT_WAITING, WORTH_IT, Search

__all__ = ["Advice", "Limit", "Request", "advise", "limit_of", "plain"]

Confidence = Literal["high", "medium", "low"]
MOST_OF_IT: Final = 0.85
DISK: Final = 0.3  # of the workers' time
BUSY_MACHINE: Final = 0.25  # of the time in which workers had no processor
VERY_BUSY: Final = 0.5
TOO_BUSY: Final = 0.85  # of the time without a processor: what is left says little
NOISY: Final = 0.12
SHORT_BATCH: Final = 0.003  # seconds
SLOW_START: Final = 1.0  # seconds
LEAST_BUDGET: Final = 64 << 20


@dataclass(frozen=True)
class Limit:
    """What keeps loading from being quicker."""

    kind: str
    """``cpu``, ``memory``, ``disk``, ``gil``, ``consumer``, ``main process``, ``workers`` (too
    few), ``waiting`` (for something else) or ``unknown``."""
    words: str
    confidence: Confidence
    advice: str = ""


@dataclass(frozen=True)
class Request:
    """What was asked for, as far as the advice needs it."""

    batch_size: int | None = 32
    ranks: int = 1
    default_start: str = "fork"
    unpicklable: str = ""  # the part of the dataset that cannot be pickled
    budget_is_ours: bool = False  # "auto" would not know about the memory or the ranks given
    is_loader: bool = False  # a loader was named, and not its dataset
    untried: str = ""  # the worker method of that loader, if it is none that is tried
    given: Mapping[str, str] = field(default_factory=dict)  # more arguments of the code line


@dataclass(frozen=True)
class Advice:
    """The recommendation."""

    best: Estimate
    limit: Limit
    confidence: Confidence  # in the number and kind of workers
    options: dict[str, Any]  # arguments of DataLoader, as they are to be given
    choices: list[tuple[str, str, str]]  # what, its value, and why
    notes: list[str]
    code: str


def advise(search: Search, request: Request) -> Advice | None:
    """None if no setting gave a batch."""
    best = search.chosen()
    if best is None:
        return None
    options = _options(search, request, best)
    return Advice(
        best=best,
        limit=limit_of(search, best),
        confidence=_confidence(search, best),
        options=options,
        choices=_choices(search, request, best, options),
        notes=_notes(search, request, best),
        code=_code(request, options),
    )


# -- what limits ---------------------------------------------------------------------------


def limit_of(search: Search, best: Estimate) -> Limit:
    """What keeps this setting from being quicker. What is measured comes before what is left."""
    found = (
        _consumer(search, best)
        or _memory(search, best)
        or _lock(search, best)
        or _processors(search, best)
        or _main_process(best)
        or _disk(best)
        or _too_few(search, best)
        or _waiting(search, best)
    )
    return found or Limit(
        "unknown",
        f"neither processors ({best.cpu:.1f} of {search.conditions.cores:g} used) nor disk, memory "
        "or the main process were busy enough to say",
        "low",
    )


def _consumer(search: Search, best: Estimate) -> Limit | None:
    step = search.conditions.step
    if not step or best.rate * step < 1:
        return None
    tried = search.known(replace(best.setting, step=step))
    words = f"the training step takes {_ms(step)} a batch, loading {_ms(1 / best.rate)}"
    sure: Confidence = "high" if best.rate * step * (1 - 2 * best.error) > 1 else "medium"
    if tried is not None:
        waited = tried.waiting
        words += f"; with a pause of that length instead of the step it waited {_percent(waited)}"
        if waited > 3 * KEPT_WAITING and tried.crowded < BUSY_MACHINE:
            sure = "low"
    return Limit("consumer", words, sure, "Faster loading would not make training faster.")


def _memory(search: Search, best: Estimate) -> Limit | None:
    """More workers would be quicker, and did not fit."""
    found = search.curve(best.setting.kind)
    workers = best.setting.workers
    if not found or not workers or workers != max(found):
        return None
    before = [one.rate for count, one in found.items() if count < workers]
    if best.uses_all_processors or (before and best.rate < WORTH_IT * max(before)):
        return None
    for one in search.trials:
        more = one.setting.kind == best.setting.kind and one.setting.workers > workers
        if more and one.trouble is not None and one.trouble.kind == "memory":
            words = f"with {one.setting.words} {one.trouble.words}"
            return Limit("memory", words, "high", _LESS_MEMORY)
    more_workers = replace(best.setting, workers=workers + 1)
    room = search.conditions.room
    if room is None or workers >= search.conditions.most or search.fits(more_workers):
        return None
    need = search.need(more_workers) or 0
    words = f"{workers + 1} workers would take {in_words(need)}, of {in_words(room)}"
    return Limit("memory", words, "medium" if best.error > NOISY else "high", _LESS_MEMORY)


_LESS_MEMORY: Final = (
    "More workers would be quicker if each took less: holdfast.pack(dataset), smaller caches, "
    "smaller batches; or threads, which share one dataset."
)


def _lock(search: Search, best: Estimate) -> Limit | None:
    if best.setting.kind != "threads" or search.conditions.cores < 1.5:
        return None
    if not any(one.takes_turns for one in search.curve("threads").values()):
        return None
    words = f"threads take turns: Python's lock is taken, and {best.cpu:.1f} processors are used"
    return Limit(
        "gil", words, "high" if best.visits > 1 else "medium", "Processes do not share it."
    )


def _processors(search: Search, best: Estimate) -> Limit | None:
    cores = search.conditions.cores
    part = best.rate / best.limit
    if part < MOST_OF_IT:
        return None
    each = _ms(cores / best.limit)
    words = (
        f"a batch takes {each} of processor time, so {cores:g} processor{'s' * (cores != 1)} "
        f"cannot do more than {best.limit:,.1f} batches a second; "
        f"{best.setting.words}: {best.rate:,.1f}"
    )
    sure: Confidence = "high" if part >= 0.9 and best.error <= NOISY else "medium"
    return Limit("cpu", words, sure, "Less work for each sample, or more processors.")


def _main_process(best: Estimate) -> Limit | None:
    if best.main_busy < MOST_OF_IT:
        return None
    words = f"the main process spends {_percent(best.main_busy)} of its time on "
    words += "taking batches, and workers wait for it" if best.setting.workers else "loading"
    return Limit(
        "main process",
        words,
        "high" if best.main_busy >= 0.95 and best.error <= NOISY else "medium",
        "Larger batches, or fewer and larger tensors in each.",
    )


def _disk(best: Estimate) -> Limit | None:
    if best.disk < DISK:
        return None
    read = max(one.read_bytes for one in best.trials)
    words = f"workers waited for a disk {_percent(best.disk)} of the time"
    words += f", and read {in_words(int(read))} a second from it" if read > 1 << 20 else ""
    sure: Confidence = "high" if best.disk >= 0.6 and read > 1 << 20 else "medium"
    return Limit("disk", words, sure, "A faster disk, or smaller files.")


def _too_few(search: Search, best: Estimate) -> Limit | None:
    """Workers that are all busy, on a machine that has processors for more."""
    workers, cores = best.setting.workers, search.conditions.cores
    if not workers or workers >= cores or best.wanted / workers < MOST_OF_IT:
        return None
    words = f"{best.setting.words}: busy all the time, and there are {cores:g} processors"
    return Limit("workers", words, "high" if best.error <= NOISY else "medium", "More workers.")


def _waiting(search: Search, best: Estimate) -> Limit | None:
    workers = best.setting.workers
    if best.asleep < 0.5:
        return None
    each = max(1, workers) / best.rate  # seconds that a worker takes for a batch
    if each < SHORT_BATCH:
        return Limit(
            "unknown",
            f"a worker takes {_ms(each)} for a batch, and for most of it waits for its turn: "
            "batches are so short that handing them over takes longer than making them",
            "low",
            "Larger batches.",
        )
    who = "workers were" if workers else "the main process was"
    words = (
        f"{who} waiting {_percent(best.asleep)} of the time, neither for a processor nor "
        "for a local disk: for a network, a lock, another process, or asleep"
    )
    found = search.curve(best.setting.kind)
    before = [one.rate for count, one in found.items() if count < best.setting.workers]
    if workers >= search.conditions.most:
        if not before or best.rate > WORTH_IT * max(before):
            words += "; more workers are still quicker"
        return Limit("waiting", words, "high", f"--max-workers {2 * workers} tries more.")
    return Limit("waiting", words, "high" if best.asleep > 0.75 else "medium")


# -- how sure ------------------------------------------------------------------------------


def _confidence(search: Search, best: Estimate) -> Confidence:
    """In the kind and number of workers: by noise, and by whether its rivals were tried enough."""
    error = best.error
    if _is_unfinished(search, best) or _busiest(search) > TOO_BUSY:
        return "low"
    if best.visits < 2 or error > 2 * NOISY:
        return "low" if error > NOISY else "medium"
    crowded = best.crowded > VERY_BUSY and not best.uses_all_processors
    return "high" if error <= NOISY and not crowded else "medium"


def _busiest(search: Search) -> float:
    """The largest part of the time in which workers had no processor because of other programs.
    More workers than processors wait for each other."""
    main = search.known(Setting.main())
    found = [*search.curve("processes").values(), *([] if main is None else [main])]
    few = [one for one in found if one.setting.workers <= max(1, search.conditions.cores)]
    return max((one.crowded for one in few), default=0.0)


def _is_unfinished(search: Search, best: Estimate) -> bool:
    """Whether there was no time for more workers, which may be quicker."""
    found = search.curve(best.setting.kind)
    if not best.setting.workers or best.setting.workers != max(found) or not search.rises(found):
        return False
    more = replace(best.setting, workers=best.setting.workers + 1)
    return more.workers <= search.conditions.most and search.fits(more) and not search.failed(more)


# -- the options ---------------------------------------------------------------------------


def _options(search: Search, request: Request, best: Estimate) -> dict[str, Any]:
    setting, room = best.setting, search.conditions.room
    options: dict[str, Any] = {"num_workers": setting.workers}
    if setting.workers:
        options["prefetch_factor"] = setting.prefetch
    trial = best.trials[-1]
    worker = max(one.worker_bytes for one in best.trials)
    if setting.workers and request.budget_is_ours and room is not None:
        share = shares(room, setting.workers, trial.batch_bytes).in_flight
        need = 2 * setting.workers * setting.prefetch * trial.batch_bytes
        options["memory_budget"] = _mebibytes(min(share, max(need, LEAST_BUDGET)))
    if setting.kind == "processes":
        if room is not None:
            allowed = shares(room, setting.workers, trial.batch_bytes).worker
            if 1.25 * worker > allowed:
                options["worker_memory_limit"] = _mebibytes(int(1.5 * worker))
        if setting.start != request.default_start:
            options["multiprocessing_context"] = setting.start
    elif setting.kind == "threads":
        options["worker_method"] = "thread"
    if any(one.bad_samples for one in search.trials):
        options["on_bad_sample"] = "skip"
    return options


def _code(request: Request, options: Mapping[str, Any]) -> str:
    words = ["dataset"]
    if request.batch_size is not None:
        words.append(f"batch_size={request.batch_size}")
    words += [f"{name}={value}" for name, value in request.given.items()]
    for name, value in options.items():
        words.append(f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}")
    return f"DataLoader({', '.join(words)})"


def _mebibytes(count: int) -> str:
    return f"{max(1, -(-count // (1 << 20)))}MiB"


def _choices(
    search: Search, request: Request, best: Estimate, options: Mapping[str, Any]
) -> list[tuple[str, str, str]]:
    setting = best.setting
    return [
        ("num_workers", str(setting.workers), _why_workers(search, best)),
        ("prefetch_factor", *_why_prefetch(search, best)),
        ("memory_budget", *_why_budget(search, best, options)),
        ("start method", *_why_start(search, request, best)),
        ("worker method", *_why_method(search, request, best)),
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
            return f"loading a batch takes {_ms(1 / best.rate)}, which the step hardly notices"
        return f"loading is quickest in the main process ({_gain(best.rate, workers)})"
    more = [one for count, one in found.items() if count > setting.workers]
    fewer = [one for count, one in found.items() if count < setting.workers]
    if step and best.rate * step >= 1:
        words = f"as few as keep up with a step of {_ms(step)}"
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


def _why_budget(search: Search, best: Estimate, options: Mapping[str, Any]) -> tuple[str, str]:
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
                f"{start}: first batch after {_ms(one.first_batch)}, "
                f"{in_words(one.worker_bytes)} for each worker"
            )
        seen.add(start)
    if request.unpicklable:
        parts.append(f"others are not possible: {request.unpicklable} cannot be pickled")
    return best.setting.start, "; ".join(parts)


def _why_method(search: Search, request: Request, best: Estimate) -> tuple[str, str]:
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


# -- what else is to be said ---------------------------------------------------------------


def _notes(search: Search, request: Request, best: Estimate) -> list[str]:
    found = []
    busiest = _busiest(search)
    if busiest > BUSY_MACHINE:
        found.append(
            f"Other programs were using the processors: workers had none in up to "
            f"{_percent(busiest)} of the time. Rates are given without that time."
        )
    if _is_unfinished(search, best):
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
            f"The first batch takes {_ms(best.trials[0].first_batch)}: persistent_workers=True "
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


def plain(search: Search, advice: Advice | None, request: Request) -> dict[str, Any]:
    """As data for JSON, a logbook, and the page of a report."""
    settings = list(dict.fromkeys(one.setting for one in search.trials))
    conditions = search.conditions
    return {
        "batch_size": request.batch_size,
        "ranks": request.ranks,
        "cores_per_rank": conditions.cores,
        "memory_bytes_per_rank": conditions.room,
        "step_seconds": conditions.step,
        "tried": [_row(search, one) for one in settings],
        "recommended": None if advice is None else advice.options,
        "method": "" if advice is None else advice.best.setting.kind,
        "confidence": "low" if advice is None else advice.confidence,
        "choices": [] if advice is None else [list(one) for one in advice.choices],
        "limit": None if advice is None else vars(advice.limit),
        "notes": [] if advice is None else advice.notes,
        "code": "" if advice is None else advice.code,
    }


def _row(search: Search, setting: Setting) -> dict[str, Any]:
    known = search.known(setting)
    if setting.workers and setting == search.plain(setting.kind, setting.workers):
        known = search.curve(setting.kind).get(setting.workers)
    trials: Sequence[Trial] = [one for one in search.trials if one.setting == setting]
    row: dict[str, Any] = {
        "kind": setting.kind,
        "workers": setting.workers,
        "prefetch_factor": setting.prefetch,
        "start_method": setting.start,
        "step_seconds": setting.step,
        "visits": len(trials),
    }
    if known is None:
        trouble = trials[-1].trouble
        return row | {"trouble": "" if trouble is None else trouble.words}
    last = known.trials[-1]
    return row | {
        "batches_per_second": _figure(known.rate),
        "error": _figure(known.error),
        "clock_batches_per_second": _figure(known.clock_rate),
        "processors_used": _figure(known.cpu),
        "without_processor": _figure(known.crowded),
        "main_process_busy": _figure(known.main_busy),
        "disk": _figure(known.disk),
        "lock": _figure(last.lock),
        "consumer_waited": _figure(known.waiting),
        "first_batch_seconds": _figure(last.first_batch),
        "worker_bytes": last.worker_bytes,
        "batch_bytes": last.batch_bytes,
    }


def _figure(value: float) -> float:
    return float(f"{value:.4g}")


def _percent(share: float) -> str:
    return f"{100 * min(1.0, share):.0f} %"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
