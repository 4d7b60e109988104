"""What kind of growth it is: decided from a worker's sizes over the batches it has made. Pure.

Several things look alike from outside (``top`` shows a process that gets larger) and have different
remedies:

- *copy-on-write*: the worker copies inherited pages by touching them. Its private memory grows, and
  its resident memory does not, because inherited pages were counted there from the start.
- *leak*: it grows with every batch, without end. If the number of Python's blocks grows too, Python
  objects are kept; if it does not, native code keeps memory.
- *cache*: it grows more and more slowly, because objects are kept that are needed again.
- *allocator*: it shrinks when free memory is returned to the system.
- *prefetch*: not the process grows but its arena: batches in flight, or kept by the user.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from holdfast.autopsy.machine_facts import in_words

Kind = Literal["copy-on-write", "python-leak", "native-leak", "cache", "allocator", "prefetch"]

ENOUGH: Final = 24 << 20  # bytes of growth that are reported
NOISE: Final = 64  # blocks by which the number of Python's blocks varies anyway
FEWEST: Final = 3  # batches that make a slope
FADING: Final = 0.35  # of the rate of the first half: below this it levels off
HALF_A_DAY: Final = 12 * 3600.0
WORSE: Final = 4.0  # growth that is so many times as fast as reported is reported again


@dataclass(frozen=True, slots=True)
class Point:
    """A worker's sizes in bytes after so many batches."""

    at: float
    batches: int
    anonymous: int  # grown since its start; copied pages are not in it
    private: int  # without files and memory files, with copied pages
    trimmed: int  # returned to the system so far, by trimming
    blocks: int  # of Python's allocator: a count, not bytes
    arena: int


@dataclass(frozen=True, slots=True)
class Growth:
    kind: Kind
    total: int
    per_batch: float
    per_second: float


class GrowthWarnings:
    """What the user of a loader has been told, over all its epochs."""

    def __init__(self) -> None:
        self._speeds: dict[str, float] = {}
        self._once: set[str] = set()
        self.why_kept: set[str] = set()  # why workers that are too large are not replaced
        self.length_holds = False  # the last epoch without a death was as long as len(loader)

    def first(self, about: str) -> bool:
        """Whether nothing was told about this yet; from now on it was."""
        if about in self._once:
            return False
        self._once.add(about)
        return True

    def is_news(self, growth: Growth) -> bool:
        """Whether it is of a kind that was not told yet, or memory ends much earlier than told."""
        said = self._speeds.get(_subject(growth.kind))
        return said is None or growth.per_second >= WORSE * said

    def told(self, growth: Growth) -> None:
        """The user has been told of it."""
        self._speeds[_subject(growth.kind)] = growth.per_second


def _subject(kind: Kind) -> str:
    """What it is reported as. The two kinds of leak are one: a leak of arrays has few objects, and
    may look like the one kind in one worker and like the other in the next."""
    return "leak" if kind in ("python-leak", "native-leak") else kind


def classify(points: Sequence[Point]) -> Growth | None:
    """The growth from the first point to the last; None if it is too small."""
    if len(points) < 2:
        return None
    first, last = points[0], points[-1]
    batches, seconds = last.batches - first.batches, last.at - first.at
    if batches < FEWEST or seconds <= 0:
        return None

    def growth(kind: Kind, total: int) -> Growth:
        return Growth(kind, total, total / batches, total / seconds)

    private, arena = last.private - first.private, last.arena - first.arena
    if arena >= ENOUGH and arena > private:
        return growth("prefetch", arena)
    trimmed = last.trimmed - first.trimmed
    if trimmed >= ENOUGH and trimmed >= private:
        return growth("allocator", max(private, trimmed))
    if private < ENOUGH:
        return None
    if last.anonymous - first.anonymous < private // 4:
        return growth("copy-on-write", private)
    if _levels_off(points):
        return growth("cache", private)
    # A leak of Python objects leaves at least one for each batch.
    piles_up = last.blocks - first.blocks >= max(batches, NOISE)
    return growth("python-leak" if piles_up else "native-leak", private)


def _levels_off(points: Sequence[Point]) -> bool:
    """Whether the second half of the batches has added much less than the first."""
    if len(points) < 4:
        return False
    first, last = points[0], points[-1]
    middle = min(points, key=lambda one: abs(2 * one.batches - first.batches - last.batches))
    if middle is first or middle is last:
        return False
    before = (middle.private - first.private) / (middle.batches - first.batches)
    after = (last.private - middle.private) / (last.batches - middle.batches)
    return after < FADING * before


_MEANS: Final[dict[Kind, tuple[str, str]]] = {
    "copy-on-write": (
        "it copies the dataset's Python objects by reading them (copy-on-write)",
        "holdfast.pack(dataset) puts its lists and dicts in one buffer for all workers: holdfast "
        "explain cow-growth",
    ),
    "python-leak": (
        "there are more and more Python objects (a leak: something keeps what each sample makes)",
        "find the line: holdfast leaks YOUR.MODULE:DATASET",
    ),
    "native-leak": (
        "it grows with every batch and the number of Python objects does not (a leak, of arrays "
        "that are kept, or in native code, such as a decoder)",
        "see which library: holdfast leaks YOUR.MODULE:DATASET; until then worker_memory_limit "
        "bounds it",
    ),
    "cache": (
        "it grows more and more slowly (a cache that fills)",
        "each worker fills its own; if that is too much, bound the cache",
    ),
    "allocator": (
        "the allocator keeps freed memory (it shrinks when trimmed)",
        "start Python with MALLOC_ARENA_MAX=2 and MALLOC_TRIM_THRESHOLD_=65536",
    ),
    "prefetch": (
        "its batches in flight, and those you keep, take more and more memory",
        "keep fewer batches, or lower prefetch_factor or memory_budget",
    ),
}


def describe_growth(
    growth: Growth, worker: int, *, workers: int, free: int | None, bounded: bool
) -> str | None:
    """The message; None if it is not needed: the growth ends by itself, or memory lasts half a day.

    `bounded` if workers that grow too large are replaced anyway.
    """
    meaning, remedy = _MEANS[growth.kind]
    left = None
    if free is not None and growth.per_second > 0:
        left = free / (growth.per_second * workers)
    if growth.kind in ("cache", "allocator") and (left is None or left > 600):
        return None
    if left is None or left > HALF_A_DAY:
        return None
    end = f"at this rate memory ends in {_duration(left)}"
    if bounded:
        end += " (workers are replaced before that)"
    return (
        f"worker {worker} grows {in_words(round(growth.per_batch))} per batch, "
        f"{in_words(growth.total)} so far: {meaning}; {end}. To do: {remedy}"
    )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.0f} h"
