"""``loader.stats()`` and ``loader.incidents``: a dict and a list that can be read."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import holdfast
from holdfast.autopsy.incident import Incident
from holdfast.readable import SHOWN, Figures, Incidents
from tests.support.datasets import Numbers


def incident(**fields: Any) -> Incident:
    return Incident(
        **{
            "kind": "killed",
            "worker_id": 1,
            "pid": 4711,
            "signal": "SIGKILL",
            "exitcode": -9,
            "batch": 3,
            "sample": "<script>alert(1)</script>",
            "position": 0,
            "step": "fetch",
            "stack": 'File "<b>.py"',
            "action": "replaced",
            "time": 0.0,
            "because": ("<i>reason</i>",),
        }
        | fields
    )


def test_figures_are_a_dict_and_shown_in_units() -> None:
    loader = holdfast.DataLoader(Numbers(4), memory_budget=None)
    list(loader)
    figures = loader.stats()
    assert isinstance(figures, dict)
    assert json.loads(json.dumps(figures)) == dict(figures) == figures
    assert copy.copy(figures) == pickle.loads(pickle.dumps(figures)) == figures
    lines = dict(line.split(maxsplit=1) for line in repr(figures).splitlines())
    assert list(lines) == list(figures)
    assert (lines["batches"], lines["budget_bytes"]) == ("4", "no limit")
    shown = repr(Figures(bytes=3 << 30, wait_seconds=1234.5, batches=10_000))
    assert shown.split() == [
        "bytes",
        "3.0",
        "GiB",
        "wait_seconds",
        "1,234.50",
        "s",
        "batches",
        "10,000",
    ]


def test_incidents_are_a_list_and_shown_one_a_line() -> None:
    assert holdfast.DataLoader(Numbers(4)).incidents == [] == Incidents()
    assert repr(Incidents()) == "no incidents"
    assert Incidents()._repr_html_() == "<p>no incidents</p>"
    two = Incidents([incident(), incident(worker_id=2)])
    assert repr(two) == f"{two[0]}\n{two[1]}"
    many = Incidents([incident(worker_id=number) for number in range(SHOWN + 5)])
    assert repr(many).splitlines()[0] == "… and 5 before these"
    assert len(repr(many).splitlines()) == SHOWN + 1
    assert many._repr_html_().count("<details>") == SHOWN


def test_what_a_sample_or_a_stack_contains_is_text_in_a_notebook() -> None:
    page = Incidents([incident(loader="<u>", action="<em>")])._repr_html_()
    for tag in ("<script", "<b>", "<i>", "<u>", "<em>"):
        assert tag not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "&lt;i&gt;reason" in page
    assert "<x>" not in Figures({"<x>": 1})._repr_html_()
