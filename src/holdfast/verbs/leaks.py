"""``holdfast leaks``: which lines of a dataset hold ever more memory."""

from __future__ import annotations

import itertools
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from holdfast.autopsy.machine import in_words
from holdfast.memory import leaks as tracing
from holdfast.memory.leaks import Findings
from holdfast.samples import source
from holdfast.samples.source import SourceError
from holdfast.verbs import terminal

__all__ = ["leaks", "tell"]

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
@click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")
def leaks(spec: str, args: tuple[str, ...], samples: int, rounds: int, as_json: bool) -> None:
    """Say which lines of a dataset hold ever more memory.

    Samples are loaded in this process, one after the other, in rounds of equal length;
    what has grown in every round is listed: lines, types of objects, and memory that Python
    does not know of.

    Exit status: 0 if nothing grows, 1 if something does, 2 for wrong usage, 3 if a sample
    raised.
    """
    try:
        given = source.arguments(args)
        dataset = _dataset(spec, given)
    except SourceError as error:
        raise click.UsageError(str(error)) from None
    found = _look_for_leaks(dataset, samples, rounds)
    if isinstance(found, str):
        click.echo(found, err=True)
        sys.exit(NOT_FINISHED)
    if as_json:
        click.echo(json.dumps(asdict(found), indent=2))
    else:
        tell(terminal.console(), found, rounds)
    sys.exit(SOMETHING_GROWS if found.any else NOTHING_GROWS)


def _dataset(spec: str, given: dict[str, Any]) -> Any:
    found = source.named(spec)
    if isinstance(found, type) or not (hasattr(found, "__getitem__") or hasattr(found, "__iter__")):
        if not callable(found):
            raise SourceError(
                f"{spec} is of type {type(found).__name__}: no dataset, class or function"
            )
        found = found(**given)
    elif given:
        raise SourceError(f"{spec} is a dataset already, so --arg has nobody to go to")
    if not hasattr(found, "__iter__") and not hasattr(found, "__len__"):
        raise SourceError(
            f"{spec} gives a {type(found).__name__} without __len__: it is no dataset"
        )
    return found


def _loading(dataset: Any) -> Callable[[int], object]:
    """A function that loads the n-th sample, beginning again at the end."""
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        size = len(dataset)
        return lambda number: dataset[number % size]
    elements = itertools.chain.from_iterable(itertools.repeat(dataset))
    return lambda number: next(elements)


def _look_for_leaks(dataset: Any, samples: int, rounds: int) -> Findings | str:
    """What was found, or why not."""
    import torch  # here, because it takes its time and usage errors need not wait for it

    torch.set_num_threads(1)
    try:
        return tracing.trace(_loading(dataset), samples=samples, rounds=rounds, dataset=dataset)
    except Exception:
        return f"A sample raised, so nothing can be said:\n{traceback.format_exc()}"


def tell(out: Console, found: Findings, rounds: int) -> None:
    """The findings in words."""
    loaded = f"{rounds} rounds of {found.samples} samples"
    if not found.any:
        out.print(f"Nothing grows from round to round, over {loaded}.")
        return
    for one in found.lines:
        line = Text(f"{in_words(round(one.per_round / found.samples))} per sample  ", "bold")
        out.print(line.append(f"{one.name}", ""))
    for one in found.containers:
        gets = f"  {one.per_round / found.samples:.2f} more per sample  {one.name}"
        out.print(Text(gets.strip()))
    if found.types:
        out.print("More and more objects of these types:")
        for one in found.types:
            out.print(Text(f"  {one.per_round / found.samples:.2f} per sample  {one.name}"))
    if found.native:
        out.print(
            Text(
                f"{in_words(round(found.native))} per sample are not in Python's books: native "
                "memory. Tensors of torch are such memory, held by the objects above; else it is "
                f"native code. Loaded here: {', '.join(found.suspects) or 'none'}."
            )
        )
    out.print(
        f"That is what has grown in each of {loaded}. A cache that fills slowly looks the same: "
        "try --samples with a larger number. Until it is mended, worker_memory_limit bounds it."
    )
