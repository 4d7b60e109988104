"""docs/causes is what the catalogue says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from holdfast.autopsy.catalogue import CATALOGUE

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "causes"


def _program() -> Any:
    spec = importlib.util.spec_from_file_location("causes", ROOT / ".ci" / "causes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


causes = _program()


def test_the_pages_are_those_of_the_catalogue() -> None:
    assert causes.differences(FOLDER) == [], "run: make causes"


def test_there_is_a_page_for_every_cause() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} == {*CATALOGUE, "README"}


def test_a_changed_or_left_over_page_is_noticed_and_mended(tmp_path: Path) -> None:
    causes.write(tmp_path)
    (tmp_path / "abort.md").write_text("something else")
    (tmp_path / "gone.md").write_text("left over")
    (tmp_path / "cow-growth.md").unlink()
    assert causes.differences(tmp_path) == ["abort.md", "cow-growth.md", "gone.md"]
    result = CliRunner().invoke(causes.main, ["--check", str(tmp_path)])
    assert result.exit_code == 1
    assert "3 pages differ" in result.output
    assert CliRunner().invoke(causes.main, [str(tmp_path)]).exit_code == 0
    assert causes.differences(tmp_path) == []
