"""What a process under ``holdfast run`` says at its end, if something went wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast import runtime
from holdfast.loader_identity import rank as find_rank

_KINDS = {
    "killed": ("was killed", "were killed"),
    "crashed": ("crashed", "crashed"),
    "exited": ("exited", "exited"),
    "stalled": ("hung", "hung"),
    "unkillable": ("hung and could not be killed", "hung and could not be killed"),
    "start-failed": ("could not be started", "could not be started"),
}
"""Kinds of incidents that end a run with torch's loader, or hang it; for one and for several."""
_ACTIONS = {"skipped": "left out", "replaced": "replaced", "given": "replaced by your function"}


@dataclass(frozen=True)
class Figures:
    """What is told."""

    kinds: Mapping[str, int] = field(default_factory=dict)  # of incidents, and how many
    first: float | None = None  # seconds from the beginning to the first of them
    bad_samples: Mapping[str, int] = field(default_factory=dict)  # what was done about how many
    rank: int | None = None
    logbooks: tuple[str, ...] = ()


def lines(began: float) -> list[str]:
    """What to say at the end of this process, which began at `began` (seconds since 1970)."""
    return tell(figures(began))


def figures(began: float) -> Figures:
    """What is known now."""
    for state in runtime.living():
        state.finish_incidents()
    totals = runtime.totals
    with totals.lock:
        return Figures(
            kinds={kind: count for kind, count in totals.kinds.items() if kind in _KINDS},
            first=None if totals.first is None else totals.first - began,
            bad_samples=dict(totals.bad_samples),
            rank=find_rank().told,
            logbooks=tuple(sorted(totals.logbooks)),
        )


def tell(found: Figures) -> list[str]:
    """In words, a line each; none if nothing went wrong."""
    told = []
    deaths, bad = sum(found.kinds.values()), sum(found.bad_samples.values())
    if deaths:
        ways = [f"{count} {_KINDS[kind][count > 1]}" for kind, count in found.kinds.items()]
        told.append(f"{_count(deaths, 'worker')} lost ({', '.join(ways)})")
    if bad:
        done = [
            f"{count} {_ACTIONS[action]}"
            for action, count in found.bad_samples.items()
            if action in _ACTIONS
        ]
        told.append(f"{_count(bad, 'sample')} bad" + (f" ({', '.join(done)})" if done else ""))
    if deaths and found.first is not None:
        told.append(
            "with torch's own workers this program would have ended, or hung, after "
            f"{duration(found.first)}, at the first of these deaths"
        )
    if told:
        for book in found.logbooks:
            told.append(f"the whole story: holdfast incidents {book}")
            told.append(f"as a page with curves: holdfast report {book} --open")
    return [f"[rank {found.rank}] {line}" for line in told] if found.rank is not None else told


def _count(number: int, what: str) -> str:
    return f"1 {what} was" if number == 1 else f"{number} {what}s were"


def duration(seconds: float) -> str:
    """``"2 h 5 min"``"""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
