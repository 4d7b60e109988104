"""docs/architecture.md: its list of files is that of the package, its diagrams are as they are drawn."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import holdfast
from holdfast.engine import events

PACKAGE = Path(holdfast.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
UNSAID = {"__init__.py"}


def listed() -> set[str]:
    """Every file and folder the list names, with the folder it is in."""
    found: set[str] = set()
    folder = ""
    block = PAGE.read_text().split("```")[1]
    for line in block.splitlines()[2:]:
        indented = len(line) - len(line.lstrip())
        names = re.findall(r"\b[a-z_]+\.py\b|\b[a-z_]+/", line)
        if indented == 2 and line.rstrip().endswith("/"):
            folder = names[0]
            continue
        if indented == 2:
            folder = ""
        if names and names[0].endswith("/"):  # and what is in it that deserves a word
            found.add(folder + names[0])
            names = [names[0] + name for name in names[1:]]
        found.update(folder + name for name in names)
    return found


def test_every_module_is_in_the_list_and_nothing_else() -> None:
    named = listed()
    folders = {name for name in named if name.endswith("/")}
    modules = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")}
    apart = {one for one in modules if not any(one.startswith(folder) for folder in folders)}
    assert {one for one in apart if Path(one).name not in UNSAID} - named == set()
    assert {one for one in named - folders if not (PACKAGE / one).exists()} == set()


def test_the_diagrams_are_those_that_make_pictures_draws(tmp_path: Path) -> None:
    program = PAGE.parents[1] / ".ci" / "diagrams.py"
    subprocess.run([sys.executable, str(program), str(tmp_path)], check=True, timeout=60)
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert sorted(drawn) == ["batch.svg", "benchmark.svg", "death.svg", "processes.svg"]
    for name, text in drawn.items():
        assert (PAGE.parent / "images" / name).read_text(encoding="utf-8") == text
        page = PAGE.with_name("comparison.md") if name == "benchmark.svg" else PAGE
        assert f"](images/{name})" in page.read_text(encoding="utf-8")
        for one in re.findall(r"\b[A-Z][a-z]+[A-Z][a-z]+\b", text):  # events and actions
            assert hasattr(events, one), one
