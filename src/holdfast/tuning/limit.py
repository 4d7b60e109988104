"""What keeps loading from being quicker with a setting. Pure: from the trials."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from holdfast.autopsy.machine_facts import in_words
from holdfast.tuning.measurement import Estimate
from holdfast.tuning.search import KEPT_WAITING, WORTH_IT, Search

Confidence = Literal["high", "medium", "low"]
MOST_OF_IT: Final = 0.85
DISK: Final = 0.3  # of the workers' time
BUSY_MACHINE: Final = 0.25  # of the time in which workers had no processor
NOISY: Final = 0.12
SHORT_BATCH: Final = 0.003  # seconds


@dataclass(frozen=True)
class Limit:
    """What keeps loading from being quicker."""

    kind: str
    """``cpu``, ``memory``, ``disk``, ``gil``, ``consumer``, ``main process``, ``workers`` (too
    few), ``waiting`` (for something else) or ``unknown``."""
    words: str
    confidence: Confidence
    advice: str = ""


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
    words = f"the training step takes {ms(step)} a batch, loading {ms(1 / best.rate)}"
    sure: Confidence = "high" if best.rate * step * (1 - 2 * best.error) > 1 else "medium"
    if tried is not None:
        waited = tried.waiting
        words += f"; with a pause of that length instead of the step it waited {percent(waited)}"
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
    each = ms(cores / best.limit)
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
    words = f"the main process spends {percent(best.main_busy)} of its time on "
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
    words = f"workers waited for a disk {percent(best.disk)} of the time"
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
            f"a worker takes {ms(each)} for a batch, and for most of it waits for its turn: "
            "batches are so short that handing them over takes longer than making them",
            "low",
            "Larger batches.",
        )
    who = "workers were" if workers else "the main process was"
    words = (
        f"{who} waiting {percent(best.asleep)} of the time, neither for a processor nor "
        "for a local disk: for a network, a lock, another process, or asleep"
    )
    found = search.curve(best.setting.kind)
    before = [one.rate for count, one in found.items() if count < best.setting.workers]
    if workers >= search.conditions.most:
        if not before or best.rate > WORTH_IT * max(before):
            words += "; more workers are still quicker"
        return Limit("waiting", words, "high", f"--max-workers {2 * workers} tries more.")
    return Limit("waiting", words, "high" if best.asleep > 0.75 else "medium")


def percent(share: float) -> str:
    return f"{100 * min(1.0, share):.0f} %"


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
