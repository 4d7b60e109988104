"""Which lines hold growing memory: snapshots over equal numbers of samples, compared.

A line is blamed if what it has allocated and nobody has freed grows in every round, and does not
fade as a cache does. Growth of the process that Python's books do not explain is called native.
Python's books know what Python, NumPy and well-behaved extensions allocate; tensors of torch are
not in them, but the objects that hold them are counted by type.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import sysconfig
import tracemalloc
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from holdfast.autopsy.readers import process
from holdfast.memory.housekeeping import trim

__all__ = ["Findings", "Grown", "Round", "Tracer", "findings", "growing", "suspects"]

FRAMES: Final = 12
FADING: Final = 0.3  # of the first round's growth: less in the last, and it is a cache
WORTH_IT: Final = 8 << 10  # bytes a line must grow by in a round
_MANY: Final = 64  # entries of a container that is worth looking into
_CONTAINERS: Final = (list, dict, set, deque)
NATIVE: Final = 256 << 10  # bytes a process must grow by in a round, beyond Python's books
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Round:
    """What was there after a round."""

    lines: Mapping[tuple[str, int], int]  # bytes allocated by a line and not freed
    types: Mapping[str, int]  # objects of a type
    process: int  # bytes of the process, without what the tracing takes
    traced: int  # bytes in Python's books


@dataclass(frozen=True)
class Grown:
    """Something that has grown in every round."""

    name: str
    per_round: float
    total: int


@dataclass(frozen=True)
class Findings:
    samples: int  # of a round
    lines: tuple[Grown, ...]
    types: tuple[Grown, ...]
    python: float  # bytes per sample in Python's books
    native: float  # bytes per sample beyond them; 0 if it is not in every round
    suspects: tuple[str, ...]  # packages with native code

    @property
    def any(self) -> bool:
        return bool(self.lines) or self.native > 0


def growing(rounds: Sequence[Mapping[Key, int]], at_least: int = 1) -> list[tuple[Key, int]]:
    """What has grown from each round to the next, by how much in all; most first."""
    found = []
    for key, last in rounds[-1].items():
        sizes = [one.get(key, 0) for one in rounds]
        steps = [after - before for before, after in itertools.pairwise(sizes)]
        if not steps or min(steps) < at_least or steps[-1] < FADING * steps[0]:
            continue
        found.append((key, last - sizes[0]))
    return sorted(found, key=lambda one: -one[1])


def findings(rounds: Sequence[Round], samples: int, native_code: Sequence[str] = ()) -> Findings:
    """Compare the rounds. The first is the state to start from."""
    steps = max(1, len(rounds) - 1)
    lines = growing([one.lines for one in rounds], WORTH_IT)
    types = growing([one.types for one in rounds], max(1, samples // 4))
    python = rounds[-1].traced - rounds[0].traced
    beyond = [{"native": one.process - one.traced} for one in rounds]
    native = growing(beyond, NATIVE)
    return Findings(
        samples,
        tuple(Grown(f"{file}:{line}", n / steps, n) for (file, line), n in lines[:10]),
        tuple(Grown(name, n / steps, n) for name, n in types[:10]),
        python / steps / samples,
        native[0][1] / steps / samples if native else 0.0,
        tuple(native_code) if native else (),
    )


class Tracer:
    """Notes, in the process that loads, what is there after each round of equal length."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self._loaded = 0

    def loaded(self) -> Round | None:
        """One more sample was loaded; what is there, at the end of a round.

        The first round is not looked at: modules are loaded in it, and caches filled.
        """
        self._loaded += 1
        if self._loaded % self.samples:
            return None
        if self._loaded == self.samples:
            gc.unfreeze()  # what holds the leak may be older than this process
            gc.collect()
            tracemalloc.start(FRAMES)
            return None
        return _look()


def _look() -> Round:
    gc.collect()
    trim()
    size = process.size("self")
    traced = tracemalloc.get_traced_memory()[0]
    private = 0 if size is None else size.private - tracemalloc.get_tracemalloc_memory()
    lines: Counter[tuple[str, int]] = Counter()
    for statistic in tracemalloc.take_snapshot().statistics("traceback"):
        lines[_users_line(statistic.traceback)] += statistic.size
    return Round(lines, _types(), private, traced)


def _types() -> dict[str, int]:
    """Objects by type: those the collector knows, and what else containers hold: arrays, texts."""
    # A mark for each and no number: numbers are objects, and tracing their making takes longest.
    marks: defaultdict[type, list[None]] = defaultdict(list)
    known = gc.get_objects()
    for one in known:
        kind = type(one)
        marks[kind].append(None)
        if kind in _CONTAINERS and len(one) >= _MANY:
            for held in itertools.filterfalse(gc.is_tracked, gc.get_referents(one)):
                marks[type(held)].append(None)
    return {_name(kind): len(each) for kind, each in marks.items()}


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


_NOT_THE_USERS = (
    sysconfig.get_paths()["stdlib"],
    sysconfig.get_paths()["purelib"],
    sysconfig.get_paths()["platlib"],
    os.path.dirname(os.path.dirname(__file__)),
    "<",
)


def _users_line(traceback: tracemalloc.Traceback) -> tuple[str, int]:
    """The innermost line that the user wrote, else the innermost of all."""
    frames = list(traceback)
    for frame in reversed(frames):
        if not frame.filename.startswith(_NOT_THE_USERS):
            return frame.filename, frame.lineno
    return frames[-1].filename, frames[-1].lineno


def suspects() -> list[str]:
    """Packages that have brought native code, without those that torch brings anyway."""
    found = set()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if ".so" in os.path.basename(file) and "site-packages" in file:
            found.add(name.partition(".")[0])
    return sorted(found - {"numpy", "torch", "functorch"}) or sorted(found & {"numpy", "torch"})
