"""One finding of the doctor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["EXIT", "Check", "Status", "bad", "good", "warning", "worst"]

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
