"""One way in which data loading fails: how it is recognised, what it means, what to do.

A cause is data. Figures of the machine appear in its remedies as ``{names}``: `Machine.facts` fills
them in, and the docs show placeholders. So `holdfast explain`, the docs and the report of an
incident share one text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from holdfast.autopsy.machine_facts import PLACEHOLDERS

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
"""What a remedy requires besides the machine: which loader it was, where the stack was kept, or
whether the worker was loading a sample or still starting."""

_TOKEN = re.compile(
    r"\\(?P<escaped>\W)|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|(?P<quantity>[?*+]|\{[\d,]+\})|[()|.^$]|(?P<char>.)"
)
"""The tokens of a regular expression: literals, classes, quantifiers, and the rest."""


@dataclass(frozen=True)
class Sign:
    """A message that points to a cause, and how far it alone can be trusted."""

    pattern: str
    """A regular expression. The line shown is where the match begins, or its group ``said``."""
    confidence: Confidence
    reports: bool = False
    """The line is about one process, which need not be a worker: its pid decides."""

    @cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.MULTILINE)

    @cached_property
    def needle(self) -> str:
        """The longest literal that every match contains, in lower case; quick to search for first.

        Only text outside of groups counts; a pattern with alternatives at its top level has none.
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


@dataclass(frozen=True)
class Remedy:
    """Something to do, with the command for it where there is one."""

    text: str
    command: str = ""
    place: Place = ""  # useful only there
    given: Given = ""  # useful only with that

    @property
    def where(self) -> str:
        """A prefix that says where it is useful; "" if everywhere."""
        given = "while it starts" if self.given == "a start" else self.given
        known = ", ".join(filter(None, (self.place, given if given != "a sample" else "")))
        return f"[{known}] " if known else ""

    def filled(self, facts: Mapping[str, str]) -> Remedy:
        """A copy with these values. An aside "(now …)" with an unknown value is removed."""

        def known(aside: re.Match[str]) -> str:
            names = re.findall(r"\{(\w+)\}", aside[0])
            return "" if any(facts[name] == PLACEHOLDERS[name] for name in names) else aside[0]

        text = re.sub(r" \(now [^()]*\)", known, self.text)
        return replace(self, text=text.format_map(facts), command=self.command.format_map(facts))

    def __str__(self) -> str:
        return f"{self.text}: {self.command}" if self.command else self.text


@dataclass(frozen=True)
class Cause:
    """An entry of the catalogue."""

    slug: str
    title: str
    """What happened to the worker or the run, to be read after "worker 3"."""
    meaning: str
    """Two sentences: what happens, and why."""
    evidence: str
    """What distinguishes it from similar causes, apart from the messages."""
    remedies: tuple[Remedy, ...]
    """Cheapest first."""
    already: str
    """What holdfast does about it by default."""
    signs: tuple[Sign, ...] = ()
    explains: tuple[str, ...] = field(default=())
    """Causes whose messages are only consequences of this one."""
    see: tuple[str, ...] = field(default=())
    """Similar causes it is easily mistaken for."""
