"""Every pair of values of any two columns of the table, once at least (`make test-all`)."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.faults import table
from tests.faults.causes import CAUSES, STALLS
from tests.faults.datasets import KINDS
from tests.faults.pairwise import cover
from tests.faults.scenario import check, perform
from tests.faults.table import PHASES, Case

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(120, method="thread")]

COLUMNS: dict[str, list[Any]] = {
    "cause": list(CAUSES),
    "phase": list(PHASES),
    "method": ["fork", "spawn", "forkserver"],
    "kind": list(KINDS),
    "persistent": [False, True],
    "thread": ["main", "other"],
    "payload": [0, 20_000, 200_000, 20_000_000],
    "workers": [1, 2, 4],
    "always": [False],
}
assert set(COLUMNS) == {field.name for field in fields(Case)}
# In a sample every cause occurs. Elsewhere those stand for the others that the kernel or the engine
# treats alike; otherwise the cover would be twice as large and find no more.
_AT_POINTS = {"SIGKILL", "SIGSEGV", "SIGABRT", "os._exit(0)", "os._exit(3)", "hang", "SIGSTOP", "SIGTERM"}
_OWN = {"SIGKILL", "segfault", "os._exit(0)", "hang", "ValueError", "KeyboardInterrupt", "MemoryError"}
_OWN |= {"SIGKILL with a child left", "thread left behind"}
_OUTSIDE = {"SIGKILL", "SIGSEGV", "SIGSTOP", "SIGTERM"}
_STAND_FOR_ALL = {table.POINT: _AT_POINTS, table.OWN: _OWN, table.OUTSIDE: _OUTSIDE}


def chosen(case: Case) -> bool:
    stands = case.phase == "sample" or case.cause in _STAND_FOR_ALL[case.at.by]
    return case.possible and stands


CASES = [Case(**row) for row in cover(COLUMNS, lambda row: chosen(Case(**row)))]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_pair(case: Case, tmp_path: Path) -> None:
    options: dict[str, Any] = {}
    if case.breaks.verdict == STALLS and case.method != "fork":
        options["stall_timeout"] = 6.0  # starting a spawned worker takes seconds here
    check(case, perform(case, tmp_path, **options))


def test_the_cover_is_complete() -> None:
    """Each value of each column occurs, and every cause meets every phase it can meet."""
    for name, values in COLUMNS.items():
        assert {getattr(case, name) for case in CASES} == set(values), name
    met = {(case.cause, case.phase) for case in CASES}
    for cause in CAUSES:
        for phase in PHASES:
            possible = any(
                chosen(Case(cause, phase, method, kind, persistent, payload=payload))
                for method in COLUMNS["method"]
                for kind in COLUMNS["kind"]
                for persistent in (False, True)
                for payload in (0, 200_000)
            )
            assert ((cause, phase) in met) == possible, (cause, phase)
