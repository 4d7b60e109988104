"""docs/options.md and docs/no-code-change.md: every option is in their tables."""

from __future__ import annotations

import re
from pathlib import Path

from holdfast.option_sources import DEFAULTS, PREFIX

DOCS = Path(__file__).parents[2] / "docs"


def first_cells(page: str, pattern: str) -> set[str]:
    return set(re.findall(rf"^\| `({pattern})` \|", (DOCS / page).read_text(), re.MULTILINE))


def test_each_option_has_a_row_and_no_row_is_of_another() -> None:
    assert first_cells("options.md", r"\w+") == set(DEFAULTS)


def test_each_option_is_in_the_list_of_variables() -> None:
    listed = first_cells("no-code-change.md", rf"{PREFIX}\w+")
    assert listed == {PREFIX + name.upper() for name in DEFAULTS}
