"""Every way we know in which data loading fails, by name.

The entries are in `causes/`, grouped by what breaks. This module collects them and looks them up;
`clues` searches a text for them.
"""

from __future__ import annotations

import difflib

from holdfast.autopsy.cause import Cause
from holdfast.autopsy.causes import crashes, data, frameworks, memory, stalls, starting, transfer

__all__ = ["CATALOGUE", "GROUPS", "UNKNOWN", "UnknownCause", "lookup"]

UNKNOWN = "unknown"

GROUPS: dict[str, tuple[Cause, ...]] = {
    "Memory": memory.CAUSES,
    "Deaths": crashes.CAUSES,
    "Transport": transfer.CAUSES,
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
