"""``holdfast scan``: load every sample of a dataset and report the bad ones."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

import click

from holdfast import kernel
from holdfast.errors import BadSampleWarning, HoldfastError
from holdfast.samples.bad_sample import BadSample, name_of
from holdfast.samples.quarantine import Quarantine, label
from holdfast.samples.sample_keys import Key, key_of
from holdfast.scan import dataset_source, file_datasets
from holdfast.scan.dataset_source import SourceError
from holdfast.scan.scan_progress import ProgressError, ScanProgress
from holdfast.scan.scanner import ScanSettings
from holdfast.scan.scanner import scan as scan_samples
from holdfast.scan.selection import Listed, part
from holdfast.views.scan_report import Bar, Report, console, show

ALL_GOOD, SOME_BAD, NOT_FINISHED = 0, 1, 3
SAVE_EVERY: Final = 1.0  # seconds


@click.command()
@click.argument("spec", required=False, metavar="[MODULE:NAME | FILE.py:NAME]")
@click.option("--arg", "args", multiple=True, metavar="KEY=VALUE", help="For a class or function.")
@click.option("--images", type=click.Path(path_type=Path), help="Scan the images in this folder.")
@click.option("--files", "folder", type=click.Path(path_type=Path), help="Scan all files in it.")
@click.option("--loader", metavar="MODULE:FUNCTION", help="With --files: called with each path.")
@click.option("--out", type=click.Path(path_type=Path), help="List bad samples here (JSON lines).")
@click.option("--sample", type=click.IntRange(min=1), help="Only this many, chosen at random.")
@click.option("--resume", is_flag=True, help="Continue the scan with this --out that was ended.")
@click.option("--retry", type=click.Path(path_type=Path), help="Only the samples listed here.")
@click.option("--twice", is_flag=True, help="Load each twice from one random state and compare.")
@click.option(
    "--num-workers",
    "--workers",
    type=click.IntRange(min=1),
    help="Processes; by default, one per core.",
)
@click.option(
    "--stall-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds after which a sample counts as hanging.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of --sample and the workers.")
@click.option(
    "--start-method",
    type=click.Choice(["fork", "spawn", "forkserver"]),
    default="fork",
    show_default=True,
    help="How workers are started.",
)
@click.option("--show-output", is_flag=True, help="Let samples print.")
@click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")
def scan(
    spec: str | None,
    args: tuple[str, ...],
    images: Path | None,
    folder: Path | None,
    loader: str | None,
    out: Path | None,
    sample: int | None,
    resume: bool,
    retry: Path | None,
    twice: bool,
    num_workers: int | None,
    stall_timeout: float,
    seed: int,
    start_method: str,
    show_output: bool,
    as_json: bool,
) -> None:
    """Load every sample of a dataset and report the bad ones.

    MODULE:NAME is a dataset, or a class or function that makes one, as in
    mypackage.data:train_set or path/to/data.py:Photos --arg root=/data. Samples that
    raise, are None, crash or hang are listed, and the scan goes on; other tables show
    samples that are slow, large or of another shape than the rest.

    Exit status: 0 if all are good, 1 if any is bad, 2 for wrong usage, 3 if the scan could
    not be finished, 130 or 143 if interrupted by SIGINT or SIGTERM.
    """
    _check_usage(out, sample, resume, retry)
    dataset, title = _dataset(spec, args, images, folder, loader)
    settings = ScanSettings(
        num_workers or kernel.cores(),
        stall_timeout,
        twice,
        seed,
        start_method,
        show_output,
    )
    try:
        listed = None if retry is None else Listed.read(retry, dataset)
    except SourceError as error:
        raise click.UsageError(f"--retry {error}") from None
    for damage in () if listed is None else listed.damaged:
        click.echo(f"{damage}; skipped", err=True)
    indices = listed.indices if listed is not None else part(len(dataset), sample, seed)
    job = _Job(title, dataset, indices, settings, out, listed)
    job.begin(
        resume,
        {
            "dataset": label(dataset),
            "size": len(dataset),
            "sample": sample,
            **({"seed": seed} if sample is not None else {}),
            "twice": twice,
        },
    )
    sys.exit(job.run(as_json))


# -- what to scan --------------------------------------------------------------------------


def _check_usage(out: Path | None, sample: int | None, resume: bool, retry: Path | None) -> None:
    if resume and out is None:
        raise click.UsageError(
            "--resume needs --out: the progress of a scan is kept beside its list of bad samples"
        )
    if retry is not None and (resume or sample is not None):
        other = "--resume" if resume else "--sample"
        raise click.UsageError(
            f"--retry tries all listed samples; it cannot be combined with {other}"
        )
    if out is not None and not out.absolute().parent.is_dir():
        raise click.UsageError(f"--out {out}: there is no folder {out.absolute().parent}")
    if out is not None and not resume and out.exists() and (out.is_dir() or out.stat().st_size):
        raise click.UsageError(
            f"--out {out} exists already: --resume continues the scan that wrote it, --retry "
            f"{out} tries its samples again; otherwise give another name"
        )


def _dataset(
    spec: str | None,
    args: Sequence[str],
    images: Path | None,
    folder: Path | None,
    loader: str | None,
) -> tuple[Any, str]:
    if sum(one is not None for one in (spec, images, folder)) != 1:
        raise click.UsageError(
            "name one thing to scan: a dataset (mypackage.data:train_set), --images DIR, or "
            "--files DIR --loader module:function"
        )
    if (loader is None) != (folder is None):
        raise click.UsageError("--files DIR and --loader module:function need each other")
    if args and spec is None:
        raise click.UsageError("--arg is for the class or function that makes a dataset")
    try:
        given = dataset_source.arguments(args)
        if spec is not None:
            return dataset_source.dataset(spec, given), spec
        if images is not None:
            return _images(images), str(images)
        assert folder is not None
        assert loader is not None
        load = dataset_source.named(loader)
        if not callable(load):
            raise SourceError(f"--loader {loader} is a {type(load).__name__}, no function")
        return _files(folder, None, load), str(folder)
    except SourceError as error:
        raise click.UsageError(str(error)) from None
    except click.UsageError:
        raise
    except KeyboardInterrupt:
        sys.exit(130)  # not 1, which means that samples are bad
    except (Exception, SystemExit) as error:  # a script may exit when it is imported
        click.echo("".join(traceback.format_exception(error)), err=True)
        raise click.UsageError(
            f"{spec or loader} cannot be made: {type(error).__name__}: {error} (traceback above)"
        ) from None


def _images(folder: Path) -> file_datasets.Files:
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise click.UsageError("--images needs Pillow: pip install pillow") from None
    return _files(folder, file_datasets.IMAGES, file_datasets.load_image)


def _files(folder: Path, endings: frozenset[str] | None, load: Any) -> file_datasets.Files:
    if not folder.is_dir():
        raise click.UsageError(f"there is no folder {folder}")
    found = file_datasets.Files(file_datasets.find(folder, endings), load)
    if not len(found):
        kind = "files" if endings is None else f"images ({' '.join(sorted(endings))})"
        raise click.UsageError(f"there are no {kind} in {folder}")
    return found


# -- the scan ------------------------------------------------------------------------------


class _Terminated(BaseException):
    """SIGTERM: handled like Ctrl-C, but with another exit status."""


class _Job:
    """A scan with its files."""

    def __init__(
        self,
        title: str,
        dataset: Any,
        indices: Sequence[int],
        settings: ScanSettings,
        out: Path | None,
        listed: Listed | None,
    ) -> None:
        self.title = title
        self.dataset = dataset
        self.indices = indices
        self.settings = settings
        self.listed = listed
        self.out = None if out is None else str(out)
        self.quarantine = None if out is None else Quarantine.of(str(out), dataset)
        self.written: set[Key] = set()
        self.progress = ScanProgress({})
        self.still_bad: set[int] = set()  # of those listed
        self._saved = 0.0

    def begin(self, resume: bool, about: dict[str, Any]) -> None:
        """Load what an earlier scan has done, if this one resumes it."""
        self.progress = ScanProgress(about)
        if self.out is None or self.quarantine is None or self.listed is not None:
            return
        if resume:
            try:
                saved = ScanProgress.load(self._path(), about)
            except ProgressError as error:
                raise click.UsageError(f"--resume: {error}") from None
            if saved is not None:
                self.progress = saved
            elif Path(self.out).exists():
                raise click.UsageError(
                    f"--resume: {self.out} exists, but not {self._path()}, which says how far "
                    "its scan had come"
                )
            self.written = {key_of(bad.index) for bad in self.quarantine.read().records}
        self._save()

    def run(self, as_json: bool) -> int:
        """Scan to the end, or until interrupted; returns the exit status."""
        progress, total = self.progress, len(self.indices)
        bar = Bar(console(stderr=True), total, len(progress.done), progress.tally.bad)
        try:
            with _undisturbed(), bar:
                self._work(bar)
        except (KeyboardInterrupt, _Terminated) as stop:
            self._interrupted()
            return 130 if isinstance(stop, KeyboardInterrupt) else 143
        except (HoldfastError, OSError) as error:  # OSError: --out cannot be written
            click.echo(f"The scan could not be finished: {error}", err=True)
            return NOT_FINISHED
        self._show_report(as_json)
        return SOME_BAD if progress.tally.bad else ALL_GOOD

    def _work(self, bar: Bar) -> None:
        progress = self.progress
        earlier, began = progress.seconds, time.monotonic()
        try:
            for harvest in scan_samples(self.dataset, self.indices, progress.done, self.settings):
                self._write(harvest.bad)
                progress.tally.add(harvest.tally, harvest.bad)
                progress.done.add(harvest.start, harvest.stop)
                progress.seconds = earlier + time.monotonic() - began
                if time.monotonic() - self._saved >= SAVE_EVERY:
                    self._save()
                bar.update(len(progress.done), progress.tally.bad)
        finally:
            self._save()

    def _write(self, bad: list[BadSample]) -> None:
        if self.listed is not None:
            self.still_bad.update(one.index for one in bad)
        new = [one for one in bad if key_of(one.index) not in self.written]
        if new and self.quarantine is not None:
            self.quarantine.append(*new)

    def _path(self) -> str:
        return f"{self.out}.progress"

    def _save(self) -> None:
        if self.out is not None and self.listed is None:
            self.progress.save(self._path())
            self._saved = time.monotonic()

    # -- the end ---------------------------------------------------------------------------

    def _interrupted(self) -> None:
        tally, done = self.progress.tally, len(self.progress.done)
        go_on = (
            "the same command with --resume continues from here"
            if self.out
            else "with --out it could be resumed"
        )
        console(stderr=True).print(
            f"Interrupted: {done} of {len(self.indices)} samples scanned, {tally.bad} bad; {go_on}."
        )

    def _show_report(self, as_json: bool) -> None:
        listed, progress = self.listed, self.progress
        good_now: tuple[int, ...] = ()
        if listed is not None:
            good_now = tuple(one for one in listed.indices if one not in self.still_bad)
        report = Report(
            title=self.title,
            total=len(self.indices),
            tally=progress.tally,
            seconds=progress.seconds,
            out=self.out,
            of_files=isinstance(self.dataset, file_datasets.Files),
            retried=None if listed is None else len(listed.indices) + len(listed.gone),
            good_now=good_now,
            gone=() if listed is None else listed.gone,
        )
        if as_json:
            click.echo(json.dumps(_as_json(report), indent=2))
        else:
            show(console(), report, lambda index: name_of(self.dataset, index))


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Log no deaths and bad samples, which are in the report; handle SIGTERM like Ctrl-C."""
    logger = logging.getLogger("holdfast")
    disabled, logger.disabled = logger.disabled, True
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BadSampleWarning)
            yield
    finally:
        signal.signal(signal.SIGTERM, before)
        logger.disabled = disabled


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _Terminated


def _as_json(report: Report) -> dict[str, Any]:
    tally = report.tally
    spreads = {
        name: {
            "p50": spread.quantile(0.5),
            "p95": spread.quantile(0.95),
            "max": spread.most,
            "top": [{"index": index, "value": value} for value, index in spread.top],
        }
        for name, spread in (("seconds", tally.seconds), ("bytes", tally.nbytes))
    }
    return {
        "scanned": tally.seen,
        "of": report.total,
        "took": report.seconds,
        "good": tally.good,
        "bad": tally.bad,
        "causes": tally.causes.to_json(),
        **spreads,
        "odd": [{"how": how, "count": one.count, "first": one.first} for how, one in tally.odd()],
        "draw_nothing": {"count": tally.still.count, "first": tally.still.first},
        "differ": {"count": tally.restless.count, "first": tally.restless.first},
        "cannot_compare": {"count": tally.opaque.count, "first": tally.opaque.first},
        "good_now": list(report.good_now),
        "gone": [bad.to_json() for bad in report.gone],
    }
