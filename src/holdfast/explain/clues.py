"""What a text contains: messages of causes, the processes they are about, and how the text ends.

A message alone is not enough. The kernel logs about every process on the machine, so a line of its
log counts for a worker only if the text names a worker with that pid. And an error that the run
survived is not the error that ended it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from holdfast.autopsy.catalogue import CATALOGUE
from holdfast.autopsy.cause import CONFIDENCES, Confidence, Sign
from holdfast.autopsy.readers.kernel_log import Subject, subject
from holdfast.explain.final_error import FinalError, FinalErrors
from holdfast.explain.text_windows import TextWindow, windows

_KEPT_PIDS = 1000  # the last ones
_WORKERS = re.compile(
    r"worker(?: \d+)? \(pid(?:\(s\))?[ :=]*([\d, ]+)\)"
    r"|\(pid: (\d+)\)|received by PID (\d+)|Process (\d+) got signal"
)
_OURS = re.compile(r"^[ \t]+more: holdfast explain (?P<slug>[a-z0-9-]+)$", re.MULTILINE)
_REBUILT = re.compile(
    r'accelerate/data_loader\.py", line \d+, in [^\n]+\n(?:    [^\n]*\n)*'
    r'  File "[^"\n]*torch/utils/data/dataloader\.py", line \d+, in __next__'
)
"""Accelerate iterates torch's loader: otherwise the frame below its own would be ours."""
_K = TypeVar("_K")
_V = TypeVar("_V")
_PYTHON = re.compile(r"i?python|pt_|torchrun")


@dataclass(frozen=True)
class Finding:
    """A cause's message, found in a text."""

    slug: str
    confidence: Confidence
    line: int  # counted from 1
    text: str
    source: str = ""  # the file, if there are several
    note: str = ""  # a caveat to show with it
    aside: bool = False  # about another process, or survived: it does not explain the end

    @property
    def weight(self) -> int:
        return CONFIDENCES.index(self.confidence)


