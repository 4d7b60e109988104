"""``holdfast doctor``: check this machine, and a dataset, before the run."""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any, Literal

import click

from holdfast import options
from holdfast.doctor import dataset_checks, findings, machine_checks
from holdfast.doctor.findings import EXIT, Check, worst
from holdfast.doctor.surroundings import Surroundings
from holdfast.limits import gauge
from holdfast.scan import dataset_source
from holdfast.verbs import terminal


@click.command()
@click.argument("target", required=False, metavar="[MODULE:NAME | FILE.py:NAME]")
@click.option("--arg", "args", multiple=True, metavar="KEY=VALUE", help="For a class or function.")
@click.option("--batch-size", type=click.IntRange(1), help="[default: the loader's, or 32]")
@click.option(
    "--num-workers", "--workers", type=click.IntRange(1), help="[default: the loader's, or 4]"
)
@click.option("--prefetch-factor", type=click.IntRange(1), help="[default: the loader's, or 2]")
@click.option("--memory-budget", metavar="BYTES", help="As for DataLoader: auto, 2GiB, none.")
@click.option(
    "--samples", default=32, show_default=True, type=click.IntRange(2), help="How many to load."
)
@click.option(
    "--seconds",
    default=2.0,
    show_default=True,
    type=click.FloatRange(0.1),
    help="How long to measure each number of workers.",
)
@click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")
def doctor(
    target: str | None,
    args: tuple[str, ...],
    batch_size: int | None,
    num_workers: int | None,
    prefetch_factor: int | None,
    memory_budget: str | None,
    samples: int,
    seconds: float,
    as_json: bool,
) -> None:
    """Find out what will go wrong with data loading on this machine, before it does.

    With a dataset, its loader or a function that makes one, named as in
    mypackage.data:train_set, check that as well, for the given settings: samples are loaded
    in real workers.

    Exit status: 0 if all is good, 1 with warnings, 3 if something is bad, 2 for wrong usage.
    """
    out = terminal.console()
    parts: dict[str, list[Check]] = {}
    found = None
    if target is not None:
        budget = _budget(memory_budget)  # before the dataset is made, which may take long
        try:
            found = dataset_source.any_dataset(target, dataset_source.arguments(args))
        except dataset_source.SourceError as error:
            raise click.UsageError(str(error)) from None
        except (Exception, SystemExit) as error:  # raised by the user's own code
            click.echo(traceback.format_exc(), err=True)
            parts[target] = [dataset_checks.cannot_be_made(error)]
    here = Surroundings.read()
    parts = {"machine": machine_checks.examine(here), **parts}
    if target is not None and found is not None:
        plan = dataset_checks.LoadingPlan(
            batch_size or found.settings.get("batch_size", 32),
            num_workers or found.settings.get("num_workers", 4),
            prefetch_factor or found.settings.get("prefetch_factor", 2),
            found.settings.get("memory_budget", "auto") if memory_budget is None else budget,
            samples,
            seconds,
            found.settings.get("collate_fn"),
        )
        progress = terminal.ProgressLine(quiet=as_json or not sys.stderr.isatty())
        parts[target] = dataset_checks.examine(
            found.dataset, plan, here.machine, gauge.read(), progress
        )
        progress("")
    if as_json:
        click.echo(json.dumps(findings.as_json(parts), indent=2))
    else:
        findings.show(out, parts)
    sys.exit(EXIT[worst(check for part in parts.values() for check in part)])


def _budget(given: str | None) -> int | Literal["auto"] | None:
    """The given budget, checked as the loader checks it."""
    value: Any = "auto" if given is None else given
    if given is not None and given.lower() == "none":
        value = None
    elif given is not None and given.isdigit():
        value = int(given)
    try:
        return options.budget_in_bytes(value)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
