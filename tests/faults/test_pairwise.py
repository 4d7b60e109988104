"""Every pair of values of any two columns of the table, once at least (`make test-all`).

The rows stand in `pairs.txt`: to find so few of them takes seconds, which every test process would spend. After a change
of the columns, `python -m tests.faults.test_pairwise` writes them anew.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from tests.faults.causes import CAUSES
from tests.faults.datasets import KINDS
from tests.faults.pairwise import cover
from tests.faults.scenario import check, perform
from tests.faults.table import PHASES, Case, marked

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(120, method="thread")]

# These stand for what the kernel or the engine treats alike; each of the others occurs once.
CHOSEN = [
    "SIGKILL",
    "segfault",
    "SIGABRT",
    "os._exit(0)",
    "SIGKILL with a child left",
    "hang",
    "SIGSTOP",
    "SIGTERM",
    "ValueError",
    "KeyboardInterrupt",
    "no descriptor free",
]
COLUMNS: dict[str, list[Any]] = {
    "cause": CHOSEN,
    "phase": list(PHASES),
    "method": ["fork", "spawn", "forkserver"],
    "kind": list(KINDS),
    "persistent": [False, True],
    "payload": [0, 20_000, 200_000, 20_000_000],
}
FREE: dict[str, list[Any]] = {"thread": ["main", "other"], "workers": [1, 2, 4]}


def _others() -> list[Case]:
    dice = random.Random(0)
    found = []
    for cause in sorted(set(CAUSES) - set(CHOSEN)):
        columns = {**COLUMNS, **FREE, "cause": [cause], "phase": ["sample"], "method": ["fork"]}
        case = None
        while case is None or not case.possible:
            case = Case(**{name: dice.choice(values) for name, values in columns.items()})
        found.append(case)
    return found


def _rows() -> list[Case]:
    rows = cover(
        COLUMNS, lambda row: Case(**row).possible, FREE, cheap=lambda row: row["method"] == "fork"
    )
    return [Case(**row) for row in rows]


def _case(line: str) -> Case:
    """What `str` of a case says."""
    cause, phase, method, kind, *more = line.split(" | ")
    given: dict[str, Any] = {}
    for name, _, value in (one.partition(" ") for one in more):
        given[name] = int(value) if value.isdigit() else value or True
    return Case(cause, phase, method, kind, **given)


FILE = Path(__file__).with_name("pairs.txt")
CASES = [_case(line) for line in FILE.read_text().splitlines()]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=marked(case)) for case in CASES]
)
def test_pair(case: Case, tmp_path: Path) -> None:
    check(case, perform(case, tmp_path))


def test_the_cover_is_complete() -> None:
    """Every two values that can occur together do so in some row."""
    columns = {**COLUMNS, **FREE}
    for one, two in itertools.combinations(columns, 2):
        met = {(getattr(case, one), getattr(case, two)) for case in CASES}
        for x, y in itertools.product(columns[one], columns[two]):
            assert (x, y) in met or not _can_meet({one: x, two: y}), (one, x, two, y)
    assert {case.cause for case in CASES} == set(CAUSES)
    assert all(case.possible for case in CASES)


def _can_meet(given: dict[str, Any]) -> bool:
    rest = {name: values for name, values in COLUMNS.items() if name not in given}
    return any(
        Case(**given, **dict(zip(rest, values, strict=True))).possible
        for values in itertools.product(*rest.values())
    )


def test_the_rows_on_file_are_those_that_are_found() -> None:
    assert [str(case) for case in CASES] == [str(case) for case in _rows() + _others()]


if __name__ == "__main__":
    FILE.write_text("".join(f"{case}\n" for case in _rows() + _others()))
