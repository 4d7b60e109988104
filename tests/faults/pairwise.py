"""A small set of rows in which every possible pair of values of any two columns occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def cover(
    columns: Mapping[str, Sequence[Any]], possible: Callable[[Row], bool], seed: int = 0
) -> list[Row]:
    """Greedy: take an uncovered pair, fill in the other columns so that most new pairs are covered.

    A pair for which no possible row is found in many random tries counts as impossible.
    """
    dice = random.Random(seed)
    names = list(columns)
    open_pairs = {
        ((one, x), (two, y))
        for one, two in itertools.combinations(names, 2)
        for x in columns[one]
        for y in columns[two]
    }
    rows: list[Row] = []
    for pair in sorted(open_pairs, key=repr):
        if pair not in open_pairs:
            continue
        best: Row | None = None
        gain = 0
        found = 0
        for _ in range(2000):
            row = {name: dice.choice(columns[name]) for name in names}
            row.update(pair)
            if not possible(row):
                continue
            found += 1
            new = len(_pairs(row, names) & open_pairs)
            if new > gain:
                best, gain = row, new
            if found >= 40:
                break
        if best is None:
            open_pairs.discard(pair)
        else:
            rows.append(best)
            open_pairs -= _pairs(best, names)
    return rows


def _pairs(row: Row, names: Sequence[str]) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return {((one, row[one]), (two, row[two])) for one, two in itertools.combinations(names, 2)}
