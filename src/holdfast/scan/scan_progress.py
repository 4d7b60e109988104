"""The progress of a scan: a small file beside its list, from which the scan can be continued.

Batches end in any order, so the part that is done is a list of ranges. The file is replaced as a
whole, never changed in place: if the scan is killed, the last saved file remains. It is saved after
the bad samples of its ranges are in the list, so none is ever lost. Samples that were loaded after
the last save are loaded again.
"""

from __future__ import annotations

import bisect
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast import kernel
from holdfast.scan.scan_statistics import Tally

VERSION: Final = 1


class ProgressError(ValueError):
    """The file is not the progress of this scan."""


class Ranges:
    """Which positions are done."""

    def __init__(self, ranges: list[tuple[int, int]] | None = None) -> None:
        self._ranges = ranges or []  # sorted, disjoint, (start, stop)

    def add(self, start: int, stop: int) -> None:
        ranges = self._ranges
        first = bisect.bisect_left(ranges, start, key=lambda one: one[1])
        last = first
        while last < len(ranges) and ranges[last][0] <= stop:
            start, stop = min(start, ranges[last][0]), max(stop, ranges[last][1])
            last += 1
        ranges[first:last] = [(start, stop)]

    def gaps(self, total: int) -> Iterator[tuple[int, int]]:
        """What is left of `total` positions."""
        at = 0
        for start, stop in [*self._ranges, (total, total)]:
            if at < start:
                yield at, start
            at = max(at, stop)

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self._ranges)

    def to_json(self) -> list[tuple[int, int]]:
        return list(self._ranges)


@dataclass
class ScanProgress:
    """A scan so far."""

    about: dict[str, Any]  # which scan it is
    done: Ranges = field(default_factory=Ranges)
    tally: Tally = field(default_factory=Tally)
    seconds: float = 0.0  # spent on it, over all sessions

    def save(self, path: str) -> None:
        fields = {
            "holdfast": VERSION,
            "about": self.about,
            "done": self.done.to_json(),
            "seconds": self.seconds,
            "tally": self.tally.to_json(),
        }
        draft = f"{path}.new"
        with open(draft, "w", encoding="utf-8", opener=kernel.open_file) as file:
            json.dump(fields, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)

    @classmethod
    def load(cls, path: str, about: dict[str, Any]) -> ScanProgress | None:
        """What was saved; None if nothing was. Raises `ProgressError` for another scan's file."""
        try:
            with open(path, encoding="utf-8") as file:
                fields = json.load(file)
            if fields["holdfast"] != VERSION:
                raise ProgressError(f"{path} was written by another version of holdfast")
            saved = fields["about"]
            done = Ranges([(int(start), int(stop)) for start, stop in fields["done"]])
            progress = cls(about, done, Tally.from_json(fields["tally"]), float(fields["seconds"]))
        except FileNotFoundError:
            return None
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, ProgressError):
                raise
            raise ProgressError(f"{path} is damaged ({error!r})") from error
        for key, wanted in about.items():
            if saved.get(key) != wanted:
                raise ProgressError(
                    f"{path} belongs to another scan: its {key} was {saved.get(key)!r}, and now it "
                    f"is {wanted!r}"
                )
        return progress
