"""The tables of docs/frameworks: every cell links to a test that exists, and no case is left out."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

from tests.frameworks import test_examples, test_ranks, test_trainings

FOLDER = Path(__file__).parents[2] / "docs" / "frameworks"
CELL = re.compile(r"\[(?P<words>[^\]]+)\]\((?P<path>\S+) \"(?P<case>[^\"]+)\"\)")
NOT_POSSIBLE = "PyG makes these loaders itself"


def cases(module: Any) -> set[str]:
    """The names that pytest gives to the cases of all tests of a module."""
    found = set()
    for name, function in vars(module).items():
        if name.startswith("test_"):
            marks = [
                one for one in getattr(function, "pytestmark", []) if one.name == "parametrize"
            ]
            values = [[_name(value) for value in mark.args[1]] for mark in marks]
            found |= {"-".join(case) for case in itertools.product(*values) if case}
    return found


def _name(value: Any) -> str:
    return value if isinstance(value, str) else "-".join(value)


def test_every_cell_of_the_tables_is_a_test_and_every_test_has_a_cell() -> None:
    tests = {
        "tests/frameworks/test_trainings.py": cases(test_trainings),
        "tests/frameworks/test_ranks.py": cases(test_ranks),
    }
    linked: dict[str, set[str]] = {name: set() for name in tests}
    examples = {path.resolve() for path in test_examples.EXAMPLES}
    shown = set()
    lines = (FOLDER / "README.md").read_text().splitlines()
    rows = [line for line in lines if CELL.search(line)]
    for row in rows:
        title, *cells, example = row.strip("| ").split(" | ")
        assert re.fullmatch(r"\[.+\]\(\w+\.md\)", title), row
        for cell in cells:
            if cell == NOT_POSSIBLE:
                continue
            match = CELL.fullmatch(cell)
            assert match is not None, cell
            path = (FOLDER / match["path"]).resolve().relative_to(FOLDER.parents[1])
            assert match["case"] in tests[str(path)], cell
            linked[str(path)].add(match["case"])
        match = CELL.fullmatch(example)
        assert match is not None, example
        shown.add((FOLDER / match["path"]).resolve())
        assert shown <= examples
    assert linked == tests
    assert shown == examples


def test_every_page_names_a_complete_program() -> None:
    pages = sorted(FOLDER.glob("*.md"))
    assert len(pages) > 8
    for page in pages:
        assert "examples/frameworks/" in page.read_text(), page
