"""What is recommended, how sure that is, and both as data. Pure: from the trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.limits.shares import shares
from holdfast.tuning.limit import NOISY, Confidence, Limit, limit_of
from holdfast.tuning.measurement import Estimate, Setting, Trial
from holdfast.tuning.reasons import choices, notes
from holdfast.tuning.search import Request, Search

VERY_BUSY: Final = 0.5
TOO_BUSY: Final = 0.85  # of the time without a processor: what is left says little
LEAST_BUDGET: Final = 64 << 20


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
        choices=choices(search, request, best, options),
        notes=notes(search, request, best),
        code=_code(request, options),
    )


def _confidence(search: Search, best: Estimate) -> Confidence:
    """In the kind and number of workers: by noise, and by whether its rivals were tried enough."""
    error = best.error
    if search.is_unfinished(best) or search.busiest() > TOO_BUSY:
        return "low"
    if best.visits < 2 or error > 2 * NOISY:
        return "low" if error > NOISY else "medium"
    crowded = best.crowded > VERY_BUSY and not best.uses_all_processors
    return "high" if error <= NOISY and not crowded else "medium"


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
