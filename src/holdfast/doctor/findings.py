"""What the doctor finds, and how that looks on a terminal and as JSON."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

Status = Literal["good", "warning", "bad"]
_ORDER: tuple[Status, ...] = ("good", "warning", "bad")
EXIT: dict[Status, int] = {"good": 0, "warning": 1, "bad": 3}  # 2 is click's, for wrong usage


@dataclass(frozen=True)
class Check:
    """What was checked, the result, what it means, and the command that changes it."""

    name: str
    status: Status
    meaning: str
    command: str = ""


def good(name: str, meaning: str, command: str = "") -> Check:
    return Check(name, "good", meaning, command)


def warning(name: str, meaning: str, command: str = "") -> Check:
    return Check(name, "warning", meaning, command)


def bad(name: str, meaning: str, command: str = "") -> Check:
    return Check(name, "bad", meaning, command)


def worst(checks: Iterable[Check]) -> Status:
    return max((check.status for check in checks), key=_ORDER.index, default="good")


# -- how they look ------------------------------------------------------------------------

_COLOURS = {"good": "green", "warning": "yellow", "bad": "bold red"}
_WIDTH = 100  # wider lines are hard to read


def show(out: Console, parts: Mapping[str, Sequence[Check]]) -> None:
    """Every check with what it means and the command that changes it; the totals at the end."""
    checks = [check for part in parts.values() for check in part]
    name_width = max((len(check.name) for check in checks), default=0)
    for title, part in parts.items():
        out.print(Text(title, style="bold"))
        for check in part:
            _line(out, check, name_width)
        out.print()
    counts = Counter(check.status for check in checks)
    out.print(
        f"{counts['good']} good, {counts['warning']} to look at, {counts['bad']} bad", style="bold"
    )


def _line(out: Console, check: Check, name_width: int) -> None:
    indent = " " * (2 + 9 + name_width + 2)
    width = max(40, min(out.width if out.is_terminal else _WIDTH, _WIDTH) - len(indent) - 1)
    lines = textwrap.wrap(check.meaning, width, break_long_words=False, break_on_hyphens=False)
    head = Text("  ").append(f"{check.status:9}", _COLOURS[check.status])
    head.append(f"{check.name:{name_width}}  ")
    out.print(head.append(lines[0] if lines else ""))
    for line in lines[1:]:
        out.print(Text(indent + line))
    if check.command and check.status != "good":
        for line in check.command.splitlines():
            # To be copied, so never wrapped; it begins further left to have room.
            out.print(Text(f"{'':11}{line}", style="cyan"))


def as_json(parts: Mapping[str, Sequence[Check]]) -> dict[str, Any]:
    return {
        "status": worst(check for part in parts.values() for check in part),
        **{title: [asdict(check) for check in part] for title, part in parts.items()},
    }
