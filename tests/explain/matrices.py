"""The confusion matrices of this run, for its summary."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

MATRICES: list[str] = []


@dataclass(frozen=True)
class Row:
    injected: str
    wanted: str
    found: str
    confidence: str
    why: str

    @property
    def right(self) -> bool:
        return self.found == self.wanted

    def __str__(self) -> str:
        mark = "      " if self.right else "WRONG "
        return f"{mark}{self.injected:28} {self.wanted:22} {self.found:22} {self.confidence:7} {self.why}"


def matrix(rows: list[Row], title: str) -> str:
    counts = Counter((row.wanted, row.found) for row in rows)
    lines = [f"{title}: {sum(row.right for row in rows)} of {len(rows)} right", *map(str, rows), ""]
    lines += [
        f"{count:4} × {wanted} -> {found}" for (wanted, found), count in sorted(counts.items())
    ]
    return "\n".join(lines)


def note(injected: str, wanted: str, incident: dict[str, Any]) -> None:
    """A row for what needs a place of its own to be injected."""
    because = "; ".join(incident["because"])[:90]
    row = Row(injected, wanted, incident["cause"], incident["confidence"], because)
    MATRICES.append(str(row))
