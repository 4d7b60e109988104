"""A small set of rows in which every possible pair of values of any two columns occurs."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
_Pair = tuple[int, Any, int, Any]
_TRIES = 40


def cover(
    columns: Mapping[str, Sequence[Any]],
    possible: Callable[[Row], bool],
    free: Mapping[str, Sequence[Any]],
    cheap: Callable[[Row], bool] = lambda row: True,
    seed: int = 0,
) -> list[Row]:
    """Greedy: for each pair not yet covered, the row with most new pairs among some random ones.

    `possible` is asked about every combination of `columns`; those of `free` go with everything.
    Between rows that cover as many new pairs, a `cheap` one is taken.
    """
    dice = random.Random(seed)
    names = [*columns, *free]
    rows = [
        values
        for values in itertools.product(*columns.values())
        if possible(dict(zip(columns, values, strict=True)))
    ]
    having: dict[tuple[int, Any], list[tuple[Any, ...]]] = defaultdict(list)
    for row in rows:
        for place, value in enumerate(row):
            having[place, value].append(row)
    missing: dict[_Pair, None] = {}  # in the order they are met, which a set would not keep
    for row in rows:
        missing.update(dict.fromkeys(_pairs(row)))
    for place, values in enumerate(free.values(), len(columns)):
        for other, others in enumerate([*columns.values(), *free.values()][:place]):
            for x, y in itertools.product(others, values):
                if other >= len(columns) or having[other, x]:
                    missing[other, x, place, y] = None

    def worth(row: tuple[Any, ...]) -> tuple[int, bool]:
        return sum(one in missing for one in _pairs(row)), cheap(dict(zip(names, row, strict=True)))

    found = []
    for pair in list(missing):
        if pair not in missing:
            continue
        candidates = [_made(pair, having, rows, free, len(columns), dice) for _ in range(_TRIES)]
        best = max(candidates, key=worth)
        for one in _pairs(best):
            missing.pop(one, None)
        found.append(dict(zip(names, best, strict=True)))
    return found


def _made(
    pair: _Pair,
    having: Mapping[tuple[int, Any], list[tuple[Any, ...]]],
    rows: list[tuple[Any, ...]],
    free: Mapping[str, Sequence[Any]],
    width: int,
    dice: random.Random,
) -> tuple[Any, ...]:
    """A random row with that pair in it."""
    one, x, two, y = pair
    pool = having[one, x] if one < width else rows
    row = dice.choice(pool)
    while two < width and row[two] != y:
        row = dice.choice(pool)
    more = [dice.choice(values) for values in free.values()]
    for place, value in ((one, x), (two, y)):
        if place >= width:
            more[place - width] = value
    return (*row, *more)


def _pairs(row: tuple[Any, ...]) -> list[_Pair]:
    return [
        (one, row[one], two, row[two]) for one, two in itertools.combinations(range(len(row)), 2)
    ]
