"""``holdfast tune``: the best settings for a dataset on this machine, found by trying them."""

from __future__ import annotations

import json
import math
import multiprocessing
import sys
import textwrap
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import click

from holdfast import kernel, options
from holdfast.autopsy.logbook import Logbook
from holdfast.autopsy.readers import cgroup
from holdfast.limits import gauge
from holdfast.limits.shares import shares
from holdfast.scan import dataset_source
from holdfast.tuning import advice, trial_runner
from holdfast.tuning.advice import advise
from holdfast.tuning.measurement import Setting, Trial
from holdfast.tuning.search import Conditions, Request, Search
from holdfast.tuning.trial_process import Job
from holdfast.verbs import terminal
from holdfast.views import tuning_view
from holdfast.worker.pickling import find_unpicklable

FOUND, NOTHING_FOUND, INTERRUPTED = 0, 3, 130
STALL_TIMEOUT: Final = 20.0  # seconds, and at most a third of all
TRIALS: Final = 40  # of which there is time for
KEPT: Final = ("worker_init_fn", "drop_last", "in_order", "generator")
"""Arguments of a loader that its trials have too."""


@click.command()
@click.argument("target", metavar="MODULE:NAME | FILE.py:NAME")
@click.option("--arg", "args", multiple=True, metavar="KEY=VALUE", help="For a class or function.")
@click.option("--batch-size", type=click.IntRange(1), help="[default: the loader's, or 32]")
@click.option("--collate", metavar="MODULE:FUNCTION", help="collate_fn  [default: the loader's]")
@click.option(
    "--step",
    type=click.FloatRange(0, min_open=True),
    metavar="MS",
    help="How long the training step takes for a batch, in milliseconds.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(3),
    default=60.0,
    show_default=True,
    help="How long to try at most.",
)
@click.option("--max-workers", type=click.IntRange(1), help="[default: by the processors]")
@click.option("--memory", metavar="BYTES", help="What may be used, as 8GiB.  [default: all free]")
@click.option(
    "--ranks",
    type=click.IntRange(1),
    help="Training processes on this machine.  [default: as the launcher says, or 1]",
)
@click.option("--logbook", type=click.Path(path_type=Path), help="A folder, for holdfast report.")
@click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")
def tune(
    target: str,
    args: tuple[str, ...],
    batch_size: int | None,
    collate: str | None,
    step: float | None,
    seconds: float,
    max_workers: int | None,
    memory: str | None,
    ranks: int | None,
    logbook: Path | None,
    as_json: bool,
) -> None:
    """Find the best num_workers, prefetch_factor, memory_budget, start method and worker
    method for a dataset on this machine.

    MODULE:NAME is a dataset, its DataLoader, or a class or function that makes either, as in
    mypackage.data:train_set. Settings are tried in real loaders, each in a process of its own,
    until more workers bring nothing. With --step no more workers are recommended than keep up
    with training.

    Exit status: 0 with a recommendation, 3 if no batch could be loaded, 2 for wrong usage, 130
    if interrupted.
    """
    if sys.platform != "linux":
        raise click.UsageError("holdfast tune needs Linux, whose kernel counts what is measured")
    room = _bytes(memory)
    progress = terminal.ProgressLine(quiet=as_json or not sys.stderr.isatty())
    progress(f"making {target}")
    try:
        found = dataset_source.any_dataset(target, dataset_source.arguments(args))
        function = None if collate is None else dataset_source.named(collate)
        if function is not None and not callable(function):
            raise dataset_source.SourceError(
                f"--collate {collate} is of type {type(function).__name__}: expected a function"
            )
    except dataset_source.SourceError as error:
        progress("")
        raise click.UsageError(str(error)) from None
    except KeyboardInterrupt:
        progress("")
        sys.exit(INTERRUPTED)
    except (Exception, SystemExit):  # raised by the user's own code
        progress("")
        click.echo(f"{target} could not be made:\n{traceback.format_exc()}", err=True)
        sys.exit(NOTHING_FOUND)
    log = None
    if logbook is not None:
        try:
            log = Logbook(logbook, rank=0, loader=target)
        except OSError as error:
            progress("")
            raise click.UsageError(f"--logbook {logbook}: {error.strerror}") from None
    plan = _plan(found, function, collate, batch_size, step, seconds, max_workers, room, ranks)
    sys.exit(_Session(target, plan, progress, log, as_json).run())


