"""What verbs have in common: reading a logbook, and how verdicts look on a terminal and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from holdfast.autopsy.catalogue import CATALOGUE, UNKNOWN
from holdfast.autopsy.cause import Cause, Remedy
from holdfast.autopsy.verdict import Verdict
from holdfast.run_report import logged_run
from holdfast.run_report.logged_run import LoggedRun

_COLOURS = {"high": "green", "medium": "yellow", "low": "red"}
_SURE = {"high": "sure", "medium": "likely", "low": "perhaps"}


def console() -> Console:
    return Console(highlight=False, soft_wrap=True)


class ProgressLine:
    """One line on standard error that says what is being done, and overwrites itself."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet

    def __call__(self, words: str) -> None:
        if not self.quiet:
            click.echo(f"\r\x1b[K{words}{' …' if words else ''}", nl=False, err=True)


def show_verdict(out: Console, verdict: Verdict, *, at_work: bool = True) -> None:
    """Cause, how certain and why, what it means, what to do. `at_work` is False if the text shows
    that the loader was not holdfast's."""
    head = Text(verdict.cause, style="bold")
    head.append(f"  ({_SURE[verdict.confidence]})", _COLOURS[verdict.confidence])
    head.append(f": a worker {verdict.title}", "")
    out.print(head)
    _heading(out, "Why we think so")
    for reason in verdict.because:
        _item(out, reason)
    if verdict.cause != UNKNOWN:
        cause = CATALOGUE[verdict.cause]
        _heading(out, "What it means")
        _item(out, cause.meaning)
        _heading(out, "What to do, cheapest first")
        show_remedies(out, verdict.remedies)
        about = "What holdfast does about it"
        _heading(out, about if at_work else f"{about}, if it is the loader")
        _item(out, cause.already)
    if verdict.perhaps:
        _heading(out, "It may also be")
        for slug in verdict.perhaps:
            _item(out, f"{slug}: {CATALOGUE[slug].title}")


def show_aside(out: Console, verdict: Verdict) -> None:
    """Another cause in the text, beside the likeliest."""
    sure = _SURE[verdict.confidence]
    out.print(Text(f"Also in this text: {verdict.cause} ({sure}): a worker {verdict.title}"))
    for reason in verdict.because:
        _item(out, reason)


def show_cause(out: Console, cause: Cause, remedies: Sequence[Remedy]) -> None:
    """An entry of the catalogue, as a manual page."""
    out.print(Text(cause.slug, style="bold").append(f": a worker {cause.title}", ""))
    for heading, words in (
        ("What it means", cause.meaning),
        ("How it is recognised", cause.evidence),
        ("What holdfast does about it", cause.already),
    ):
        _heading(out, heading)
        _item(out, words)
    _heading(out, "What to do, cheapest first")
    show_remedies(out, remedies)
    if cause.see:
        _heading(out, "Easily mistaken for")
        for slug in cause.see:
            _item(out, f"{slug}: {CATALOGUE[slug].title}")


def show_remedies(out: Console, remedies: Sequence[Remedy]) -> None:
    for number, remedy in enumerate(remedies, 1):
        _item(out, f"{number}. {remedy.where}{remedy.text}", hanging=3)
        for line in remedy.command.splitlines():
            out.print(Text(f"         {line}", style="cyan"))  # to be copied: never wrapped


def as_json(verdict: Verdict) -> dict[str, Any]:
    return {
        "cause": verdict.cause,
        "confidence": verdict.confidence,
        "title": verdict.title,
        "sample": verdict.sample,
        "because": list(verdict.because),
        "perhaps": list(verdict.perhaps),
        "remedies": remedies_as_json(verdict.remedies),
    }


def remedies_as_json(remedies: Sequence[Remedy]) -> list[dict[str, str]]:
    return [
        {"text": one.text, "command": one.command, "place": one.place, "given": one.given}
        for one in remedies
    ]


def _heading(out: Console, words: str) -> None:
    out.print(Text(f"  {words}", style="dim"))


def _item(out: Console, words: str, hanging: int = 0) -> None:
    """An indented paragraph, wrapped only on a terminal."""
    if out.is_terminal:
        indent = " " * 4
        words = textwrap.fill(
            words,
            max(40, out.width - 1),
            initial_indent=indent,
            subsequent_indent=indent + " " * hanging,
            break_long_words=False,
            break_on_hyphens=False,
        )
    else:
        words = f"    {words}"
    out.print(Text(words))


def read_logbook(folder: Path) -> LoggedRun:
    """What is in a logbook; a wrong usage if the folder has none."""
    try:
        run = logged_run.read(folder)
    except OSError as error:
        raise click.UsageError(str(error)) from None
    if run.empty:
        damaged = f" ({run.damaged} lines in it are not records)" if run.damaged else ""
        raise click.UsageError(
            f"{folder} contains no logbook{damaged}: expected run.json and *.jsonl, written by "
            f"DataLoader(..., logbook={str(folder)!r})"
        )
    return run
