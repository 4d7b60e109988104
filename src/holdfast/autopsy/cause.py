"""One way in which data loading fails: how it is recognised, what it means, what to do.

A cause is data. What it says of a machine stands in its remedies as ``{names}`` that
`Machine.facts` fills in; the docs fill them with placeholders. So the manual, the pages and what a
user is told at three in the morning are one and the same text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from holdfast.autopsy.machine import PLACEHOLDERS

__all__ = [
    "CONFIDENCES",
    "Cause",
    "Confidence",
    "Remedy",
    "Sign",
    "hint",
    "proof",
    "report",
    "sign",
    "todo",
]

Confidence = Literal["low", "medium", "high"]
CONFIDENCES: tuple[Confidence, ...] = ("low", "medium", "high")

Place = Literal["", "docker", "kubernetes", "slurm"]
Given = Literal[
    "",
    "torch's loader",
    "holdfast",
    "holdfast with logbook=",
    "holdfast without logbook=",
    "a sample",
    "a start",
]
"""What a remedy presumes beside the machine: whose loader it was; where its stack was kept; that it
was loading a sample, or had not come so far."""

_TOKEN = re.compile(
    r"\\(?P<escaped>\W)|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|(?P<quantity>[?*+]|\{[\d,]+\})|[()|.^$]|(?P<char>.)"
)
"""Of a pattern: what stands for itself, classes, quantities, and the rest."""


@dataclass(frozen=True)
class Sign:
    """A message that points to a cause, and how far it alone can be trusted."""

    pattern: str
    """Where it begins is shown, or its group ``said``."""
    confidence: Confidence
    reports: bool = False
    """A line about one process, which may be anybody's: its pid decides."""

    @cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.MULTILINE)

    @cached_property
    def needle(self) -> str:
        """The longest words that any match holds, in lower case; to look for them first is quick.

        Only what stands outside of groups counts, and nothing where there are alternatives.
        """
        runs, depth = [""], 0
        for token in _TOKEN.finditer(self.pattern):
            depth += (token[0] == "(") - (token[0] == ")")
            if depth or token[0] == ")":
                runs.append("")
            elif token[0] == "|":
                return ""
            elif token["quantity"]:
                runs[-1] = runs[-1] if token[0] == "+" else runs[-1][:-1]
                runs.append("")
            elif literal := token["escaped"] or token["char"]:
                runs[-1] += literal
            else:
                runs.append("")
        return max(runs, key=len).lower()


def proof(pattern: str) -> Sign:
    """Nothing else says this."""
    return Sign(pattern, "high")


def sign(pattern: str) -> Sign:
    """This cause as a rule, but not always."""
    return Sign(pattern, "medium")


def hint(pattern: str) -> Sign:
    """One of several possible causes."""
    return Sign(pattern, "low")


def report(pattern: str, confidence: Confidence = "high") -> Sign:
    """This cause, of the process that the line names."""
    return Sign(pattern, confidence, reports=True)


@dataclass(frozen=True)
class Remedy:
    """Something to do, with the command for it where there is one."""

    text: str
    command: str = ""
    place: Place = ""  # only of use there
    given: Given = ""  # only of use with that

    @property
    def where(self) -> str:
        """Where it is of use, in front of its text; "" for everywhere."""
        given = "while it starts" if self.given == "a start" else self.given
        known = ", ".join(filter(None, (self.place, given if given != "a sample" else "")))
        return f"[{known}] " if known else ""

    def filled(self, facts: Mapping[str, str]) -> Remedy:
        """With these values. What is so "now" is left out where nobody knows it."""

        def known(aside: re.Match[str]) -> str:
            names = re.findall(r"\{(\w+)\}", aside[0])
            return "" if any(facts[name] == PLACEHOLDERS[name] for name in names) else aside[0]

        text = re.sub(r" \(now [^()]*\)", known, self.text)
        return replace(self, text=text.format_map(facts), command=self.command.format_map(facts))

    def __str__(self) -> str:
        return f"{self.text}: {self.command}" if self.command else self.text


def todo(text: str, command: str = "", place: Place = "", *, given: Given = "") -> Remedy:
    return Remedy(text, command, place, given)


@dataclass(frozen=True)
class Cause:
    """An entry of the catalogue."""

    slug: str
    title: str
    """What happened to the worker or the run, to be read after "worker 3"."""
    meaning: str
    """Two sentences: what goes on there, and why it comes to that."""
    evidence: str
    """What tells it from its neighbours, beside the messages."""
    remedies: tuple[Remedy, ...]
    """Cheapest first."""
    already: str
    """What holdfast does about it without being asked."""
    signs: tuple[Sign, ...] = ()
    explains: tuple[str, ...] = field(default=())
    """Causes whose messages are mere consequences of this one."""
    see: tuple[str, ...] = field(default=())
    """Neighbours it is easily mistaken for."""
