"""Which lines hold growing memory: snapshots over equal numbers of samples, compared.

A line is blamed if the memory that it has allocated, and that was not freed, grows in every round,
and does not slow down as a cache does. Growth of the process that ``tracemalloc`` does not explain
is called native. ``tracemalloc`` knows what Python, NumPy and well-behaved extensions allocate.
torch's tensors are not in it, but the objects that hold them are counted by type. Lists, dicts and
other containers in the user's modules and in the dataset are compared by length: most leaks end up
there, and the garbage collector knows neither arrays nor what was frozen at the start.

No method of the user's objects is called: an object that loads, connects or raises when it is used
must not do so because of this.

Tracing costs half a microsecond for each allocation and a quarter for each frame that is kept, and
snapshots may take seconds. So no process that makes batches for the trainer is traced
(`leak_probe`).
"""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import sys
import tracemalloc
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, TypeVar

from holdfast import code_origin
from holdfast.autopsy.machine_facts import in_words
from holdfast.autopsy.readers import procfs
from holdfast.introspection.attributes import dict_of, is_a, own
from holdfast.worker.housekeeping import trim

FRAMES: Final = 12
FADING: Final = 0.3  # of the first round's growth: less in the last, and it is a cache
WORTH_IT: Final = 8 << 10  # bytes a line must grow by in a round
NATIVE: Final = 256 << 10  # bytes a process must grow by in a round that are not traced
FEWEST: Final = 3  # rounds, with the one to start from, that are needed for a result
_MANY: Final = 64  # entries of a container from which on its contents are counted
SHOWN: Final = 50  # last values of a container of which the types are named
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Round:
    """The state after a round."""

    lines: Mapping[tuple[str, int], int]  # bytes allocated by a line and not freed
    types: Mapping[str, int]  # objects of a type
    process: int  # bytes of the process, without those that tracing takes
    traced: int  # bytes that tracemalloc knows
    lengths: Mapping[str, int]  # of containers in the user's modules and dataset


@dataclass(frozen=True)
class Grown:
    """Something that has grown in every round."""

    name: str
    per_round: float
    total: int


@dataclass(frozen=True)
class Findings:
    samples: int  # of a round; batches, in a leak probe
    lines: tuple[Grown, ...]
    types: tuple[Grown, ...]
    python: float  # traced bytes per sample
    native: float  # other bytes per sample; 0 if they do not grow in every round
    suspects: tuple[str, ...]  # packages with native code
    containers: tuple[Grown, ...] = ()  # that get longer, with the types of their contents

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


