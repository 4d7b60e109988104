"""A plain script ends as it ends with torch: the same status, the same output, nothing else on standard error, and no
process of it left."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.scripts import stock
from tests.scripts.play import play
from tests.scripts.table import SIZES, TABLE, Script
from tests.support.loaders import THOROUGH

RUNS = [
    pytest.param(
        script, size, id=f"{script}, {size}", marks=() if size == script.quick else pytest.mark.slow
    )
    for script in TABLE
    for size in SIZES
]


@pytest.mark.parametrize(("script", "size"), RUNS)
def test_a_script_ends_as_with_torch(script: Script, size: str, tmp_path: Path) -> None:
    if script.right is None:
        expected = stock.answer(script, size, tmp_path / "stock")
    else:
        expected = stock.Answer(*script.right, ())
    mine = tmp_path / "holdfast"
    mine.mkdir()
    found = play(script, "holdfast", size, mine)
    assert not list((Counter(found.err) - Counter((*expected.err, *script.more))).elements()), (
        found.raw_err
    )
    assert (found.code, found.out) == (expected.code, expected.out), found.raw_err
    assert not found.left


@pytest.mark.slow
@pytest.mark.skipif(not THOROUGH, reason="the record is looked at by `make test-all`")
@pytest.mark.parametrize(("script", "size"), RUNS)
def test_the_record_says_what_torch_does(script: Script, size: str, tmp_path: Path) -> None:
    """Where torch's own end is a race, or wrong, there is nothing to record."""
    known = stock.recorded().get((script.name, size))
    if known is None or script.right is not None:
        pytest.skip("nothing is recorded")
    assert stock.asked(script, size, tmp_path / "stock") == known
