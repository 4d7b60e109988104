"""A verdict, and the words that several rules need for one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.autopsy.catalogue import title_of
from holdfast.autopsy.cause import Confidence, Remedy
from holdfast.autopsy.evidence import Evidence
from holdfast.autopsy.stack import innermost, users

AT_ONCE = 5.0  # seconds after a signal to the process group in which a death may be due to it


@dataclass(frozen=True)
class Verdict:
    """A cause, how certain it is, and why."""

    cause: str
    confidence: Confidence
    sample: Any = None
    because: tuple[str, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    perhaps: tuple[str, ...] = ()
    """What else it may be."""

    @property
    def title(self) -> str:
        return title_of(self.cause)


def verdict(
    cause: str, confidence: Confidence, *because: str, perhaps: tuple[str, ...] = ()
) -> Verdict:
    return Verdict(cause, confidence, None, because, (), perhaps)


def where(stack: str) -> list[str]:
    """Where it was, and from which line of the user's own code."""
    top, own = innermost(stack), users(stack)
    if not top:
        return []
    return [f"its stack ends in {top}" + (f", called from {own}" if own not in ("", top) else "")]


def to_all(e: Evidence) -> str:
    if not e.group_signal_ago:
        return f"the trainer got {e.group_signal} too"
    return f"{e.group_signal} was sent to the whole process group {e.group_signal_ago:.1f} s before"


def end_of(stderr: str | None, lines: int = 10) -> str:
    """The last lines that are not empty: errors further up were survived."""
    said = [line.strip() for line in (stderr or "").splitlines() if line.strip()]
    return "\n".join(said[-lines:])
