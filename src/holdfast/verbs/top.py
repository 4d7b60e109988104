"""``holdfast top``: what the loader workers of running programs are doing."""

from __future__ import annotations

import os
import sys

import click

from holdfast.verbs import terminal
from holdfast.views import worker_table as view


@click.command()
@click.argument("pid", required=False, type=click.IntRange(1))
@click.option(
    "--interval", default=1.0, show_default=True, type=click.FloatRange(0.1), help="Seconds."
)
@click.option("--once", is_flag=True, help="Print one table and exit.")
@click.option("--no-stacks", is_flag=True, help="Do not run py-spy on torch's workers.")
def top(pid: int | None, interval: float, once: bool, no_stacks: bool) -> None:
    """Watch loader workers, torch's or holdfast's, of all programs or of the one with PID.

    Shown for each: state, CPU, resident, private and shared memory, growth of private memory per
    minute, open files, threads, and what it is doing: for holdfast's workers batch, sample and
    step; for torch's the Python function (with py-spy) or the kernel function. Press q to quit.
    Needs no root.

    Exit status: 0, or 1 if there was no worker.
    """
    if pid is not None and not os.path.exists(f"/proc/{pid}"):
        raise click.UsageError(f"there is no process {pid}")
    out = terminal.console()
    sys.exit(0 if view.run(out, pid, interval, once, stacks=not no_stacks) else 1)
