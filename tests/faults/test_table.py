"""Every row of the table: what a user must see."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.scenario import check, perform
from tests.faults.table import ROWS, Case, marked

pytestmark = [pytest.mark.faults, pytest.mark.timeout(60, method="thread")]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
@pytest.mark.parametrize(
    ("case", "outcome"),
    [pytest.param(case, outcome, id=str(case), marks=marked(case)) for case, outcome in ROWS],
)
def test_row(case: Case, outcome: str, tmp_path: Path) -> None:
    assert case.possible
    assert case.outcome == outcome, "the table and its rule disagree"
    check(case, perform(case, tmp_path))