@dataclass
class Clues:
    """What was found so far in the texts that were read; of bounded size."""

    lines: int = 0
    blank: bool = True
    rebuilt: str = ""
    """The line that shows that Accelerate used torch's own loader, in words."""
    _best: dict[tuple[str, str], Finding] = field(default_factory=dict)  # by cause and source
    _latest: dict[tuple[str, str], int] = field(default_factory=dict)  # line of any message
    _reports: dict[tuple[str, Subject], Finding] = field(default_factory=dict)
    _workers: dict[int, None] = field(default_factory=dict)
    _endings: dict[str, FinalErrors] = field(default_factory=dict)

    def read(self, chunks: Iterable[str], source: str = "") -> None:
        """Read a text; may be called for several."""
        ending = self._endings.setdefault(source, FinalErrors())
        last = 0
        for window in windows(chunks):
            last = window.numbers[-1]
            for number, line in zip(
                window.numbers[window.fresh :], window.lines[window.fresh :], strict=True
            ):
                ending.feed(number, line)
            self._search(window, source)
        self.lines += last

    @property
    def workers(self) -> tuple[int, ...]:
        """The pids that the text gives for workers, or for the processes of the run."""
        return tuple(self._workers)

    def ending(self) -> tuple[str, FinalError] | None:
        """Where and how the last text ends, if it ends with an error that no cause matches."""
        for source in reversed(self._endings):
            last = self._endings[source].last
            if last is not None and self._is_other(source, last):
                return source, last
        return None

    def findings(self) -> tuple[Finding, ...]:
        """The best message of every cause, the most certain first.

        A mere consequence of another cause found with at least the same confidence is left out:
        `exited unexpectedly` beside a line of the OOM killer says nothing new.
        """
        found: dict[str, Finding] = {}
        for one in (*map(self._placed, self._best.values()), *self._attributed()):
            best = found.get(one.slug)
            if best is None or (not one.aside, one.weight) > (not best.aside, best.weight):
                found[one.slug] = one
        consequences = {
            other
            for slug, finding in found.items()
            if not finding.aside
            for other in CATALOGUE[slug].explains
            if other in found and (found[other].aside or found[other].weight <= finding.weight)
        }
        kept = [finding for slug, finding in found.items() if slug not in consequences]
        return tuple(sorted(kept, key=lambda one: (one.aside, -one.weight, one.line)))

    # -- gathering -------------------------------------------------------------------------

    def _search(self, window: TextWindow, source: str) -> None:
        text = "\n".join(window.lines)
        self.blank = self.blank and not text.strip()
        lower = text.lower()
        for match in _WORKERS.finditer(text) if "pid" in lower or "process" in lower else ():
            for pid in re.findall(r"\b\d{1,9}\b", "".join(filter(None, match.groups()))):
                _remember(self._workers, int(pid), None)
        for cause in CATALOGUE.values():
            for sign in cause.signs:
                if sign.needle not in lower:
                    continue
                for match in sign.regex.finditer(text):
                    said = "said" if "said" in sign.regex.groupindex else 0
                    index = text.count("\n", 0, match.start(said))
                    shown = window.lines[index].strip()
                    finding = Finding(
                        cause.slug, sign.confidence, window.numbers[index], shown, source
                    )
                    self._add(finding, sign)
        if not self.rebuilt and (swapped := _REBUILT.search(text)) is not None:
            file = f" of {source}" if source else ""
            self.rebuilt = f"line {window.numbers[text.count(chr(10), 0, swapped.start())]}{file}"
        for match in _OURS.finditer(text) if "more: holdfast explain" in lower else ():
            if match["slug"] in CATALOGUE:
                index = text.count("\n", 0, match.start())
                number, shown = window.numbers[index], window.lines[index].strip()
                self._record(Finding(match["slug"], "medium", number, shown, source))

    def _add(self, finding: Finding, sign: Sign) -> None:
        process = subject(finding.text) if sign.reports else None
        if process is not None:
            _remember(self._reports, (finding.slug, process), finding)
            return
        self._record(finding)

    def _record(self, finding: Finding) -> None:
        key = (finding.slug, finding.source)
        best = self._best.get(key)
        if best is None or (finding.weight, finding.line) > (best.weight, best.line):
            self._best[key] = finding
        self._latest[key] = max(finding.line, self._latest.get(key, 0))

    # -- weighing --------------------------------------------------------------------------

    def _is_other(self, source: str, last: FinalError) -> bool:
        """Whether a text's last error is one that no cause matches."""
        return not last.follows and not any(
            line >= last.first for (_, where), line in self._latest.items() if where == source
        )

    def _placed(self, finding: Finding) -> Finding:
        """An error before the last one was survived, unless it led to the last one."""
        last = self._endings[finding.source].last
        key = (finding.slug, finding.source)
        if last is None or last.follows or self._latest[key] >= last.first:
            return finding
        at_the_end = {
            slug
            for (slug, where), line in self._latest.items()
            if where == finding.source and line >= last.first
        }
        led_to_it = bool(at_the_end & set(CATALOGUE[finding.slug].explains))
        if led_to_it or not _survivable(finding):
            return finding
        note = f"the run seems to have gone on after it: its last error is line {last.line}"
        return replace(finding, confidence="low", aside=True, note=f"{note}, {last.text[:200]}")

    def _attributed(self) -> list[Finding]:
        """The lines about single processes, each with whether that process was a worker."""
        killed = {slug for slug, process in self._reports if process.pid is not None}
        found = []
        for (slug, process), finding in self._reports.items():
            if process.pid is None and slug in killed:
                continue  # the process that asked for memory; another line names the killed one
            found.append(self._attribute(finding, process))
        return found

    def _attribute(self, finding: Finding, process: Subject) -> Finding:
        if process.pid is not None and process.pid in self._workers:
            return finding
        python = _PYTHON.match(process.name) is not None
        if self._workers and process.pid is not None:
            named = ", ".join(map(str, self.workers[:5]))
            note = f"that was {process}, but the workers in this text have pid {named}"
            if python:
                note += "; a container has its own pids, so it may still be one of them"
            return replace(finding, confidence="low", aside=True, note=note)
        if not python:
            note = f"that is about {process}, and nothing shows that this was a worker"
            return replace(finding, confidence="low", aside=True, note=note)
        weight = min(finding.weight, CONFIDENCES.index("medium"))
        note = f"that is about {process}; the text does not say whether it was a worker"
        return replace(finding, confidence=CONFIDENCES[weight], note=note)


def find(text: str) -> tuple[Finding, ...]:
    """The findings in one text."""
    clues = Clues()
    clues.read([text])
    return clues.findings()


def _survivable(finding: Finding) -> bool:
    """Whether a run can go on after it: an exception, which code can catch; a hint; or a worker
    that holdfast replaced. Not the last message of a process."""
    if _OURS.match(f" {finding.text}"):
        return True
    said = re.search(r"\b\w*(Error|Exception|Warning)\b", finding.text)
    return said is not None or finding.confidence == "low"


def _remember(table: dict[_K, _V], key: _K, value: _V) -> None:
    table.pop(key, None)
    table[key] = value
    if len(table) > _KEPT_PIDS:
        del table[next(iter(table))]
