"""``holdfast run``: a program as it is, with holdfast's engine in all its loaders.

It prepares the environment and becomes the program (``exec``): from then on there is only Python
with the script, so exit status, signals, standard input, ``sys.argv`` and ``__main__`` are as
without us. The processes that the program starts inherit the environment, and with it the engine.
See `holdfast.takeover.bootstrap`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

import holdfast

STARTUP = Path(holdfast.__file__).parent / "takeover" / "startup"

OPTIONS = {
    "max-restarts": (
        "N | N,SECONDS | auto | none",
        "Workers that may be replaced, and in what time.",
    ),
    "stall-timeout": (
        "SECONDS | none",
        "Replace a worker without progress on a sample for so long.",
    ),
    "on-bad-sample": ("raise | skip | replace", "What to do with a bad sample."),
    "max-bad-samples": ("N | FRACTION | none", "Stop if more samples are bad."),
    "quarantine": ("FILE", "List bad samples here; those listed are not tried again."),
    "logbook": ("FOLDER", "Where to write what went wrong (default: below holdfast-runs)."),
    "memory-budget": ("BYTES | 2GiB | auto | none", "Bytes of batches that may be in flight."),
    "worker-memory-limit": ("BYTES | 1GiB | auto | none", "Replace a worker that is larger."),
    "name": ("NAME", "What messages call every loader."),
    "iterable-recovery": ("auto | state | replay | raise", "How a stream goes on after a death."),
    "worker-method": ("multiprocessing | thread | ray", "What workers are."),
    "ray-options": ("JSON", "What actors of a Ray cluster are started with."),
    "seeding": ("worker | sample | sample,1234", "Seed generators for each worker or sample."),
    "pin-in-place": ("BYTES | 8GiB | auto", "Pin batches where they are (experimental)."),
}
"""Those of `holdfast.DataLoader`, as texts."""


def _options(function: Callable[..., Any]) -> Callable[..., Any]:
    for name, (metavar, text) in reversed(OPTIONS.items()):
        variable = f"HOLDFAST_{name.replace('-', '_').upper()}"
        function = click.option(f"--{name}", metavar=metavar, help=f"{text}  [env: {variable}]")(
            function
        )
    return function


@click.command(
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
)
@_options
@click.option("--no-logbook", is_flag=True, help="Write no logbook.")
@click.option("-m", "is_module", is_flag=True, help="TARGET is a module, as in python -m.")
@click.argument("target", metavar="SCRIPT.py | COMMAND | -m MODULE")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
@click.pass_obj
def run(
    local_rank: str | None,
    /,
    is_module: bool,
    no_logbook: bool,
    target: str,
    arguments: tuple[str, ...],
    **given: str | None,
) -> None:
    """Run a program with holdfast in all its loaders, without changing it.

    \b
    holdfast run train.py --epochs 3
    holdfast run --on-bad-sample=skip -m mypackage.train
    holdfast run torchrun --nproc-per-node 2 train.py
    accelerate launch -m holdfast run train.py

    Every torch DataLoader of the program and of the Python processes it starts gets holdfast's
    engine. Everything else is as with python. What went wrong is in the logbook, and in a few lines
    at the end, if something did.

    An option can also be given in the environment: HOLDFAST_ON_BAD_SAMPLE=skip, and so on. Options
    that a program gives to a holdfast loader or to holdfast.install() come first.
    """
    chosen = {name.upper(): value for name, value in given.items() if value is not None}
    if no_logbook and "LOGBOOK" in chosen:
        raise click.UsageError("--logbook and --no-logbook contradict each other")
    if sys.flags.ignore_environment:
        raise click.UsageError(
            "python -E and python -I ignore the environment, which is how programs get holdfast; "
            "run it without"
        )
    found = environment(os.environ, chosen, keep_logbook=not no_logbook)
    ranked = () if local_rank is None else (f"--local_rank={local_rank}",)
    called = command(target, (*ranked, *arguments), is_module=is_module)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(called[0], called, found)


def command(target: str, arguments: tuple[str, ...], *, is_module: bool) -> list[str]:
    """What to become: Python with a script or module, or a command that starts Python."""
    python = [sys.executable, *_flags()]
    if is_module:
        return [*python, "-m", target, *arguments]
    if not os.path.exists(target) and os.sep not in target:
        # torchrun, accelerate … of the same Python first; then srun and the like
        paths = os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)
        found = shutil.which(target, path=os.pathsep.join(paths))
        if found is not None:
            return [found, *arguments]
    return [*python, target, *arguments]


def _flags() -> list[str]:
    """The flags that this interpreter was given, as `multiprocessing` passes them on."""
    return getattr(subprocess, "_args_from_interpreter_flags", list)()  # see private_names


def environment(
    before: Mapping[str, str], chosen: Mapping[str, str], *, keep_logbook: bool
) -> dict[str, str]:
    """The environment of the program."""
    found = {**before, **{f"HOLDFAST_{name}": value for name, value in chosen.items()}}
    for name in ("HOLDFAST_QUARANTINE", "HOLDFAST_LOGBOOK"):
        if found.get(name):  # a program may change its folder
            found[name] = os.path.abspath(found[name])
    if not keep_logbook:
        found.pop("HOLDFAST_LOGBOOK", None)
    elif not found.get("HOLDFAST_LOGBOOK"):
        found |= _new_logbook(found)
    if any(name.startswith("HOLDFAST_") for name in found.keys() - {"HOLDFAST_LOGBOOK"}):
        _check(found)
    paths = [one for one in before.get("PYTHONPATH", "").split(os.pathsep) if one]
    others = [one for one in paths if one != str(STARTUP)]
    return {**found, "PYTHONPATH": os.pathsep.join([str(STARTUP), *others])}


def _check(found: Mapping[str, str]) -> None:
    """Only if there is something to check: it takes as long as importing torch."""
    from holdfast import option_sources

    try:
        option_sources.from_environment(found)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _new_logbook(found: Mapping[str, str]) -> dict[str, str]:
    """Where the loaders of the program write, if they can."""
    folder = Path("holdfast-runs").absolute() / default_logbook(found)
    there = next(one for one in folder.parents if one.exists())
    if not os.access(there, os.W_OK | os.X_OK) or not there.is_dir():
        click.echo(
            f"holdfast: no logbook, because {there} cannot be written; --logbook FOLDER says where "
            "else",
            err=True,
        )
        return {}
    return {"HOLDFAST_LOGBOOK": str(folder)}


def default_logbook(found: Mapping[str, str], now: float | None = None) -> str:
    """The name of a run's folder. All ranks of a job that a launcher has started must come to the
    same one; otherwise a run is called after the time."""
    job, step = found.get("SLURM_JOB_ID"), found.get("SLURM_STEP_ID")
    if job:
        return f"slurm-{job}" + (f".{step}" if step else "")
    run_id = found.get("TORCHELASTIC_RUN_ID", "")
    if run_id and run_id != "none":
        return f"torchrun-{run_id.replace(os.sep, '-')}"
    if found.get("MASTER_PORT") and found.get("RANK"):
        return f"port-{found['MASTER_PORT']}"
    moment = time.localtime(time.time() if now is None else now)
    return f"{time.strftime('%Y-%m-%d-%H%M%S', moment)}-{os.getpid()}"
