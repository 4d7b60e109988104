"""README: what it says of holdfast is a test, and what it says of other loaders was measured."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMPARISON = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
TEST = re.compile(r"\[(?P<words>[^\]]+)\]\((?P<path>tests/\S+)(?: \"(?P<name>[^\"]*)\")?\)")
PICTURES = sorted((ROOT / "docs" / "images").glob("*.svg"))


def rows(text: str) -> list[list[str]]:
    """The first table of a text, without its rule."""
    lines = text.split("\n| ", 1)[1].split("\n\n")[0].splitlines()
    table = [line.strip("| ").split(" | ") for line in lines]
    return [table[0], *table[2:]]


def table() -> list[list[str]]:
    return rows(README.partition("## What holds")[2])


def test_a_reader_with_an_error_message_finds_the_way_first() -> None:
    headings = re.findall(r"^## (.+)$", README, re.MULTILINE)
    assert headings[0] == "I have the error message now"
    assert len(README.split("## ")[0].splitlines()) <= 6, "what it is, in three lines"
    assert "make demo" in README
    assert "make test" in README


def test_every_cell_of_ours_and_every_claim_leads_to_a_test() -> None:
    links = list(TEST.finditer(README))
    ours = [row[1] for row in table()[1:]]
    assert len(ours) >= 5
    assert all(TEST.fullmatch(cell) for cell in ours), ours
    assert len(links) > 10
    for link in links:
        tree = ast.parse((ROOT / link["path"]).read_text(encoding="utf-8"))
        tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert link["name"] in tests, link[0]


def test_what_is_said_of_other_loaders_was_measured() -> None:
    """The page is written by `python -m benchmarks.faults`."""
    measured = rows("\n" + COMPARISON.partition("<!-- faults: begin -->")[2])
    assert [name.replace("&shy;", "") for name in table()[0]] == [row[0] for row in measured[1:]]
    said = {
        "ends": "ends",
        "hangs": "hangs",
        "none left": "none left",
        "processes left": r"\d+ processes left",
    }
    for number, row in enumerate(table()[1:5], start=1):
        seen = [loader[number] for loader in measured[1:]]
        assert re.match("goes on|none left", seen[0])
        for cell, outcome in zip(row[2:], seen[1:], strict=True):
            words = cell.rstrip(" ¹²")
            assert re.match(said[words], outcome), (row[0], cell, outcome)


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_a_picture_asks_for_nothing_from_elsewhere(picture: Path) -> None:
    text = picture.read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    assert not re.search(
        r"(href|src)=\"https?:|url\([\"']?https?:|@import|@font-face|<script", text
    )
