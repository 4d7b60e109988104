"""The statistics of a scan: made of a batch in the worker, added up in the main process.

Nothing here grows with the number of samples. Quantiles come from histograms whose bins are 2 %
wide, so they are accurate to 1 %. Only the indices of the slowest and largest samples, and the
first few odd ones of each kind, are kept. As JSON a tally is text, numbers and lists, and can be
read back to continue a scan.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from holdfast.samples.bad_sample import BadSample
from holdfast.samples.batch_outlier import Form, difference
from holdfast.samples.policy import group_of

SHOWN: Final = 10  # slowest, largest
EXAMPLES: Final = 5
MOST_FORMS: Final = 300
MOST_CAUSES: Final = 300
CHANNELS: Final = 4  # a side no longer than this is a number of channels, not a size
_STEP: Final = math.log(1.02)
_NOTHING: Final = -(10**6)  # the bin of zero


class SampleReading(NamedTuple):
    """What is kept of a good sample."""

    key: int  # its index
    seconds: float
    nbytes: int
    form: Form
    drew: bool | None = None  # random numbers; None if not checked
    same: bool | None = None  # when loaded twice; None if not checked or not comparable


@dataclass
class Spread:
    """The distribution of a quantity over the samples."""

    bins: Counter[int] = field(default_factory=Counter)
    top: list[tuple[float, int]] = field(default_factory=list)  # value and index, largest first

    @classmethod
    def of(cls, values: Sequence[float], indices: Sequence[int]) -> Spread:
        numbers = np.asarray(values, float)
        with np.errstate(divide="ignore"):
            places = np.floor(np.log(numbers) / _STEP)
        places[numbers <= 0] = _NOTHING
        found, counts = np.unique(places.astype(int), return_counts=True)
        bins = Counter(dict(zip(found.tolist(), counts.tolist(), strict=True)))
        pairs = zip(numbers.tolist(), indices, strict=True)
        return cls(bins, _largest(pairs))

    def add(self, other: Spread) -> None:
        self.bins.update(other.bins)
        self.top = _largest([*self.top, *other.top])

    def quantile(self, part: float) -> float:
        """The value that `part` of the samples do not exceed."""
        total = sum(self.bins.values())
        if not total:
            return 0.0
        passed = 0
        for place in sorted(self.bins):
            passed += self.bins[place]
            if passed >= part * total:
                middle = 0.0 if place == _NOTHING else math.exp((place + 0.5) * _STEP)
                return min(middle, self.most)
        raise AssertionError("unreachable")

    @property
    def is_flat(self) -> bool:
        """Whether the largest values are no larger than most."""
        return all(value == self.most for value, _ in self.top) and self.quantile(0.5) > (
            0.97 * self.most
        )

    @property
    def most(self) -> float:
        return self.top[0][0] if self.top else 0.0

    def to_json(self) -> dict[str, Any]:
        return {"bins": sorted(self.bins.items()), "top": self.top}

    @classmethod
    def from_json(cls, fields: Any) -> Spread:
        bins = {int(place): int(count) for place, count in fields["bins"]}
        return cls(Counter(bins), [(float(value), int(index)) for value, index in fields["top"]])


def _largest(pairs: Iterable[tuple[float, int]]) -> list[tuple[float, int]]:
    """The `SHOWN` largest; the lower index first if values are equal."""
    return heapq.nsmallest(SHOWN, pairs, key=lambda pair: (-pair[0], pair[1]))


@dataclass
class Examples:
    """How many samples, and the first few indices."""

    count: int = 0
    first: list[int] = field(default_factory=list)

    def include(self, index: int) -> None:
        self.count += 1
        if len(self.first) < EXAMPLES:
            self.first.append(index)

    def add(self, other: Examples) -> None:
        self.count += other.count
        self.first = sorted([*self.first, *other.first])[:EXAMPLES]

    @classmethod
    def from_json(cls, fields: Any) -> Examples:
        return cls(int(fields["count"]), [int(index) for index in fields["first"]])


class Odd(NamedTuple):
    """Samples that differ from the usual form in the same way."""

    how: str
    examples: Examples


@dataclass
class Forms:
    """Which types, shapes and dtypes occur, up to `MOST_FORMS` of them."""

    by_form: dict[Form, Examples] = field(default_factory=dict)
    beyond: Examples = field(default_factory=Examples)  # samples of all further forms

    def include(self, form: Form, index: int) -> None:
        self._examples(form).include(index)

    def add(self, other: Forms) -> None:
        for form, examples in other.by_form.items():
            self._examples(form).add(examples)
        self.beyond.add(other.beyond)

    def _examples(self, form: Form) -> Examples:
        found = self.by_form.get(form)
        if found is None:
            if len(self.by_form) >= MOST_FORMS:
                return self.beyond
            found = self.by_form[form] = Examples()
        return found

    def usual(self) -> Form | None:
        """The form of at least half of the samples, if there is one."""
        total = sum(one.count for one in self.by_form.values()) + self.beyond.count
        form = max(self.by_form, key=lambda one: self.by_form[one].count, default=None)
        return form if form is not None and 2 * self.by_form[form].count >= total else None

    def odd(self) -> list[Odd]:
        """Samples of unusual forms, most frequent first; empty if no form is usual."""
        usual = self.usual()
        if usual is None:
            return []
        others = [
            Odd(difference(form, usual).replace("'*'", "*"), examples)
            for form, examples in self.by_form.items()
            if form != usual
        ]
        others.sort(key=lambda one: -one.examples.count)
        if self.beyond.count:
            others.append(Odd("it differs in yet other ways", self.beyond))
        return others

    def to_json(self) -> dict[str, Any]:
        forms = [[form, dataclasses.asdict(one)] for form, one in self.by_form.items()]
        return {"forms": forms, "beyond": dataclasses.asdict(self.beyond)}

    @classmethod
    def from_json(cls, fields: Any) -> Forms:
        by_form = {_tuples(form): Examples.from_json(one) for form, one in fields["forms"]}
        return cls(by_form, Examples.from_json(fields["beyond"]))


def _tuples(form: Any) -> Any:
    return tuple(_tuples(part) for part in form) if isinstance(form, list) else form


def without_sizes(form: Form) -> Form:
    """The form with a star for each side that is a size and not a number of channels."""
    if form[0] in ("tensor", "array") and len(form) == 3:
        sides = tuple("*" if side > CHANNELS or len(form[2]) == 1 else side for side in form[2])
        return (form[0], form[1], sides)
    if len(form) == 3:
        return (form[0], form[1], tuple((key, without_sizes(part)) for key, part in form[2]))
    return form


@dataclass
class Causes:
    """Bad samples by what they did and where, with the first few of each."""

    groups: dict[str, list[BadSample]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def include(self, bad: BadSample) -> None:
        key = f"{group_of(bad)} {bad.digest}"
        if key not in self.groups and len(self.groups) >= MOST_CAUSES:
            key = group_of(bad) if group_of(bad) in self.groups else "others"
        self.counts[key] += 1
        first = self.groups.setdefault(key, [])
        if len(first) < EXAMPLES:
            first.append(dataclasses.replace(bad, traceback=""))

    def ranked(self) -> list[tuple[int, list[BadSample]]]:
        return [(count, self.groups[key]) for key, count in self.counts.most_common()]

    def to_json(self) -> list[Any]:
        return [
            {"key": key, "count": count, "first": [bad.to_json() for bad in self.groups[key]]}
            for key, count in self.counts.most_common()
        ]

    @classmethod
    def from_json(cls, groups: Any) -> Causes:
        causes = cls()
        for group in groups:
            key = str(group["key"])
            causes.counts[key] = int(group["count"])
            causes.groups[key] = [BadSample.from_json(bad) for bad in group["first"]]
        return causes


@dataclass
class Tally:
    """The statistics of all samples seen so far."""

    good: int = 0
    bad: int = 0
    seconds: Spread = field(default_factory=Spread)
    nbytes: Spread = field(default_factory=Spread)
    forms: Forms = field(default_factory=Forms)
    rough_forms: Forms = field(default_factory=Forms)
    causes: Causes = field(default_factory=Causes)
    still: Examples = field(default_factory=Examples)  # drew no random numbers
    restless: Examples = field(default_factory=Examples)  # differed on a second load
    opaque: Examples = field(default_factory=Examples)  # could not be compared

    @classmethod
    def of(cls, readings: Iterable[SampleReading]) -> Tally:
        """The tally of the good samples of one batch."""
        found = list(readings)
        indices = [one.key for one in found]
        tally = cls(
            good=len(found),
            seconds=Spread.of([one.seconds for one in found], indices),
            nbytes=Spread.of([one.nbytes for one in found], indices),
        )
        rough: dict[Form, Form] = {}
        for one in found:
            form = one.form
            tally.forms.include(form, one.key)
            if form not in rough:
                rough[form] = without_sizes(form)
            tally.rough_forms.include(rough[form], one.key)
            if one.drew is None:
                continue
            if not one.drew:
                tally.still.include(one.key)
            if one.same is None:
                tally.opaque.include(one.key)
            elif not one.same:
                tally.restless.include(one.key)
        return tally

    def add(self, other: Tally, bad: Iterable[BadSample]) -> None:
        """Add a batch: the tally of its good samples, and its bad samples."""
        self.good += other.good
        for name in _PARTS:
            getattr(self, name).add(getattr(other, name))
        for one in bad:
            self.bad += 1
            self.causes.include(one)

    @property
    def seen(self) -> int:
        return self.good + self.bad

    def odd(self) -> list[Odd]:
        """Odd samples by full form; by form without sizes if no full form is usual."""
        return self.forms.odd() if self.forms.usual() is not None else self.rough_forms.odd()

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"good": self.good, "bad": self.bad}
        for name in (*_PARTS, "causes"):
            part = getattr(self, name)
            fields[name] = (
                dataclasses.asdict(part) if isinstance(part, Examples) else part.to_json()
            )
        return fields

    @classmethod
    def from_json(cls, fields: Any) -> Tally:
        parts = {name: kind.from_json(fields[name]) for name, kind in _PARTS.items()}
        causes = Causes.from_json(fields["causes"])
        return cls(good=int(fields["good"]), bad=int(fields["bad"]), causes=causes, **parts)


_PARTS: Final[dict[str, Any]] = {
    "seconds": Spread,
    "nbytes": Spread,
    "forms": Forms,
    "rough_forms": Forms,
    "still": Examples,
    "restless": Examples,
    "opaque": Examples,
}