def _bytes(given: str | None) -> int | None:
    if given is None:
        return None
    try:
        count = options.budget_in_bytes(int(given) if given.isdigit() else given)
    except ValueError as error:
        raise click.UsageError(f"--memory: {str(error).replace('memory_budget=', '')}") from None
    return count if isinstance(count, int) else None


@dataclass(frozen=True)
class _Plan:
    job: Job
    conditions: Conditions
    request: Request
    limit: int | None  # bytes that a trial must not exceed


def _plan(
    found: dataset_source.FoundDataset,
    collate: Any,
    collate_name: str | None,
    batch_size: int | None,
    step: float | None,
    seconds: float,
    max_workers: int | None,
    memory: int | None,
    ranks: int | None,
) -> _Plan:
    loader = found.loader
    known_ranks = gauge.ranks()
    many = ranks or known_ranks
    cores = float(kernel.cores())
    quota = cgroup.confinement("self").cpus
    cores = min(cores, quota or cores) / many
    free = gauge.read().free if memory is None else memory
    room = None if free is None else free // many
    unpicklable = find_unpicklable(found.dataset, "dataset") or ""
    if collate is not None and not unpicklable:
        unpicklable = find_unpicklable(collate, "collate_fn") or ""
    methods = multiprocessing.get_all_start_methods()
    ways = [one for one in ("fork", "forkserver", "spawn") if one in methods]
    starts = tuple(ways[:1] if unpicklable else ways)
    own: dict[str, Any] = {}
    batch_sampler = None
    if loader is not None:
        own = {name: getattr(loader, name) for name in KEPT if getattr(loader, name, None)}
        if getattr(loader, "in_order", True) is False:
            own["in_order"] = False
        if batch_size is None and loader.batch_size is None:
            batch_sampler = loader.batch_sampler
    size = batch_size or (loader.batch_size if loader is not None else 32)
    given = {}
    if batch_sampler is not None:
        given["batch_sampler"] = "batch_sampler"
    elif size is None:
        given["batch_size"] = "None"
    if collate_name is not None:
        given["collate_fn"] = collate_name.rpartition(":")[2]
    return _Plan(
        job=Job(
            dataset=found.dataset,
            batch_size=size,
            collate=collate or found.settings.get("collate_fn"),
            options=own,
            batch_sampler=batch_sampler,
            window=min(3.0, max(0.3, seconds / TRIALS)),
            stall_timeout=min(STALL_TIMEOUT, seconds / 3),
            memory=None if memory is None else shares(memory // many, 1).in_flight,
            on_bad_sample=getattr(loader, "on_bad_sample", "raise"),
            ranks=many,
        ),
        conditions=Conditions(
            cores=cores,
            room=room,
            most=max_workers or min(max(16, 4 * math.ceil(cores)), max(64, 2 * math.ceil(cores))),
            step=(step or 0.0) / 1000,
            seconds=seconds,
            starts=starts,
            now=_now(loader, starts),
        ),
        request=Request(
            batch_size=size,
            ranks=many,
            default_start=multiprocessing.get_start_method(allow_none=True) or methods[0],
            unpicklable=unpicklable,
            budget_is_ours=memory is not None or many != known_ranks,
            is_loader=loader is not None,
            untried=_untried(loader),
            given=given,
        ),
        limit=None if memory is None else room,
    )


def _now(loader: Any, starts: tuple[str, ...]) -> Setting | None:
    """What a loader has, if that can be tried."""
    if loader is None:
        return None
    if not loader.num_workers:
        return Setting.main()
    prefetch = loader.prefetch_factor or 2
    method = getattr(loader, "worker_method", "multiprocessing")
    if method == "thread":
        return Setting(loader.num_workers, "thread", "", prefetch)
    if method != "multiprocessing":
        return None
    context = loader.multiprocessing_context
    start = starts[0] if context is None else context.get_start_method()
    return Setting(loader.num_workers, start=start, prefetch=prefetch)


def _untried(loader: Any) -> str:
    method = getattr(loader, "worker_method", "multiprocessing")
    return "" if method in ("multiprocessing", "thread") else str(method)


class _Session:
    """One run of the command."""

    def __init__(
        self,
        target: str,
        plan: _Plan,
        progress: Callable[[str], None],
        log: Logbook | None,
        as_json: bool,
    ) -> None:
        self._target = target
        self._job = plan.job
        self._limit = plan.limit
        self._request = plan.request
        self._search = Search(plan.conditions)
        self._progress = progress
        self._log = log
        self._as_json = as_json
        self._began = time.monotonic()
        self._runs = 0

    def run(self) -> int:
        """Try, and show the result; returns the exit status."""
        try:
            self._try_all()
            status = FOUND
        except KeyboardInterrupt:
            status = INTERRUPTED
        self._progress("")
        found = advise(self._search, self._request)
        seconds = time.monotonic() - self._began
        record = {
            "target": self._target,
            "seconds": round(seconds, 1),
            "interrupted": status == INTERRUPTED,
            **advice.plain(self._search, found, self._request),
        }
        if self._log is not None and self._search.trials:
            self._log.tuning(record)
        if self._as_json:
            click.echo(json.dumps(record, indent=2))
            return status if found is not None or status else NOTHING_FOUND
        out = terminal.console()
        if status == INTERRUPTED:
            click.echo(f"Interrupted after {seconds:.0f} s.", err=True)
        if found is None:
            self._show_trouble()
            return status or NOTHING_FOUND
        tried = len(self._search.trials)
        about = tuning_view.conditions_in_words(self._search, self._request)
        click.echo(f"{self._target}: {about}; {tried} trials in {seconds:.0f} s\n")
        tuning_view.show(out, self._search, found, self._request)
        if self._log is not None:
            click.echo(f"\nholdfast report {self._log.given}   # shows the curve")
        return status

    def _try_all(self) -> None:
        search, total = self._search, self._search.conditions.seconds
        while True:
            left = self._began + total - time.monotonic()
            setting = search.next(left) if left > 0 else None
            if setting is None:
                return
            self._progress(
                f"[{total - left:.0f} of {total:.0f} s]{self._best()} trying {setting.words}"
            )
            trial = self._try(setting)
            if trial is None:
                return
            search.add(trial)

    def _try(self, setting: Setting) -> Trial | None:
        """Try it; with bad samples left out, once there was one."""
        trial = self._run(setting)
        if trial is None or trial.trouble is None or trial.trouble.kind != "raised":
            return trial
        if self._job.on_bad_sample != "raise":
            return trial
        strict, self._job = self._job, replace(self._job, on_bad_sample="skip")
        again = self._run(setting)
        if again is None or again.trouble is not None:
            self._job = strict
            return trial  # with the error itself
        return again

    def _run(self, setting: Setting) -> Trial | None:
        now, end = time.monotonic(), self._began + self._search.conditions.seconds
        base = self._search.base
        if base is not None:  # it takes as long as one process did, or it hangs
            usual = base.first_batch + 4 * self._job.window + 5
            end = min(end, now + 3 * usual + self._job.stall_timeout)
        self._runs += 1
        trial = trial_runner.run(self._job, setting, self._runs, end, self._limit)
        if trial is None and time.monotonic() < self._began + self._search.conditions.seconds:
            words = f"gave no result within {end - now:.0f} s"
            return trial_runner.hung(setting, words)
        return trial

    def _best(self) -> str:
        best = self._search.best()
        if best is None:
            return ""
        rate = tuning_view.rate_in_words(best, self._request)
        return f" {rate} a second with {best.setting.words};"

    def _show_trouble(self) -> None:
        """Why there is no recommendation."""
        trials = self._search.trials
        if not trials:
            seconds = self._search.conditions.seconds
            click.echo(
                f"No batch of {self._target} was loaded within {seconds:.0f} s. Smaller batches "
                f"(--batch-size) or more time (--seconds) may help; "
                f"holdfast doctor {self._target} loads single samples.",
                err=True,
            )
            return
        click.echo(f"No batch of {self._target} could be loaded.", err=True)
        told = set()
        for one in trials:
            trouble = one.trouble
            if trouble is None or trouble.words in told:
                continue
            told.add(trouble.words)
            click.echo(f"\n{one.setting.words}: {trouble.words}", err=True)
            if len(told) == 1 and trouble.details:
                click.echo(textwrap.indent(trouble.details, "  "), err=True)
        if any(one.trouble and "while collating" in one.trouble.details for one in trials):
            click.echo(
                "\nSamples cannot be put together: name the function that does it with --collate "
                "mypackage.data:pad, or tune the loader instead of its dataset.",
                err=True,
            )
        elif any(one.trouble and one.trouble.kind == "raised" for one in trials):
            click.echo(f"\nholdfast scan {self._target}   # lists all bad samples", err=True)
