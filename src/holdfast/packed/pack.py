"""`pack(dataset)`: large Python containers among a dataset's attributes become packed ones.

A container is left as it is, and the reason reported, if packing it cannot be shown to be safe:
because the dataset's own methods change it, another object refers to it too, or its items would not
come out equal. The methods' source is read (`mutation.py`), items are compared, references counted.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from holdfast.autopsy.machine_facts import in_words
from holdfast.packed.containers import PackedDict, PackedList
from holdfast.packed.large_containers import LARGE, Candidate, Location, large_containers
from holdfast.packed.mutation import changes, unreadable
from holdfast.packed.object_sizes import deep_size, object_count

_COMPARED = 1000
_PER_OBJECT = 16 << 10


@dataclass(frozen=True)
class Packed:
    """A container that was replaced. `before` is estimated from a sample of its items."""

    path: str
    kind: str
    items: int
    before: int
    after: int
    note: str = ""


@dataclass(frozen=True)
class Refused:
    """A large container that was left as it is, and why."""

    path: str
    kind: str
    items: int
    size: int
    reason: str


@dataclass
class PackReport:
    """What `pack` did. ``print`` shows it as text."""

    packed: list[Packed] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)

    @property
    def saved(self) -> int:
        """About how many bytes this process saves; each worker saves up to the sum of `before`."""
        return sum(one.before - one.after for one in self.packed)

    def __str__(self) -> str:
        lines = []
        for done in self.packed:
            lines.append(
                f"packed   {done.path}: {done.kind} of {done.items:,}, "
                f"{in_words(done.before)} → {in_words(done.after)}"
            )
            if done.note:
                lines.append(f"         {done.note}")
        for left in self.refused:
            lines.append(
                f"left     {left.path}: {left.kind} of {left.items:,}, {in_words(left.size)}"
            )
            lines.append(f"         {left.reason}")
        if not lines:
            return f"nothing to pack: no container of Python objects has {in_words(LARGE)} or more"
        if self.packed:
            each = sum(one.before for one in self.packed)
            lines.append(
                f"saved {in_words(self.saved)} here, and up to {in_words(each)} in every worker"
            )
        return "\n".join(lines)


def pack(dataset: Any, *, minimum: int = LARGE, trust: Iterable[str] = ()) -> PackReport:
    """Replace large lists and dicts among a dataset's attributes by packed ones, where it is safe.

    Looks at the attributes of the dataset, of datasets inside it (``Subset.dataset``,
    ``ConcatDataset.datasets``) and of its own objects. Call it before the loader is made.

    >>> class Paths:
    ...     def __init__(self):
    ...         self.samples = [(f"/data/{number:07d}.jpg", number % 10) for number in range(20000)]
    ...
    >>> dataset = Paths()
    >>> import holdfast
    >>> report = holdfast.pack(dataset)
    >>> type(dataset.samples).__name__, dataset.samples[-1]
    ('PackedList', ('/data/0019999.jpg', 9))

    Args:
        minimum: bytes below which a container is left alone.
        trust: paths, as the report names them (``"dataset.samples"``), of containers that you know
            are not changed and not needed elsewhere. The two checks that read the code and count
            references are skipped for them.
    """
    if isinstance(trust, str):
        trust = (trust,)
    trusted = set(trust)
    report = PackReport()
    if isinstance(dataset, (list, dict)) and (size := deep_size(dataset)) >= minimum:
        kind = "PackedDict" if isinstance(dataset, dict) else "PackedList"
        reason = f"it is the dataset itself, which cannot be replaced from here: {kind}(dataset)"
        report.refused.append(
            Refused("dataset", type(dataset).__name__, len(dataset), size, reason)
        )
        return report
    candidates = list(large_containers(dataset, minimum=minimum))
    unknown = trusted - {place.path for one in candidates for place in one.places}
    if unknown:
        known = ", ".join(one.path for one in candidates) or "none"
        raise ValueError(
            f"trust={sorted(unknown)!r} names no large container of this dataset. There are: "
            f"{known}"
        )
    for candidate in candidates:
        checked = not any(place.path in trusted for place in candidate.places)
        outcome = _pack_one(candidate, checked)
        (report.packed if isinstance(outcome, Packed) else report.refused).append(outcome)  # type: ignore[arg-type]
    return report


def _pack_one(candidate: Candidate, checked: bool) -> Packed | Refused:
    items, size = candidate.items, candidate.size
    kind = candidate.kind

    def refused(reason: str) -> Refused:
        return Refused(candidate.path, kind, items, size, reason)

    reason = _unsuitable(candidate.places[0].read(), size)
    if reason is None and checked:
        reason = _changed(candidate) or _held_elsewhere(candidate)
    if reason is not None:
        return refused(reason)
    value = candidate.places[0].read()
    elsewhere = _items_held_elsewhere(value)
    try:
        packed: Any = PackedDict(value) if isinstance(value, dict) else PackedList(value)
    except Exception as error:  # whatever a user's __reduce__ raises
        return refused(f"it cannot be stored: {error}")
    if packed.pickled > items // 10:
        return refused(
            f"{packed.pickled:,} of its values are objects that would be unpickled at every "
            f"access ({_example(value)}). Keep their fields in tuples or dicts, or pack it "
            f"yourself: {type(packed).__name__}(...)"
        )
    if packed.nbytes > 0.9 * size:
        return refused(f"it would not become smaller ({in_words(packed.nbytes)})")
    reason = _differs(value, packed) or _replace(candidate, packed)
    if reason is not None:
        return refused(reason)
    notes = filter(None, (_note(packed), elsewhere))
    return Packed(candidate.path, kind, items, size, packed.nbytes, "; ".join(notes))


def _unsuitable(value: Any, size: int) -> str | None:
    kind = type(value)
    if kind is tuple:
        return "it is a tuple, and a packed list never equals a tuple. Make it a list first"
    if isinstance(value, (set, frozenset)):
        return "a set has no packed form. A sorted PackedList, or a PackedDict, may do"
    if isinstance(value, np.ndarray):
        return "it is an array of Python objects. Make it a list first, with .tolist()"
    if kind not in (list, dict):
        return f"it is a {kind.__qualname__}, not a plain {kind.__mro__[-2].__name__}"
    if size > _PER_OBJECT * object_count(value):
        return (
            "it is a few large arrays or strings, not many small objects: their contents are not "
            "copied by forked workers anyway"
        )
    return None


def _changed(candidate: Candidate) -> str | None:
    for place in candidate.places:
        for owner, attribute in place.chain:
            method = unreadable(owner)
            if method is not None:
                return (
                    f"the source of {owner.__qualname__}.{method} cannot be read, and it might "
                    f"change this container. If you know that it does not: trust={place.path!r}"
                )
            change = changes(owner).get(attribute)
            if change is not None:
                does = "asks for its type" if change.only_asks else "changes it"
                return (
                    f"{owner.__qualname__}.{change.method} {does} "
                    f"(line {change.line}: {change.code.splitlines()[0]})"
                )
    return None


def _references(read: Callable[[], Any]) -> int:
    value = read()
    return sys.getrefcount(value)


def _held_elsewhere(candidate: Candidate) -> str | None:
    """Another reference would keep its memory alive, and would no longer be the same list."""
    alone = SimpleNamespace(value=[])
    ours = _references(lambda: alone.value) - 1 + len(candidate.places)
    if _references(candidate.places[0].read) <= ours:
        return None
    holders = ", ".join(_holders(candidate)) or "a local variable of a function"
    return (
        f"it is also held by {holders}, and would stay in memory. Delete that reference first "
        f"or, if the container is not changed there: trust={candidate.places[0].path!r}"
    )


def _items_held_elsewhere(value: Any) -> str:
    """A note if the items are in another container too, and so stay in memory."""
    alone: list[list[int]] = [[]]
    usual = max(sys.getrefcount(item) for item in alone)
    items = value.values() if isinstance(value, dict) else value
    counts = [
        sys.getrefcount(item)
        for item in islice(items, _COMPARED)
        if isinstance(item, (list, dict, tuple))
    ]
    held = sum(count > usual for count in counts)
    if 2 * held <= len(counts):
        return ""
    return "its items are in another container too, and stay in memory as long as that one exists"


def _holders(candidate: Candidate) -> Iterator[str]:
    value = candidate.places[0].read()
    attributes = {name for place in candidate.places for _, name in place.chain}
    for holder in gc.get_referrers(value):
        if isinstance(holder, FrameType):
            if holder.f_code.co_filename != __file__:
                yield f"a variable in {holder.f_code.co_name}()"
        elif isinstance(holder, dict):
            names = [name for name, held in holder.items() if held is value]
            if "__name__" in holder and "__loader__" in holder:
                yield f"{holder['__name__']}.{names[0]}"
            elif not attributes.intersection(names):
                yield f"a dict (under {names[0]!r})" if names else "a dict"
        elif isinstance(holder, (list, tuple)):
            yield f"a {type(holder).__name__}"


def _example(value: Any) -> str:
    first = next(iter(value.values() if isinstance(value, dict) else value))
    return f"such as a {type(first).__qualname__}"


def _differs(value: Any, packed: Any) -> str | None:
    """Why the packed container is not the same as the original, from a sample of it."""
    keys: Any = list(value) if isinstance(value, dict) else range(len(value))
    chosen = random.Random(0).sample(range(len(keys)), min(len(keys), _COMPARED))
    for at in {0, len(keys) - 1, *chosen}:
        key = keys[at]
        if not _same(value[key], packed[key]):
            return (
                f"item {key!r} ({type(value[key]).__qualname__}) would not come out equal to what "
                "went in"
            )
    return None


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray):
        equal = np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
        return one.dtype == other.dtype and bool(equal)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())
    return bool(one == other) or (one != one and other != other)


def _replace(candidate: Candidate, packed: Any) -> str | None:
    """Put it in every place, or in none."""
    before = candidate.places[0].read()
    done: list[Location] = []
    try:
        for place in candidate.places:
            place.write(packed)
            done.append(place)
            if place.read() is not packed:
                raise TypeError("it was set, but reading it returns another object")
    except Exception as error:  # a property, a frozen dataclass, a tuple
        for place in done:
            place.write(before)
        return f"{candidate.path} cannot be set: {error}"
    return None


def _note(packed: Any) -> str:
    values = packed.values() if isinstance(packed, PackedDict) else packed
    if isinstance(values[0], (list, dict, np.ndarray, torch.Tensor)):
        kind = type(values[0]).__name__
        return f"each access returns a new {kind}, so changes to it are not kept"
    return ""
