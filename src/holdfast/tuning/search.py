"""Which setting to try next, and when to stop. Pure: from what was measured so far.

A trial costs a second or two, and there are hundreds of settings. So one thing is found after the
other: how many worker processes are worth having (1, 2, 4, … until more of them bring nothing,
then between the last two), whether threads would do, the prefetch factor for that, the simulated
training step, and how processes are best started. What is close is tried again, in turns, so that
what else the machine does meanwhile is the same for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from holdfast.tuning.measurement import NEARLY, Estimate, Setting, Trial, estimate

LINEAR: Final = 1.15  # times the rate of one worker that each of many may have
WORTH_IT: Final = NEARLY  # times the rate that more workers have to bring
AHEAD: Final = 1.15  # times the rate of the training step that is enough
PREFETCH_WORTH_IT: Final = 1.07
MAIN_WORTH_IT: Final = 2.0  # times the rate of workers that the main process has to have alone
KEPT_WAITING: Final = 0.05  # of the time: the consumer hardly waits
BUSY: Final = 0.85  # of the time: workers have something to do
CROWDED: Final = 0.25  # of the time without a processor: other programs use them
FULL: Final = 0.9  # of the room: more is not tried
CLOSE: Final = 0.25  # settings that differ by less are tried again
VAGUE: Final = 0.2  # error of a rate from which nothing should be concluded
VISITS: Final = 3  # of settings that are close
SHARES: Final = {"workers": 0.5, "threads": 0.35, "again": 0.25, "rest": 0.0}
"""The part of the time that has to be left for a phase to begin another trial."""


@dataclass(frozen=True)
class Conditions:
    """What a setting has to fit."""

    cores: float  # for each rank
    room: int | None = None  # bytes for each rank; None if unknown
    most: int = 32  # workers
    step: float = 0.0  # seconds of the training step; 0 if unknown
    seconds: float = 60.0
    starts: tuple[str, ...] = ("fork",)  # that can be used; the first for most trials
    now: Setting | None = None  # what the loader has, if one was given


@dataclass(frozen=True)
class Request:
    """What was asked for, as far as a recommendation needs it."""

    batch_size: int | None = 32
    ranks: int = 1
    default_start: str = "fork"
    unpicklable: str = ""  # the part of the dataset that cannot be pickled
    budget_is_ours: bool = False  # "auto" would not know about the memory or the ranks given
    is_loader: bool = False  # a loader was named, and not its dataset
    untried: str = ""  # the worker method of that loader, if it is none that is tried
    given: Mapping[str, str] = field(default_factory=dict)  # more arguments of the code line


@dataclass
class Search:
    """All trials so far, and what follows from them."""

    conditions: Conditions
    trials: list[Trial] = field(default_factory=list)
    _known: dict[Setting, Estimate | None] = field(default_factory=dict)

    def add(self, trial: Trial) -> None:
        self.trials.append(trial)
        self._known.pop(trial.setting, None)

    # -- what is known ---------------------------------------------------------------------

    def known(self, setting: Setting) -> Estimate | None:
        if setting not in self._known:
            same = [one for one in self.trials if one.setting == setting]
            failed = any(one.trouble is not None for one in same)  # once is too often
            self._known[setting] = None if failed else estimate(same, self.conditions.cores)
        return self._known[setting]

    def tried(self, setting: Setting) -> bool:
        return any(one.setting == setting for one in self.trials)

    def failed(self, setting: Setting) -> bool:
        """Whether a trial of a setting had no result."""
        return any(one.setting == setting and one.trouble is not None for one in self.trials)

    def curve(self, kind: str) -> dict[int, Estimate]:
        """Estimates by number of workers, with all else as at first.

        Twice as many workers are not more than twice as quick: a rate that says so was measured at
        an odd time. And on a busy machine a worker that has done its batches waits for another one
        that has no processor, because batches come in order. So if workers are always busy there,
        the rate is that of one times their number, as far as processors allow.
        """
        found: dict[int, Estimate] = {}
        for workers, one in self._measured(kind).items():
            if one.busy >= BUSY and one.crowded >= CROWDED and 1 in found and kind == "processes":
                likely = min(one.limit, workers * found[1].rate)
                one = replace(one, rate=max(one.rate, likely))
            most = min(
                (LINEAR * few.rate * workers / count for count, few in found.items()),
                default=one.rate,
            )
            found[workers] = one if one.rate <= most else replace(one, rate=most)
        return found

    def _measured(self, kind: str) -> dict[int, Estimate]:
        found = {}
        for one in self.trials:
            if one.setting.workers and one.setting == self.plain(kind, one.setting.workers):
                known = self.known(one.setting)
                if known is not None:
                    found[one.setting.workers] = known
        return dict(sorted(found.items()))

    def plain(self, kind: str, workers: int) -> Setting:
        if kind == "threads":
            return Setting.threads(workers)
        return Setting(workers, start=self.start) if workers else Setting.main()

    @property
    def start(self) -> str:
        """How processes are started in most trials: the first way that works."""
        for one in self.conditions.starts:
            if not self.failed(Setting(1, start=one)):
                return one
        return self.conditions.starts[0]

    @property
    def base(self) -> Trial | None:
        """The first trial of a setting that works."""
        return next((one for one in self.trials if not self.failed(one.setting)), None)

    def need(self, setting: Setting) -> int | None:
        """Bytes that a setting will take, from what others took; None if nothing is known."""
        if not setting.workers:
            return 0
        alike = [one for one in self.trials if one.slices and one.setting.kind == setting.kind]
        if not alike:
            return None
        batches = max(
            one.shared_bytes / (one.setting.workers * one.setting.prefetch) for one in alike
        )
        workers = max(
            one.worker_bytes / (one.setting.workers if setting.kind == "threads" else 1)
            for one in alike
        )
        return int(setting.workers * (workers + setting.prefetch * batches))

    def fits(self, setting: Setting) -> bool:
        room, need = self.conditions.room, self.need(setting)
        return room is None or need is None or need <= FULL * room

    # -- what is best ----------------------------------------------------------------------

    def enough(self, kind: str) -> Estimate | None:
        """The fewest workers of a kind that are nearly as quick as any number, or quick enough."""
        found = self.curve(kind)
        if not found:
            return None
        best = max(found.values(), key=lambda one: one.rate)
        wanted = best.rate / WORTH_IT
        if self.conditions.step:
            wanted = min(wanted, AHEAD / self.conditions.step)
        return next(one for one in found.values() if one.rate >= wanted or one.uses_all_processors)

    def best(self) -> Estimate | None:
        """The kind of workers and their number, with all else as at first.

        Processes are preferred, because they may die; and workers of any kind to none, because
        the main process trains meanwhile.
        """
        processes, threads = self.enough("processes"), self.enough("threads")
        main = self.known(Setting.main())
        chosen = processes
        if threads is not None and (chosen is None or self._are_better(threads, chosen)):
            chosen = threads
        if main is not None and (chosen is None or self._main_is_better(main, chosen)):
            chosen = main
        return chosen

    def _are_better(self, threads: Estimate, processes: Estimate) -> bool:
        """Clearly, because a crash in a thread ends the program."""
        quickest = max(self.curve("processes").values(), key=lambda one: one.rate)
        noise = 1 + 2 * math.hypot(threads.error, quickest.error)
        return threads.rate > WORTH_IT * noise * quickest.rate and not self._satisfied(processes)

    def _satisfied(self, one: Estimate) -> bool:
        step = self.conditions.step
        return bool(step) and one.rate >= AHEAD / step

    def _main_is_better(self, main: Estimate, workers: Estimate) -> bool:
        step = self.conditions.step
        if step:  # what the main process loads, the training step waits for
            return 1 / main.rate <= KEPT_WAITING * step
        # Workers load while the main process trains. It is quicker without them only if training
        # on a batch takes less time than what they lose.
        return main.rate > MAIN_WORTH_IT * workers.rate

    def chosen(self) -> Estimate | None:
        """The best setting, with the prefetch factor that was found for it."""
        best = self.best()
        if best is None or not best.setting.workers:
            return best
        found = [best]
        for prefetch in (1, 4, 8):
            other = self.known(replace(best.setting, prefetch=prefetch))
            if other is not None and min(other.visits, best.visits) > 1:
                found.append(other)
        quickest = max(found, key=lambda one: one.rate)
        if quickest.rate < PREFETCH_WORTH_IT * best.rate or not _clear(best, quickest):
            return best
        return quickest

    # -- how sure that is ------------------------------------------------------------------

    def busiest(self) -> float:
        """The largest part of the time in which workers had no processor because of other programs.
        More workers than processors wait for each other."""
        main = self.known(Setting.main())
        found = [*self.curve("processes").values(), *([] if main is None else [main])]
        few = [one for one in found if one.setting.workers <= max(1, self.conditions.cores)]
        return max((one.crowded for one in few), default=0.0)

    def is_unfinished(self, best: Estimate) -> bool:
        """Whether there was no time for more workers, which may be quicker."""
        workers, found = best.setting.workers, self.curve(best.setting.kind)
        if not workers or workers != max(found) or not self.rises(found):
            return False
        more = replace(best.setting, workers=workers + 1)
        return more.workers <= self.conditions.most and self.fits(more) and not self.failed(more)

    # -- what is next ----------------------------------------------------------------------

    def next(self, left: float) -> Setting | None:
        """The setting to try next, with `left` seconds to go; None if there is nothing to gain."""
        for phase, settings in self._phases():
            if left < SHARES[phase] * self.conditions.seconds:
                continue
            for one in settings:
                return one
        return None

    def _phases(self) -> Iterator[tuple[str, Iterable[Setting]]]:
        yield "rest", self._first()
        if self.base is None:
            return
        yield "workers", self._workers("processes", 1)
        yield "threads", self._threads()
        yield "again", self._again()
        yield "rest", self._prefetch()
        yield "rest", self._consumer()
        yield "rest", self._starts()

    def _first(self) -> Iterator[Setting]:
        """One process; if that fails, another way to start it, then a thread, then no worker."""
        if self._hopeless():
            return
        for start in self.conditions.starts:
            one = Setting(1, start=start)
            if not self.tried(one):
                yield one
            if not self.failed(one):
                break
        else:
            for one in (Setting.threads(1), Setting.main()):
                if not self.tried(one):
                    yield one
            return
        now = self.conditions.now
        for one in (Setting.main(), *([] if now is None else [now])):
            if not self.tried(one):
                yield one

    def _hopeless(self) -> bool:
        """Whether other ways to start workers would change nothing."""
        troubles = [one.trouble for one in self.trials if one.trouble is not None]
        if len(troubles) < len(self.trials):
            return False
        raised = [one for one in troubles if one.kind == "raised"]
        if any("fork" not in one.words.lower() for one in raised):  # as CUDA's message says
            return True
        return sum(one.kind == "hung" for one in troubles) > 1

    def _workers(self, kind: str, first: int) -> Iterator[Setting]:
        """The next number of workers to try."""
        found = self.curve(kind)
        failed = [
            one.setting.workers
            for one in self.trials
            if self.failed(one.setting) and one.setting == self.plain(kind, one.setting.workers)
        ]
        if not found:
            if not failed:
                yield self.plain(kind, first)
            return
        for workers, one in self._measured(kind).items():
            odd = one.visits < VISITS and one.rate > 1.1 * found[workers].rate
            if odd or (one.visits < 2 and one.error > VAGUE):
                yield one.setting
        top = max(found)
        ceiling = min([self.conditions.most + 1, *(one for one in failed if one > top)])
        if self.rises(found):
            following = self._following(top)
            if following >= ceiling:
                most = self.conditions.most
                following = most if ceiling > most else (top + ceiling) // 2
            while following > top and not self.fits(self.plain(kind, following)):
                following = top + (following - top) // 2
            if following > top and following not in failed:
                yield self.plain(kind, following)
                return
        elif self._unclear(found):
            yield self.plain(kind, top)
        enough = self.enough(kind)
        assert enough is not None
        few = max((one for one in found if one < enough.setting.workers), default=0)
        gap = enough.setting.workers - few
        if few and gap > max(1, enough.setting.workers // 6):
            yield self.plain(kind, few + gap // 2)

    def _following(self, top: int) -> int:
        """Twice as many; the number of processors comes before what is beyond it."""
        cores = round(self.conditions.cores)
        return cores if top < cores < 2 * top else 2 * top

    def rises(self, found: dict[int, Estimate]) -> bool:
        """Whether more workers may bring more."""
        top = found[max(found)]
        if top.uses_all_processors or top.takes_turns or self._satisfied(top):
            return False
        before = [one.rate for count, one in found.items() if count < max(found)]
        return not before or top.rate >= WORTH_IT * max(before)

    def _unclear(self, found: dict[int, Estimate]) -> bool:
        """Whether the largest number of workers was perhaps only measured at a bad time."""
        top = found[max(found)]
        if top.visits > 1 or top.uses_all_processors or self._satisfied(top):
            return False
        before = max((one.rate for count, one in found.items() if count < max(found)), default=0.0)
        return bool(before) and top.rate * (1 + 2 * top.error) >= WORTH_IT * before

    def _threads(self) -> Iterator[Setting]:
        """Threads, beginning with as many as processes are enough."""
        processes = self.enough("processes")
        if processes is None:
            yield from self._workers("threads", 1)
            return
        if self._satisfied(processes) and self.tried(Setting.threads(processes.setting.workers)):
            return
        # One thread would not show whether two can run at a time.
        first = max(processes.setting.workers, min(2, self.conditions.most))
        yield from self._workers("threads", first)

    def _again(self) -> Iterator[Setting]:
        """Settings whose rates are close, in turns, until it is clear which is better."""
        best = self.best()
        if best is None:
            return
        rivals = [best]
        for kind in ("processes", "threads"):
            found = self.curve(kind)
            enough = self.enough(kind)
            if enough is None:
                continue
            rivals.append(enough)
            above = [one for count, one in found.items() if count > enough.setting.workers]
            rivals += above[:1]
        close = {one.setting: one for one in rivals if abs(one.rate / best.rate - 1) <= CLOSE}
        fewest = min(close.values(), key=lambda one: one.visits)
        if fewest.visits < 2 or (fewest.visits < VISITS and not _all_clear(close, best)):
            yield fewest.setting

    def _prefetch(self) -> Iterator[Setting]:
        best = self.best()
        if best is None or not best.setting.workers or self._satisfied(best):
            return
        if best.uses_all_processors or best.takes_turns:
            return  # batches that are made earlier are not made faster
        for prefetch in (4, 8):
            other = replace(best.setting, prefetch=prefetch)
            if not self.fits(other):
                return
            if not self.tried(other):
                yield other
            known, plain = self.known(other), self.known(best.setting)
            if known is None or plain is None:
                return
            gained = known.rate >= PREFETCH_WORTH_IT * plain.rate
            if gained and (min(known.visits, plain.visits) < 2 or not _clear(plain, known)):
                fewer = min((known, plain), key=lambda one: one.visits)
                if fewer.visits < VISITS:
                    yield fewer.setting
            if not gained:
                return

    def _consumer(self) -> Iterator[Setting]:
        """With the training step: whether that many workers really keep up with it."""
        chosen = self.chosen()
        if not self.conditions.step or chosen is None:
            return
        plain = replace(chosen.setting, step=self.conditions.step)
        if not self.tried(plain):
            yield plain

    def _starts(self) -> Iterator[Setting]:
        chosen = self.chosen()
        if chosen is None or chosen.setting.kind != "processes":
            return
        for start in self.conditions.starts:
            # Each of many processes would import torch anew, which says no more than two do.
            one = Setting(min(2, chosen.setting.workers), start=start)
            if start != chosen.setting.start and not self.tried(one):
                yield one


def _clear(one: Estimate, other: Estimate) -> bool:
    """Whether two rates differ by more than chance explains."""
    noise = math.hypot(one.error, other.error)
    return abs(one.rate - other.rate) > 2 * noise * max(one.rate, other.rate)


def _all_clear(close: dict[Setting, Estimate], best: Estimate) -> bool:
    """Whether each is clearly better or clearly no better than the best one."""
    for one in close.values():
        ratio = one.rate / best.rate
        noise = 2 * math.hypot(one.error, best.error)
        if one is not best and ratio * (1 - noise) < WORTH_IT < ratio * (1 + noise):
            return False
    return True
