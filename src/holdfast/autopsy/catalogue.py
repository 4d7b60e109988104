"""Every way we know in which data loading fails, by name.

The entries stand in `causes/`, by what it is that breaks. Here they are put together, looked up and
searched for in a text.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from holdfast.autopsy.cause import CONFIDENCES, Cause, Confidence
from holdfast.autopsy.causes import crashes, data, frameworks, memory, stalls, starting, transport

__all__ = ["CATALOGUE", "GROUPS", "UNKNOWN", "Finding", "UnknownCause", "find", "lookup"]

UNKNOWN = "unknown"

GROUPS: dict[str, tuple[Cause, ...]] = {
    "Memory": memory.CAUSES,
    "Deaths": crashes.CAUSES,
    "Transport": transport.CAUSES,
    "Start-up": starting.CAUSES,
    "Stalls": stalls.CAUSES,
    "Samples": data.CAUSES,
    "Around it": frameworks.CAUSES,
}
CATALOGUE: dict[str, Cause] = {cause.slug: cause for group in GROUPS.values() for cause in group}


class UnknownCause(LookupError):
    """There is no cause of that name."""


def lookup(slug: str) -> Cause:
    try:
        return CATALOGUE[slug]
    except KeyError:
        close = difflib.get_close_matches(slug, CATALOGUE, 3, 0.5)
        meant = f"; did you mean {' or '.join(close)}?" if close else ""
        raise UnknownCause(
            f"there is no cause named {slug!r}{meant} (holdfast explain --list shows all)"
        ) from None


@dataclass(frozen=True)
class Finding:
    """A cause's message, found in a text."""

    slug: str
    confidence: Confidence
    line: int  # counted from 1
    text: str  # the line it begins on

    @property
    def weight(self) -> int:
        return CONFIDENCES.index(self.confidence)


def find(text: str) -> tuple[Finding, ...]:
    """The best message of every cause that occurs in the text, surest first.

    A message that is the mere consequence of another cause that was found as surely or more is left
    out: `exited unexpectedly` beside a line of the memory killer says nothing new.
    """
    lines = text.splitlines()
    found: dict[str, Finding] = {}
    for cause in CATALOGUE.values():
        for one in cause.signs:
            match = one.regex.search(text)
            if match is None:
                continue
            line = text.count("\n", 0, match.start())
            shown = lines[line].strip() if line < len(lines) else ""
            finding = Finding(cause.slug, one.confidence, line + 1, shown)
            best = found.get(cause.slug)
            if best is None or finding.weight > best.weight:
                found[cause.slug] = finding
    consequences = {
        other
        for slug, finding in found.items()
        for other in CATALOGUE[slug].explains
        if other in found and found[other].weight <= finding.weight
    }
    kept = [finding for slug, finding in found.items() if slug not in consequences]
    return tuple(sorted(kept, key=lambda finding: (-finding.weight, finding.line)))
