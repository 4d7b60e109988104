"""A text of any length in overlapping windows of lines, with their line numbers in the file.

A log of weeks does not fit into memory, and the error that ended the run may be anywhere in it. So
it is read in windows that overlap by more than the longest message spans. Colours, overwritten
progress bars and launchers' prefixes are removed, but a line keeps the number an editor shows for
it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

SIZE = 1 << 18  # characters of a window
OVERLAP = 1 << 14  # characters that are repeated in the next window
_MAX_LINE = 1 << 16  # characters after which a line is cut

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PREFIX = re.compile(r"(\[?rank ?\d+\]?:\s|\[default\d+\]:|\d+: (?=\w*Error|Traceback| ))")


@dataclass(frozen=True)
class TextWindow:
    """Consecutive lines; those before `fresh` were in the previous window too."""

    lines: tuple[str, ...]
    numbers: tuple[int, ...]
    """Line numbers, counted from 1; all states of one progress bar have the same number."""
    fresh: int = 0


def windows(
    chunks: Iterable[str], *, size: int = SIZE, overlap: int = OVERLAP
) -> Iterator[TextWindow]:
    """The text that the chunks make up, in bounded memory."""
    lines: list[str] = []
    numbers: list[int] = []
    held = fresh = 0
    for number, line in _numbered(chunks):
        lines.append(line)
        numbers.append(number)
        held += len(line) + 1
        if held >= size:
            yield TextWindow(tuple(lines), tuple(numbers), fresh)
            fresh = _overlapping(lines, overlap)
            del lines[: len(lines) - fresh], numbers[: len(numbers) - fresh]
            held = sum(map(len, lines)) + len(lines)
    if len(lines) > fresh:
        yield TextWindow(tuple(lines), tuple(numbers), fresh)


def _overlapping(lines: list[str], overlap: int) -> int:
    """How many lines at the end make up the overlap."""
    room = overlap
    for count, line in enumerate(reversed(lines)):
        room -= len(line) + 1
        if room < 0:
            return count
    return len(lines)


def _numbered(chunks: Iterable[str]) -> Iterator[tuple[int, str]]:
    number, rest = 1, ""
    for chunk in chunks:
        rest += chunk
        # A return at the very end may be the first half of "\r\n".
        cut = 1 + max(rest.rfind("\n"), rest.rfind("\r", 0, -1))
        if not cut and len(rest) > _MAX_LINE:
            cut = len(rest)
        yield from _pieces(rest[:cut], number)
        number += rest.count("\n", 0, cut)
        rest = rest[cut:]
    yield from _pieces(rest, number)


def _pieces(text: str, number: int) -> Iterator[tuple[int, str]]:
    raw = _ANSI.sub("", text).split("\n")
    for index, line in enumerate(raw):
        if not line and index == len(raw) - 1:
            continue  # the empty rest after the last newline
        for piece in line.removesuffix("\r").split("\r"):
            yield number + index, _PREFIX.sub("", piece, 1) if _PREFIX.match(piece) else piece
