"""Figures and incidents as they are shown: lines on a terminal, a table in a notebook.

They are a dict and a list, and behave as such: only how they are shown is ours.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from typing import Final

from holdfast.autopsy.incident import Incident
from holdfast.autopsy.machine_facts import in_words

SHOWN: Final = 100  # incidents: the newest

Figure = int | float | None


class Figures(dict[str, Figure]):
    """``loader.stats()``: a line for each figure, under the name by which a program reads it."""

    def __repr__(self) -> str:
        widest = max(map(len, self), default=0)
        return "\n".join(f"{name:<{widest}}  {_in_words(name, self[name])}" for name in self)

    def _repr_html_(self) -> str:
        rows = [[escape(name), escape(_in_words(name, value))] for name, value in self.items()]
        return _table(("figure", "value"), rows)


class Incidents(list[Incident]):
    """``loader.incidents``: a line for each, the newest last."""

    def __repr__(self) -> str:
        return "\n".join([*self._left_out(), *map(str, self[-SHOWN:])]) or "no incidents"

    def _repr_html_(self) -> str:
        if not self:
            return "<p>no incidents</p>"
        rows = [
            [
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.time)),
                escape(one.cause),
                f"<details><summary>{escape(str(one))}</summary>"
                f'<pre style="white-space: pre-wrap">{escape(_details(one))}</pre></details>',
            ]
            for one in self[-SHOWN:]
        ]
        notes = "".join(f"<p>{escape(line)}</p>" for line in self._left_out())
        return notes + _table(("noticed", "cause", "what happened"), rows)

    def _left_out(self) -> list[str]:
        more = len(self) - SHOWN
        return [f"… and {more} before these"] if more > 0 else []


def _details(incident: Incident) -> str:
    """What follows the line itself: reasons, remedies, and the stack."""
    report = incident.report().removeprefix(str(incident)).lstrip("\n")
    return "\n".join(part for part in (report, incident.stack) if part)


def _in_words(name: str, value: Figure) -> str:
    if value is None:
        return "no limit" if name == "budget_bytes" else "unknown"
    if name.endswith("bytes"):
        return in_words(round(value))
    return f"{value:,.2f} s" if name.endswith("seconds") else f"{value:,}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Of cells that are HTML already."""
    head = "".join(f"<th>{name}</th>" for name in heads)
    left = ' style="text-align: left"'
    body = "".join(f"<tr>{''.join(f'<td{left}>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
