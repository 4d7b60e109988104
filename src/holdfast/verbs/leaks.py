"""``holdfast leaks``: which lines of a dataset hold ever more memory."""

from __future__ import annotations

import json
import multiprocessing
import sys
import traceback
from dataclasses import asdict

import click
from rich.console import Console
from rich.text import Text

from holdfast.autopsy.machine_facts import in_words
from holdfast.doctor import tracing
from holdfast.doctor.probe import Troubled
from holdfast.scan import dataset_source
from holdfast.scan.dataset_source import SourceError
from holdfast.verbs import terminal
from holdfast.worker.leak_tracer import Findings

NOTHING_GROWS, SOMETHING_GROWS, NOT_FINISHED = 0, 1, 3


@click.command()
@click.argument("spec", metavar="MODULE:NAME | FILE.py:NAME")
@click.option("--arg", "args", multiple=True, metavar="KEY=VALUE", help="For a class or function.")
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    default=200,
    show_default=True,
    help="Samples in a round.",
)
@click.option("--rounds", type=click.IntRange(min=2), default=4, show_default=True)
@click.option(
    "--start-method",
    type=click.Choice(multiprocessing.get_all_start_methods()),
    help="Of the worker.  [default: Python's]",
)
@click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")
def leaks(
    spec: str,
    args: tuple[str, ...],
    samples: int,
    rounds: int,
    start_method: str | None,
    as_json: bool,
) -> None:
    """Say which lines of a dataset hold ever more memory.

    Samples are loaded in one worker, one after the other, in rounds of equal length. Whatever
    has grown in every round is listed: lines, types of objects, and memory that Python did
    not allocate.

    Exit status: 0 if nothing grows, 1 if something does, 2 for wrong usage, 3 if a sample
    raised or the worker died.
    """
    try:
        dataset = dataset_source.any_dataset(spec, dataset_source.arguments(args)).dataset
    except SourceError as error:
        raise click.UsageError(str(error)) from None
    except (Exception, SystemExit):  # raised by the user's own code
        click.echo(f"No result: the dataset could not be made\n{traceback.format_exc()}", err=True)
        sys.exit(NOT_FINISHED)
    progress = terminal.ProgressLine(quiet=as_json or not sys.stderr.isatty())
    try:
        found = tracing.trace(dataset, samples, rounds, start_method, progress)
    except Troubled as trouble:
        progress("")
        click.echo(f"No result: {trouble}\n{trouble.details}", err=True)
        sys.exit(NOT_FINISHED)
    progress("")
    if as_json:
        click.echo(json.dumps(asdict(found), indent=2))
    else:
        print_findings(terminal.console(), found, rounds)
    sys.exit(SOMETHING_GROWS if found.any else NOTHING_GROWS)


def print_findings(out: Console, found: Findings, rounds: int) -> None:
    """Print the findings."""
    loaded = f"{rounds} rounds of {found.samples} samples"
    if not found.any:
        out.print(f"Nothing grows from round to round, over {loaded}.")
        return
    for one in found.lines:
        line = Text(f"{in_words(round(one.per_round / found.samples))} per sample  ", "bold")
        out.print(line.append(f"{one.name}", ""))
    for one in found.containers:
        gets = f"{one.per_round / found.samples:.2f} more per sample  {one.name}"
        out.print(Text(gets))
    if found.types:
        out.print("More and more objects of these types:")
        for one in found.types:
            out.print(Text(f"  {one.per_round / found.samples:.2f} per sample  {one.name}"))
    if found.native:
        out.print(
            Text(
                f"{in_words(round(found.native))} per sample were not allocated by Python: native "
                "memory. It belongs to torch tensors, which the objects above hold, or to native "
                f"code. Native libraries loaded here: {', '.join(found.suspects) or 'none'}."
            )
        )
    out.print(
        f"All this has grown in each of {loaded}. A cache that fills slowly looks the same: try a "
        "larger --samples. Until the leak is fixed, worker_memory_limit bounds it."
    )
