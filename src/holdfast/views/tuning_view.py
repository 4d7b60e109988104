"""What ``holdfast tune`` shows on a terminal: the curve, the recommendation, the line to paste."""

from __future__ import annotations

import textwrap
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from holdfast.autopsy.machine_facts import in_words
from holdfast.tuning.advice import Advice
from holdfast.tuning.measurement import Estimate, Setting
from holdfast.tuning.search import Request, Search

_WIDTH = 100
_BAR = 30
_EIGHTHS = " ▏▎▍▌▋▊▉"
_COLOURS = {"high": "green", "medium": "yellow", "low": "red"}
_SURE = {"high": "sure", "medium": "likely", "low": "perhaps"}
_LIMITS = {
    "cpu": "CPU",
    "memory": "memory",
    "disk": "disk",
    "gil": "Python's lock (GIL)",
    "consumer": "the consumer",
    "main process": "the main process",
    "waiting": "waiting",
    "workers": "too few workers",
    "unknown": "unknown",
}


def show(out: Console, search: Search, advice: Advice, request: Request) -> None:
    """Curve, recommendation, limit, and the line to paste."""
    show_curve(out, search, request, advice)
    head = Text("Recommended", style="bold").append("  ")
    head.append(f"({_SURE[advice.confidence]})", _COLOURS[advice.confidence])
    out.print(head)
    for name, value, why in advice.choices:
        _paragraph(out, Text(f"  {name:16} ").append(f"{value:>16}", "bold").append("  "), why)
    out.print()
    limit = advice.limit
    line = Text("What limits now", style="bold").append(": ").append(_LIMITS[limit.kind], "bold")
    out.print(line.append(f"  ({_SURE[limit.confidence]})", _COLOURS[limit.confidence]))
    words = limit.words[:1].upper() + limit.words[1:]
    _paragraph(out, Text("  "), f"{words}. {limit.advice}".strip())
    out.print()
    for note in advice.notes:
        _paragraph(out, Text("Note: "), note)
    if advice.notes:
        out.print()
    out.print(Text("from holdfast import DataLoader", style="cyan"))
    out.print(Text(f"loader = {advice.code}", style="cyan"))


def show_curve(
    out: Console, search: Search, request: Request, advice: Advice | None = None
) -> None:
    """Rates by number of workers, for each kind of them."""
    main = search.known(Setting.main())
    alone = {} if main is None else {0: main}
    groups = {
        f"processes ({search.start})": {**alone, **search.curve("processes")},
        "threads": search.curve("threads"),
    }
    highest = max((one.rate for group in groups.values() for one in group.values()), default=0.0)
    if not highest:
        return
    chosen = None if advice is None else advice.best.setting
    unit = "batches" if request.batch_size is None else "samples"
    each = " in each rank" if request.ranks > 1 else ""
    out.print(Text(f"{unit.capitalize()} a second{each}, by number of workers", style="bold"))
    for name, group in groups.items():
        if not group:
            continue
        out.print(Text(f"  {name}", style="dim"))
        for workers, one in group.items():
            is_it = chosen is not None and replace(chosen, prefetch=2) == one.setting
            line = Text(f"  {workers:5} ").append(
                _bar(one.rate / highest), "green" if is_it else ""
            )
            line.append(f" {rate_in_words(one, request):>9}", "bold" if is_it else "")
            line.append(f" ±{100 * one.error:.0f} %", "dim")
            out.print(line.append("  ← recommended", "bold green") if is_it else line)
    out.print()


def rate_in_words(one: Estimate, request: Request) -> str:
    rate = one.rate * (request.batch_size or 1)
    return f"{rate:,.0f}" if rate >= 20 else f"{rate:,.2g}"


def conditions_in_words(search: Search, request: Request) -> str:
    """For what the recommendation is made."""
    found = search.conditions
    cores = found.cores * request.ranks
    parts = [] if request.batch_size is None else [f"batch_size {request.batch_size}"]
    parts.append(f"{cores:g} processor{'s' * (cores != 1)}")
    if found.room is not None:
        parts.append(f"{in_words(found.room * request.ranks)} of memory")
    if request.ranks > 1:
        parts.append(f"shared by {request.ranks} ranks")
    if found.step:
        parts.append(f"a training step of {1000 * found.step:g} ms")
    return ", ".join(parts)


def _bar(share: float) -> str:
    eighths = round(8 * _BAR * share)
    whole, part = divmod(eighths, 8)
    return ("█" * whole + (_EIGHTHS[part] if part else "")).ljust(_BAR)


def _paragraph(out: Console, head: Text, words: str) -> None:
    width = max(40, min(out.width if out.is_terminal else _WIDTH, _WIDTH))
    indent = len(head.plain)
    lines = textwrap.wrap(
        words, max(20, width - indent - 1), break_long_words=False, break_on_hyphens=False
    )
    out.print(head.append(lines[0] if lines else ""))
    for line in lines[1:]:
        out.print(Text(" " * indent + line))
