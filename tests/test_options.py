"""Options: which values are accepted, and the error messages for the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast import DataLoader
from holdfast.engine.events import RestartPolicy
from holdfast.options import parse


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("auto", RestartPolicy(20, 60.0)),
        (None, RestartPolicy(None, 60.0)),
        (0, RestartPolicy(0, 60.0)),
        (7, RestartPolicy(7, 60.0)),
        ((3, 10), RestartPolicy(3, 10.0)),
        ([3, 0.5], RestartPolicy(3, 0.5)),
    ],
)
def test_max_restarts(given: Any, meant: RestartPolicy) -> None:
    assert parse(max_restarts=given, stall_timeout=1, num_workers=4).restarts == meant


@pytest.mark.parametrize("given", ["5", 1.5, True, (1,), (1, 2, 3), (1, "a"), (-1, 5), -1, (1, 0)])
def test_a_wrong_max_restarts_is_named_with_its_value_and_what_would_be_right(given: Any) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        DataLoader([1], max_restarts=given)
    assert f"max_restarts={given!r}" in str(caught.value)
    assert "(20, 300)" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "meant"), [(5, 5.0), (0.5, 0.5), (None, None), (float("inf"), None)]
)
def test_stall_timeout(given: Any, meant: float | None) -> None:
    assert parse(max_restarts=1, stall_timeout=given, num_workers=1).stall_timeout == meant


@pytest.mark.parametrize("given", ["5", True, 0, -1, float("nan"), [1]])
def test_a_wrong_stall_timeout_is_named_with_its_value_and_what_would_be_right(given: Any) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        DataLoader([1], stall_timeout=given)
    assert f"stall_timeout={given!r}" in str(caught.value)
    assert "300" in str(caught.value)


@pytest.mark.parametrize("name", ["memory_budget", "worker_memory_limit"])
@pytest.mark.parametrize(
    ("given", "meant"),
    [("auto", "auto"), (None, None), (5, 5), ("2GiB", 2 << 30), ("500 MB", 500_000_000)],
)
def test_amounts_of_memory(name: str, given: Any, meant: Any) -> None:
    options: dict[str, Any] = {name: given}
    found = parse(max_restarts=None, stall_timeout=1, num_workers=1, **options)
    assert getattr(found, name) == meant
    assert getattr(DataLoader([1], **options), name) == given  # as it was given


@pytest.mark.parametrize("name", ["memory_budget", "worker_memory_limit"])
@pytest.mark.parametrize("given", [0, -1, True, 1.5, "many", "0GiB", "", b"1", [1]])
def test_a_wrong_amount_of_memory_is_named_with_what_would_be_right(name: str, given: Any) -> None:
    options: dict[str, Any] = {name: given}
    with pytest.raises((TypeError, ValueError)) as caught:
        DataLoader([1], **options)
    assert f"{name}={given!r}" in str(caught.value)
    assert "GiB" in str(caught.value)


@pytest.mark.parametrize("given", [None, "runs/today", Path("runs/today")])
def test_logbook(given: Any) -> None:
    found = parse(max_restarts=None, stall_timeout=1, num_workers=1, logbook=given).logbook
    assert found == (None if given is None else "runs/today")


@pytest.mark.parametrize("given", [3, b"x", "", __file__])
def test_a_wrong_logbook_is_named_with_what_would_be_right(given: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"logbook=.*it takes the path of a folder"):
        parse(max_restarts=None, stall_timeout=1, num_workers=1, logbook=given)