def findings(
    rounds: Sequence[Round],
    samples: int,
    native_code: Sequence[str] = (),
    contents: Mapping[str, str] | None = None,
) -> Findings:
    """Compare the rounds. The first is the state to start from."""
    steps = max(1, len(rounds) - 1)
    lines = growing([one.lines for one in rounds], WORTH_IT)
    types = growing([one.types for one in rounds], max(1, samples // 4))
    longer = growing([one.lengths for one in rounds], max(1, samples // 4))
    python = rounds[-1].traced - rounds[0].traced
    beyond = [{"native": one.process - one.traced} for one in rounds]
    native = growing(beyond, NATIVE)
    what = contents or {}
    return Findings(
        samples,
        tuple(Grown(f"{file}:{line}", n / steps, n) for (file, line), n in lines[:10]),
        tuple(Grown(name, n / steps, n) for name, n in types[:10]),
        python / steps / samples,
        native[0][1] / steps / samples if native else 0.0,
        tuple(native_code) if native else (),
        tuple(Grown(what.get(name, name), n / steps, n) for name, n in longer[:10]),
    )


def describe_findings(found: Findings) -> str:
    """What a leak probe has found, for the log."""

    def each(nbytes: float) -> str:
        return f"{in_words(round(nbytes / found.samples))} per batch"

    said = []
    if found.lines:
        lines = ", ".join(f"{one.name} ({each(one.per_round)})" for one in found.lines[:3])
        said.append(f"allocated at {lines}")
    if found.containers:
        said.append(f"kept in {', '.join(one.name for one in found.containers[:3])}")
    if found.types:
        said.append(f"more and more objects of type {', '.join(o.name for o in found.types[:3])}")
    if found.native:
        said.append(
            f"{in_words(round(found.native))} per batch were not allocated by Python: tensors, or "
            f"native code (loaded here: {', '.join(found.suspects) or 'none'})"
        )
    return "; ".join(said)


@dataclass(frozen=True)
class TracingFailed:
    """The search itself failed, because of an error in it or an object that it cannot handle."""

    error: str


class Tracer:
    """Takes snapshots after equal numbers of samples (or batches).

    The first round is skipped: late imports, and caches that fill at once, are no leaks.
    """

    def __init__(self, samples: int, rounds: int = 3, dataset: object = None) -> None:
        self.samples = samples
        self.rounds = rounds
        self._dataset = dataset
        self._found: list[bytes] = []  # pickled, or they would be among the objects that grow
        self._count = 0
        self._own = False  # tracing was begun here, so it ends here

    def step(self) -> Findings | None:
        """Another sample is done. After the last one, the findings."""
        self._count += 1
        if self._count == self.samples:
            self._own = not tracemalloc.is_tracing()
            if self._own:
                tracemalloc.start(FRAMES)
        elif self._count % self.samples == 0:
            gc.collect()
            self._found.append(pickle.dumps(take_snapshot(self._dataset), 5))
        return self.end() if len(self._found) > self.rounds else None

    def end(self) -> Findings | None:
        """Stop now; the findings so far, None if there were too few rounds."""
        self.close()
        if len(self._found) < FEWEST:
            return None
        rounds = [pickle.loads(one) for one in self._found]
        return findings(rounds, self.samples, _suspects(), _contents(self._dataset))

    def close(self) -> None:
        """Stop tracing, whatever was found."""
        if self._own:
            tracemalloc.stop()
        self._own = False


def take_snapshot(dataset: object) -> Round:
    """The state of this process now."""
    trim()
    size = procfs.size("self")
    traced = tracemalloc.get_traced_memory()[0]
    private = 0 if size is None else size.private - tracemalloc.get_tracemalloc_memory()
    known = gc.get_objects()  # before the snapshot, which has a tuple for every allocation
    # The raw form: size and frames, innermost first. The public methods of a snapshot make objects
    # of each, and take ten times as long.
    traces: list[tuple[Any, ...]] = vars(tracemalloc.take_snapshot().traces)["_traces"]
    types, lines = _types(known), _lines(traces)
    lengths = {name: _length(one) for name, one in _containers(dataset)}
    return Round(lines, types, private, traced, lengths)


def _lines(traces: Sequence[tuple[Any, ...]]) -> Counter[tuple[str, int]]:
    """Bytes that are allocated, by line, without this module's own."""
    # Lists of sizes instead of sums: each sum would be a new object, and tracing those would take
    # longest.
    stacks: defaultdict[tuple[tuple[str, int], ...], list[int]] = defaultdict(list)
    for trace in traces:
        stacks[trace[2]].append(trace[1])
    lines: Counter[tuple[str, int]] = Counter()
    for frames, sizes in stacks.items():
        if frames[0][0] != __file__:
            lines[_users_line(frames)] += sum(sizes)
    return lines


def _types(known: Sequence[Any]) -> dict[str, int]:
    """Objects by type: those the garbage collector knows, and other contents of containers, such as
    arrays and texts."""
    # Lists of None instead of counters: numbers are objects, and tracing them would take longest.
    marks: defaultdict[type, list[None]] = defaultdict(list)
    for one in known:
        kind = type(one)
        if not _hashed_plainly(kind):
            continue
        marks[kind].append(None)
        if kind in _CONTAINERS and len(one) >= _MANY:
            for held in itertools.filterfalse(gc.is_tracked, gc.get_referents(one)):
                if _hashed_plainly(type(held)):
                    marks[type(held)].append(None)
    return {_name(kind): len(each) for kind, each in marks.items()}


def _hashed_plainly(kind: type) -> bool:
    """Whether looking up a class in a dict runs no code of its metaclass."""
    meta = type(kind)
    return meta.__hash__ is type.__hash__ and meta.__eq__ is type.__eq__


# -- containers -----------------------------------------------------------------------------

_CONTAINERS = (list, dict, set, deque)


def _containers(dataset: object) -> Iterator[tuple[str, Any]]:
    """Containers that are globals of the user's modules, or attributes of the dataset."""
    for name, file, module in _modules():
        if code_origin.of_file(file) == "user":
            yield from _of(own(module), name)
    yield from _of(own(dataset), type(dataset).__name__)


def _modules() -> Iterator[tuple[str, str, object]]:
    """Modules that have a file, with their names and files."""
    loaded: list[tuple[str, object]] = list(sys.modules.items())
    for name, module in loaded:
        if not is_a(module, ModuleType):
            continue
        try:
            # Most are plain. A lazy module must not be loaded by this.
            inside = vars(module) if type(module) is ModuleType else dict_of(module)
            file = dict.__getitem__(inside, "__file__")
        except KeyError:
            continue
        if type(file) is str:
            yield name, file, module


def _of(names: Mapping[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    for name, value in names.items():
        if is_a(value, _CONTAINERS) and type(name) is str and not name.startswith("__"):
            yield f"{where}.{name}", value


def _length(container: Any) -> int:
    """Its length, without a method of a user's subclass."""
    base = next(kind for kind in _CONTAINERS if is_a(container, kind))
    return base.__len__(container)


def _contents(dataset: object) -> dict[str, str]:
    """Containers by name, with the types of their last entries. Only the end is read: reading all
    of a long list that was inherited by fork would copy it."""
    return {name: f"{name} ({_describe(one)})" for name, one in _containers(dataset)}


def _describe(container: Any) -> str:
    values: Iterator[Any]
    if is_a(container, dict):
        values = reversed(dict.values(container))
    elif is_a(container, list):
        values = list.__reversed__(container)
    elif is_a(container, deque):
        values = deque.__reversed__(container)
    else:
        values = set.__iter__(container)
    try:
        kinds = Counter(_name(type(one)) for one in itertools.islice(values, SHOWN))
    except RuntimeError:
        return f"{type(container).__name__} that another thread is changing"
    most = ", ".join(kind for kind, _ in kinds.most_common(2))
    return f"{type(container).__name__} of {most or 'nothing'}"


def _name(kind: type) -> str:
    home = getattr(kind, "__module__", "builtins")  # some made by native code have none
    return f"{home}.{kind.__qualname__}".removeprefix("builtins.")


def _users_line(frames: Sequence[tuple[str, int]]) -> tuple[str, int]:
    """The innermost line that the user wrote, else the innermost of all, which comes first."""
    return next((one for one in frames if code_origin.of_file(one[0]) == "user"), frames[0])


def _suspects() -> list[str]:
    """Packages that have loaded native code, other than torch's dependencies."""
    found = set()
    for name, file, _ in _modules():
        if ".so" in os.path.basename(file) and code_origin.of_file(file) != "python":
            found.add(name.partition(".")[0])
    return sorted(found - {"numpy", "torch", "functorch"}) or sorted(found & {"numpy", "torch"})
