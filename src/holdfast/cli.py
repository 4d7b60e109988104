"""The ``holdfast`` command. Each subcommand (verb) is imported only when it is used.

So ``holdfast explain`` starts in a fraction of a second, also where torch is not installed.
"""

from __future__ import annotations

import importlib

import click

from holdfast import __version__

VERBS = {
    "doctor": (
        "holdfast.verbs.doctor:doctor",
        "Check this machine, and a dataset, before the run.",
    ),
    "explain": (
        "holdfast.verbs.explain:explain",
        "Say what a log, a traceback or a dmesg excerpt means and what to do.",
    ),
    "incidents": (
        "holdfast.verbs.incidents:incidents",
        "Show what went wrong in a run, from its logbook.",
    ),
    "leaks": (
        "holdfast.verbs.leaks:leaks",
        "Say which lines of a dataset hold ever more memory.",
    ),
    "report": (
        "holdfast.verbs.report:report",
        "Make a page about a run, from its logbook.",
    ),
    "run": (
        "holdfast.verbs.run:run",
        "Run a program with holdfast in all its loaders, without changing it.",
    ),
    "scan": (
        "holdfast.verbs.scan:scan",
        "Load every sample of a dataset and report the bad ones.",
    ),
    "top": (
        "holdfast.verbs.top:top",
        "Watch the loader workers of running programs, torch's or holdfast's.",
    ),
    "tune": (
        "holdfast.verbs.tune:tune",
        "Find the best num_workers and other settings for a dataset, by trying them.",
    ),
}
"""Verb -> where it is, and what it does in one line."""


class _Verbs(click.Group):
    def list_commands(self, context: click.Context) -> list[str]:
        return sorted(VERBS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        module, _, attribute = VERBS[name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, VERBS[name][1]) for name in sorted(VERBS)])


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="holdfast")
@click.option("--local_rank", "--local-rank", hidden=True)
@click.pass_context
def main(context: click.Context, local_rank: str | None) -> None:
    """Find out why data loading failed, and what to do now."""
    context.obj = local_rank  # DeepSpeed's launcher puts it before our verb: `run` passes it on


if __name__ == "__main__":
    main()
