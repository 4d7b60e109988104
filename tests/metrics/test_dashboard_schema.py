"""The dashboard in docs/ against Grafana's own schema: the types that Grafana generates from it and
publishes as `@grafana/schema`, checked by the TypeScript compiler. ``make test-dashboard`` fetches
both with npm, and runs this."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"
MODULES = Path(os.environ.get("GRAFANA_MODULES", "not given"))
PANELS = "@grafana/schema/dist/types/raw/composable/{}/panelcfg/x/types.gen"

pytestmark = [
    pytest.mark.grafana,
    pytest.mark.skipif(not MODULES.exists(), reason="GRAFANA_MODULES is not set"),
]

# A word of JSON is that of an enumeration; a panel's options are completed by Grafana.
HEAD = """
import type {Dashboard, Panel} from "@grafana/schema/dist/types/raw/dashboard/x/types.gen";
import type {DataQuery, GraphFieldConfig} from "@grafana/schema";
type Plain<T> = T extends string ? `${T}`
  : T extends Array<infer U> ? Array<Plain<U>>
  : T extends object ? {[K in keyof T]: Plain<T[K]>} : T;
type Some<T> = T extends Array<infer U> ? Array<Some<U>>
  : T extends object ? {[K in keyof T]?: Some<T[K]>} : T;
type Query = Plain<DataQuery> & {expr: string; legendFormat?: string};
"""


def typescript(board: Any) -> str:
    """A program that is right if the dashboard is."""
    program = [HEAD]
    for kind in sorted({panel["type"] for panel in board["panels"]}):
        program.append(f'import type {{Options as {kind}}} from "{PANELS.format(kind)}";')
    program.append(f"export const board: Plain<Dashboard> = {json.dumps(board)};")
    for panel in board["panels"]:
        name, custom = panel["id"], panel["fieldConfig"]["defaults"].get("custom", {})
        program += [
            f"export const panel{name}: Plain<Panel> = {json.dumps(panel)};",
            f"export const options{name}: Some<Plain<{panel['type']}>> = {json.dumps(panel['options'])};",
            f"export const custom{name}: Some<Plain<GraphFieldConfig>> = {json.dumps(custom)};",
            f"export const queries{name}: Query[] = {json.dumps(panel['targets'])};",
        ]
    return "\n".join(program)


def complaints(board: Any, folder: Path) -> str:
    (folder / "check.ts").write_text(typescript(board), encoding="utf-8")
    (folder / "node_modules").symlink_to(MODULES.resolve())
    compiler = folder / "node_modules" / "typescript" / "bin" / "tsc"
    flags = ["--strict", "--noEmit", "--skipLibCheck", "--module", "esnext"]
    ended = subprocess.run(
        ["node", str(compiler), *flags, "--moduleResolution", "node10", "check.ts"],
        cwd=folder, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert (ended.returncode == 0) == (ended.stdout == ""), ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture
def board() -> Any:
    return json.loads(FILE.read_text(encoding="utf-8"))


def test_the_dashboard_is_as_grafanas_schema_wants_it(board: Any, tmp_path: Path) -> None:
    assert complaints(board, tmp_path) == ""


@pytest.mark.parametrize(
    "spoil",
    [
        lambda board: board.update(tittle="holdfast"),
        lambda board: board["time"].update(to=5),
        lambda board: board["panels"][0]["gridPos"].pop("w"),
        lambda board: board["panels"][0]["options"].update(colorMode="pink"),
        lambda board: board["panels"][-1]["fieldConfig"]["defaults"].update(unit=7),
        lambda board: board["panels"][-1]["targets"][0].pop("refId"),
        lambda board: board["templating"]["list"][0].update(type="sauce"),
    ],
)
def test_a_dashboard_that_is_not_is_refused(
    spoil: Callable[[Any], Any], board: Any, tmp_path: Path
) -> None:
    spoiled = copy.deepcopy(board)
    spoil(spoiled)
    assert "error TS" in complaints(spoiled, tmp_path)
