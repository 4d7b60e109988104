"""``holdfast explain``: what a text means, or the catalogue as a manual."""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import click
from rich.text import Text

from holdfast.autopsy.catalogue import CATALOGUE, GROUPS, UnknownCause, lookup
from holdfast.autopsy.cause import Cause
from holdfast.autopsy.machine_facts import MachineFacts
from holdfast.autopsy.verdict import remedies_for
from holdfast.explain.clues import Clues
from holdfast.explain.explanation import COLLECT, Explanation, Scene, conclude
from holdfast.run_report import logged_run
from holdfast.verbs import terminal
from holdfast.verbs.incidents import print_run

KNOWN, NOT_KNOWN = 0, 1
_CHUNK = 1 << 16  # bytes read at once


@click.command()
@click.argument("sources", nargs=-1, metavar="[FILE|FOLDER|CAUSE|-]...")
@click.option("--list", "listing", is_flag=True, help="Show all causes.")
@click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")
@click.option("--elsewhere", is_flag=True, help="It happened on another machine: ignore this one.")
@click.option("--tee", is_flag=True, help="Copy standard input to standard output as it comes.")
def explain(
    sources: tuple[str, ...], listing: bool, as_json: bool, elsewhere: bool, tee: bool
) -> None:
    """Say what went wrong, how certain that is and why, and what to do now.

    Reads logs, tracebacks and dmesg excerpts from files or standard input
    (python train.py 2>&1 | holdfast explain --tee), or the folder of a logbook. With the
    name of a cause, shows its entry in the manual.

    Exit status: 0 if a cause was found, 1 if none was found, 2 for wrong usage.
    """
    if listing:
        _list(as_json)
        return
    named = [source for source in sources if _is_name(source)]
    if named:
        if len(named) != len(sources):
            raise click.UsageError("give either causes or files, not both")
        _manual([_lookup(name) for name in named], as_json, elsewhere)
        return
    folders = [source for source in sources if Path(source).is_dir()]
    if folders:
        _show_logbooks(folders)
    clues = Clues()
    for source in sources or ("-",):
        _read(clues, source, tee, source if len(sources) > 1 else "")
    found = conclude(clues, None if elsewhere else Scene.read())
    _answer(found, as_json)
    sys.exit(KNOWN if found.known else NOT_KNOWN)


def _show_logbooks(folders: list[str]) -> None:
    """Show the verdicts that logbooks contain."""
    known = NOT_KNOWN
    for folder in folders:
        run = logged_run.read(folder)
        if run.empty:
            raise click.UsageError(f"{folder} is a folder, but contains no logbook")
        print_run(terminal.console(), run)
        known = KNOWN if run.incidents or run.bad_samples else known
    sys.exit(known)


# -- reading -------------------------------------------------------------------------------


def _is_name(source: str) -> bool:
    """Whether it is a cause, or was meant as one: a bare word that is not a file."""
    if source == "-" or Path(source).exists():
        return False
    return source in CATALOGUE or not any(mark in source for mark in "./\\ ")


def _lookup(name: str) -> Cause:
    try:
        return lookup(name)
    except UnknownCause as error:
        raise click.UsageError(f"{error}. There is no file of that name either.") from None


def _read(clues: Clues, source: str, tee: bool, name: str) -> None:
    if source == "-":
        stream = sys.stdin.buffer
        if stream.isatty():
            raise click.UsageError(
                "nothing to explain: give a file, the name of a cause, or pipe a log in, as in "
                "python train.py 2>&1 | holdfast explain --tee"
            )
        clues.read(_decoded(stream, sys.stdout.buffer if tee else None), name)
        return
    try:
        with open(source, "rb") as file:
            clues.read(_decoded(file, None), name)
    except OSError as error:
        raise click.UsageError(f"cannot read {source}: {error.strerror}") from None


def _decoded(stream: Any, copy: IO[bytes] | None) -> Iterator[str]:
    """A stream's text as it comes, copied to `copy` before it is searched."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    while chunk := stream.read1(_CHUNK):
        if copy is not None:
            copy.write(chunk)
            copy.flush()
        yield decoder.decode(chunk)
    yield decoder.decode(b"", final=True)


# -- answering -----------------------------------------------------------------------------


def _answer(found: Explanation, as_json: bool) -> None:
    if as_json:
        answer: dict[str, Any] = {
            "known": found.known,
            "lines": found.lines,
            "messages": found.messages,
            "ending": found.ending,
            "rebuilt": found.rebuilt,
            "verdicts": [terminal.as_json(verdict) for verdict in found.verdicts],
        }
        if not found.verdicts:
            answer["collect"] = terminal.remedies_as_json(COLLECT)
        click.echo(json.dumps(answer, indent=2))
        return
    out = terminal.console()
    if not found.verdicts:
        lines = "this line" if found.lines == 1 else f"these {found.lines} lines"
        what = "an empty text" if found.blank else lines
        out.print(f"No known failure of data loading was found in {what}.")
        if found.ending:
            out.print("The last error in it is of another kind:")
            out.print(Text(f"    {found.ending}"))
        out.print(
            f"Looked for: {found.messages} messages of {len(CATALOGUE)} causes, of torch, Python, "
            "glibc, the kernel, CUDA, Docker, Kubernetes and Slurm (holdfast explain --list)."
        )
        out.print("If something did go wrong, this would help to find the cause:")
        terminal.show_remedies(out, COLLECT)
        return
    also = found.verdicts
    if found.ending:
        out.print("The last error in this text is not a known failure of data loading:")
        out.print(Text(f"    {found.ending}"))
    else:
        terminal.show_verdict(out, also[0], at_work=not found.rebuilt)
        also = also[1:]
    for verdict in also:
        out.print()
        terminal.show_aside(out, verdict)


def _manual(causes: list[Cause], as_json: bool, elsewhere: bool) -> None:
    machine = None if elsewhere else MachineFacts.read()
    if as_json:
        click.echo(json.dumps([_entry(cause, machine) for cause in causes], indent=2))
        return
    out = terminal.console()
    for cause in causes:
        terminal.show_cause(out, cause, remedies_for(cause.slug, machine))


def _list(as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps([_entry(cause, None) for cause in CATALOGUE.values()], indent=2))
        return
    width = max(map(len, CATALOGUE))
    for name, group in GROUPS.items():
        click.echo(f"{name}: a worker …")
        for cause in group:
            click.echo(f"  {cause.slug:{width}}  {cause.title}")


def _entry(cause: Cause, machine: MachineFacts | None) -> dict[str, Any]:
    return {
        "cause": cause.slug,
        "title": cause.title,
        "meaning": cause.meaning,
        "evidence": cause.evidence,
        "messages": [sign.pattern for sign in cause.signs],
        "remedies": terminal.remedies_as_json(remedies_for(cause.slug, machine)),
        "already": cause.already,
        "see": list(cause.see),
    }
