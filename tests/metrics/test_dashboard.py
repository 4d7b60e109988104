"""The dashboard in docs/ asks for figures that exist, and is built as Grafana's dashboards are.

It is not loaded into a Grafana here; `test_dashboard_schema.py` compares it with Grafana's schema.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from holdfast.metrics.readings import COUNTERS, GAUGES, LABELS

FILE = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"
SERIES = {f"holdfast_{name}_total" for name in COUNTERS} | {f"holdfast_{name}" for name in GAUGES}
WIDTH = 24  # columns of Grafana's grid


@pytest.fixture(scope="module")
def board() -> Any:
    return json.loads(FILE.read_text(encoding="utf-8"))


def test_every_query_is_of_a_series_that_is_exported(board: Any) -> None:
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"holdfast_\w+", query)}
    assert asked <= SERIES
    assert SERIES - asked == {"holdfast_epochs_total"}
    for query in queries:
        assert re.findall(r"[{,]\s*(\w+)=~", query) == list(LABELS), query
        assert query.count("(") == query.count(")")
        counter = "_total" in query and "bad_samples" not in query
        assert not counter or re.search(r"\b(rate|increase)\(holdfast_", query), query


def test_every_panel_has_what_grafana_wants_and_a_place_of_its_own(board: Any) -> None:
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= set(board)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        assert panel["type"] in ("stat", "timeseries")
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < WIDTH
        taken |= cells


def test_every_variable_that_is_used_is_defined(board: Any) -> None:
    defined = {one["name"] for one in board["templating"]["list"]}
    own = {"__rate_interval", "__range", "__all"}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(board)))
    assert used - own == defined == {"source", *LABELS}
