"""``holdfast incidents``: what happened in a run, from its logbook."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from holdfast.autopsy.catalogue import CATALOGUE, title_of
from holdfast.autopsy.machine_facts import in_words
from holdfast.loader_identity import LoaderIdentity
from holdfast.run_report.logged_run import LoggedRun
from holdfast.verbs import terminal


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")
@click.option("--stacks", is_flag=True, help="Show the stacks that workers left.")
def incidents(folder: Path, as_json: bool, stacks: bool) -> None:
    """Show what went wrong in a run, in order, from the FOLDER given as logbook=.

    Exit status: 0 if nothing went wrong, 1 if something did, 2 if FOLDER is not a logbook.
    """
    run = terminal.read_logbook(folder)
    if as_json:
        click.echo(json.dumps(asdict(run), indent=2))
    else:
        print_run(terminal.console(), run, stacks)
    sys.exit(1 if run.incidents or run.bad_samples or run.leaks else 0)


def print_run(out: Console, run: LoggedRun, stacks: bool = False) -> None:
    """Print what happened, in order of time, and a summary."""
    events = [("run", {**one, "time": _first_loader(run, one)}) for one in run.runs]
    events += [("incident", one) for one in run.incidents]
    events += [("sample", one) for one in run.bad_samples]
    events += [("leak", one) for one in run.leaks]
    events += [("event", one) for one in _first(run.events)]
    several = len(run.runs) > 1
    for kind, record in sorted(events, key=lambda event: float(event[1].get("time") or 0)):
        loader = str(record.get("loader") or "")  # an older logbook has none
        prefix = LoaderIdentity(loader, record["rank"] if several else None).prefix
        if kind == "run":
            _began(out, record)
        elif kind == "incident":
            _incident(out, record, prefix, stacks)
        elif kind in ("leak", "event"):
            out.print(Text(f"{_when(record)}  {prefix}{record.get('text', 'a leak')}"))
        else:
            name = record.get("name") or record.get("index")
            words = [str(record.get(part)) for part in ("error", "message") if record.get(part)]
            why = ": ".join(words) or record.get("kind")
            done = f"; {record['action']}" if record.get("action") else ""
            out.print(Text(f"{_when(record)}  {prefix}bad sample {name}: {why}{done}"))
    _summary(out, run)


def _first_loader(run: LoggedRun, last: dict[str, Any]) -> float:
    """When the first loader of a run began; run.json is of the last that has."""
    process = [last.get(name) for name in ("rank", "host", "pid")]
    same = [one for one in run.loaders if [one.get(x) for x in ("rank", "host", "pid")] == process]
    return min(float(one.get("time") or 0) for one in [last, *same])


def _began(out: Console, run: dict[str, Any]) -> None:
    versions = run.get("versions", {})
    out.print(
        f"{_when(run)}  rank {run.get('rank', 0)} began on {run.get('host')}: "
        f"pid {run.get('pid')}, torch {versions.get('torch', '?')}, "
        f"Python {versions.get('python', '?')}"
    )


def _incident(out: Console, record: dict[str, Any], prefix: str, stacks: bool) -> None:
    out.print(Text(f"{_when(record)}  {prefix}{record.get('text', record.get('cause'))}"))
    for reason in record.get("because", ()):
        out.print(Text(f"{'':21}{reason}", style="dim"))
    if stacks and record.get("stack"):
        for line in str(record["stack"]).splitlines():
            out.print(Text(f"{'':21}| {line}"))


def _summary(out: Console, run: LoggedRun) -> None:
    if run.memory:
        trainer = max((one.get("trainer_bytes") or 0 for one in run.memory), default=0)
        workers = max((sum((one.get("workers") or {}).values()) for one in run.memory), default=0)
        all_workers = (
            f"all workers of a loader {in_words(workers)} (shared memory is counted for each)"
            if workers
            else "its workers were not running yet when memory was measured"
        )
        out.print(f"Most memory seen: trainer {in_words(trainer)}, {all_workers}.")
    if run.damaged:
        what = "line was" if run.damaged == 1 else "lines were"
        out.print(
            f"{run.damaged} damaged {what} left out: incomplete, because the writer was killed, "
            "or not a record of a logbook."
        )
    _happened(out, run.events)
    if not (run.incidents or run.bad_samples or run.leaks):
        whole = "No worker was lost." if run.events else "Nothing went wrong."
        out.print("The other lines say that nothing went wrong." if run.damaged else whole)
        return
    causes = Counter(str(one.get("cause")) for one in run.incidents)
    leak = ", a leak" if run.leaks else ""
    deaths, bad = len(run.incidents), len(run.bad_samples)
    out.print(f"{_count(deaths, 'incident')}, {_count(bad, 'bad sample')}{leak}.")
    inexact = sum(one.get("exact") is False for one in run.incidents)
    if inexact:
        out.print(
            f"After {inexact} of them a stream did not continue exactly, or not at all: samples "
            "may be missing or come twice (holdfast explain stream-not-repeatable)."
        )
    for cause, count in causes.most_common():
        out.print(f"  {count} × {cause}: a worker {title_of(cause)}")
        if cause in CATALOGUE:
            last = [one for one in run.incidents if one.get("cause") == cause][-1]
            for remedy in list(last.get("remedies") or ())[:2]:
                command = f": {remedy['command']}" if remedy.get("command") else ""
                out.print(Text(f"      {remedy.get('text')}{command}"))
            out.print(Text(f"      more: holdfast explain {cause}"))


_EVENT_TITLES = {
    "recycled": "Workers were replaced because they had grown",
    "pressure": "Memory ran short, and fewer batches were kept in flight",
    "smaller": "Fewer batches were ordered after a death for lack of memory",
    "not-recycled": "Workers that had grown were not replaced",
    "started-late": "There was no memory for a worker, and it was started later",
}
_SHOWN_EVENTS = 3


def _first(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first few of each kind: a run of days may replace its workers thousands of times."""
    seen: Counter[tuple[Any, Any]] = Counter()
    shown = []
    for one in events:
        kind = (one.get("rank"), one["event"])
        seen[kind] += 1
        if seen[kind] <= _SHOWN_EVENTS:
            shown.append(one)
    return shown


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _happened(out: Console, events: list[dict[str, Any]]) -> None:
    """Count the events that are not incidents."""
    counts = Counter(str(one["event"]) for one in events)
    for kind, count in counts.most_common():
        if kind in _EVENT_TITLES:
            times = "once" if count == 1 else f"{count} times"
            more = f" (the first {_SHOWN_EVENTS} are above)" if count > _SHOWN_EVENTS else ""
            out.print(f"{_EVENT_TITLES[kind]}: {times}{more}.")


def _when(record: dict[str, Any]) -> str:
    moment = record.get("time")
    if not isinstance(moment, (int, float)):
        return " " * 19
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
