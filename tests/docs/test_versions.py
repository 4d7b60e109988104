"""What is said of versions agrees: in the package, in the table of results, and in pyproject.toml."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from holdfast.versions import TRIED

pytestmark = pytest.mark.skipif(
    "HOLDFAST_VERSIONS_ARE_TRIED" in os.environ, reason="the table is being written"
)
ROOT = Path(__file__).parents[2]
PINNED = (3, 11)  # what `make test` is run with
PROJECT = (ROOT / "pyproject.toml").read_text()  # not by tomllib, which came with Python 3.11


def release(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")[:2]))


def rows() -> list[list[str]]:
    """The results of the last runs: Python, torch, NumPy, passed, failed, skipped, date."""
    page = (ROOT / "docs" / "versions.md").read_text()
    table = page.split("<!-- results")[1].split("<!-- end of results")[0]
    lines = [line for line in table.splitlines() if re.match(r"\| \d", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_releases_that_were_tried_are_those_of_the_table() -> None:
    found = rows()
    for which, column in (("Python", 0), ("torch", 1)):
        tried = [release(row[column]) for row in found]
        assert (min(tried), max(tried)) == TRIED[which]
    assert all(int(row[3]) > 1000 for row in found), "the whole suite"


def test_the_project_states_what_was_run() -> None:
    stated = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    tried = {release(row[0]) for row in rows()} | {PINNED}
    assert [release(one) for one in stated] == sorted(tried)
    oldest = ".".join(map(str, TRIED["Python"][0]))
    assert f'requires-python = ">={oldest}"' in PROJECT
    assert f'"torch>={".".join(map(str, TRIED["torch"][0]))}"' in PROJECT
