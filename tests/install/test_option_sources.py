"""Which options hold for a loader: its own, what is installed, the environment's, the default."""

from __future__ import annotations

import copy
import logging
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data

import holdfast
from holdfast import option_sources, private_names
from holdfast.run_report import logged_run
from tests.contract.test_frameworks import arguments_from_attributes
from tests.support.datasets import Numbers

STOCK = torch.utils.data.DataLoader


@pytest.fixture(autouse=True)
def nothing_said_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    option_sources._say_it_has_no_effect.cache_clear()
    option_sources._mention_misspelt.cache_clear()
    for name in option_sources.DEFAULTS:
        monkeypatch.delenv(f"HOLDFAST_{name.upper()}", raising=False)
    yield
    holdfast.uninstall()


def options(loader: Any) -> dict[str, Any]:
    return holdfast.of(loader).options


RIGHT = [
    ("MAX_RESTARTS", "7", "max_restarts", 7),
    ("MAX_RESTARTS", "20, 300", "max_restarts", (20, 300)),
    ("MAX_RESTARTS", "auto", "max_restarts", "auto"),
    ("MAX_RESTARTS", "none", "max_restarts", None),
    ("STALL_TIMEOUT", "2.5", "stall_timeout", 2.5),
    ("STALL_TIMEOUT", "None", "stall_timeout", None),
    ("ON_BAD_SAMPLE", "skip", "on_bad_sample", "skip"),
    ("MAX_BAD_SAMPLES", "10", "max_bad_samples", 10),
    ("MAX_BAD_SAMPLES", "0.01", "max_bad_samples", 0.01),
    ("MAX_BAD_SAMPLES", "inf", "max_bad_samples", math.inf),
    ("QUARANTINE", "bad.jsonl", "quarantine", "bad.jsonl"),
    ("LOGBOOK", "runs/today", "logbook", "runs/today"),
    ("MEMORY_BUDGET", "2GiB", "memory_budget", "2GiB"),
    ("MEMORY_BUDGET", "1000000", "memory_budget", 1000000),
    ("WORKER_MEMORY_LIMIT", "none", "worker_memory_limit", None),
    ("NAME", "train", "name", "train"),
    ("ITERABLE_RECOVERY", "replay", "iterable_recovery", "replay"),
    ("PIN_IN_PLACE", "8GiB", "pin_in_place", "8GiB"),
    ("SEEDING", "sample", "seeding", "sample"),
    ("WORKER_METHOD", "thread", "worker_method", "thread"),
    ("RAY_OPTIONS", '{"num_cpus": 2}', "ray_options", {"num_cpus": 2}),
    ("SEEDING", "sample, 1234", "seeding", ("sample", 1234)),
]


@pytest.mark.parametrize(("variable", "text", "name", "value"), RIGHT)
def test_every_option_can_be_given_in_the_environment(
    variable: str, text: str, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_ON_BAD_SAMPLE", "replace")
    if name == "ray_options":
        monkeypatch.setenv("HOLDFAST_WORKER_METHOD", "ray")
    monkeypatch.setenv(f"HOLDFAST_{variable}", text)
    for loader in (holdfast.DataLoader([1]), STOCK([1])):  # type: ignore[arg-type]
        found = options(loader)[name]
        assert found == value
        assert type(found) is type(value)


def test_every_option_is_among_them() -> None:
    assert {name for _, _, name, _ in RIGHT} == set(option_sources.DEFAULTS)


@pytest.mark.parametrize(
    ("variable", "text", "right"),
    [
        ("MAX_RESTARTS", "many", "a pair is written as 20,300"),
        ("MAX_RESTARTS", "1,2,3", "a pair is written as 20,300"),
        ("STALL_TIMEOUT", "soon", "it takes a number of seconds above 0"),
        ("STALL_TIMEOUT", "-1", "it takes a number of seconds above 0"),
        ("ON_BAD_SAMPLE", "ignore", 'it takes "raise", "skip", "replace"'),
        ("MAX_BAD_SAMPLES", "1.5", "a fraction above 0 and below 1"),
        ("LOGBOOK", __file__, "is a file; it takes the path of a folder"),
        ("MEMORY_BUDGET", "much", 'a text such as "2GiB"'),
        ("WORKER_MEMORY_LIMIT", "0", "a number of bytes above 0"),
        ("NAME", "a\nb", "it takes a name for messages"),
        ("ITERABLE_RECOVERY", "Auto", 'it takes "auto"'),
    ],
)
def test_a_wrong_one_is_named_with_its_variable_its_value_and_what_would_be_right(
    variable: str, text: str, right: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"HOLDFAST_{variable}", text)
    for use in (holdfast.install, lambda: holdfast.DataLoader([1])):
        with pytest.raises(ValueError) as caught:
            use()
        assert str(caught.value).startswith(f"HOLDFAST_{variable}={text!r} ")
        assert right in str(caught.value)


def test_without_a_quick_look_at_the_environment_each_variable_is_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(private_names, "_raw_environment", None)
    assert option_sources.from_environment() == {}
    monkeypatch.setenv("HOLDFAST_NAME", "train")
    assert option_sources.from_environment() == {"name": "train"}


def test_an_empty_variable_is_none_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_STALL_TIMEOUT", " ")
    assert options(holdfast.DataLoader([1])) == option_sources.DEFAULTS


def test_a_misspelt_variable_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOLDFAST_ON_BAD_SAMPLES", "skip")
    monkeypatch.setenv("HOLDFAST_SOMETHING_ELSE", "1")
    for _ in range(2):
        holdfast.DataLoader([1])
    assert [record.getMessage() for record in caplog.records] == [
        "HOLDFAST_ON_BAD_SAMPLES is not an option of holdfast; did you mean HOLDFAST_ON_BAD_SAMPLE?"
    ]


def test_a_loaders_own_come_first_then_installed_ones_then_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOLDFAST_STALL_TIMEOUT", "1")
    monkeypatch.setenv("HOLDFAST_MAX_RESTARTS", "1")
    monkeypatch.setenv("HOLDFAST_NAME", "one")
    mine = holdfast.DataLoader([1], name="three")
    with holdfast.install(stall_timeout=2, name="two"):
        assert [options(mine)[name] for name in ("max_restarts", "stall_timeout", "name")] == [
            1,
            2,
            "three",
        ]
        assert options(STOCK([1]))["name"] == "two"  # type: ignore[arg-type]
    assert options(mine)["stall_timeout"] == 1
    mine.stall_timeout = 5
    assert options(mine)["stall_timeout"] == 5


DEFAULTS: list[tuple[str, Any]] = [
    ("max_restarts", "auto"),
    ("stall_timeout", 300.0),
    ("on_bad_sample", "raise"),
    ("memory_budget", "auto"),
    ("worker_memory_limit", "auto"),
    ("iterable_recovery", "auto"),
]
OTHERS: dict[str, Any] = {
    "max_restarts": 3,
    "stall_timeout": 4,
    "on_bad_sample": "skip",
    "memory_budget": 5,
    "worker_memory_limit": 6,
    "iterable_recovery": "replay",
}


@pytest.mark.parametrize(("name", "default"), DEFAULTS)
@pytest.mark.parametrize(
    "duplicate",
    [
        lambda loader: loader,
        copy.copy,
        copy.deepcopy,
        lambda loader: pickle.loads(pickle.dumps(loader)),
        lambda loader: type(loader)(**arguments_from_attributes(loader)),
    ],
    ids=["itself", "copy", "deepcopy", "pickle", "rebuilt"],
)
def test_a_default_that_was_given_is_told_apart_from_one_that_was_not(
    name: str, default: Any, duplicate: Any
) -> None:
    given = duplicate(holdfast.DataLoader(Numbers(2), **{name: default}))
    not_given = duplicate(holdfast.DataLoader(Numbers(2)))
    assert getattr(given, name) == getattr(not_given, name) == default
    with holdfast.install(**OTHERS):
        assert options(given)[name] == default
        assert options(not_given)[name] == OTHERS[name]


def test_what_belongs_to_bad_samples_is_left_out_where_they_raise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """A list for all loaders of a program does no harm to one that is to raise."""
    quarantine = str(tmp_path / "bad.jsonl")
    with holdfast.install(on_bad_sample="skip", quarantine=quarantine):
        loader = holdfast.DataLoader(Numbers(2), on_bad_sample="raise")
        assert options(loader)["quarantine"] is None
        assert len(list(loader)) == 2
        assert options(holdfast.DataLoader(Numbers(2)))["quarantine"] == quarantine
    assert not caplog.records
    monkeypatch.setenv("HOLDFAST_QUARANTINE", quarantine)
    for _ in range(2):
        assert options(holdfast.DataLoader(Numbers(2)))["quarantine"] is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "HOLDFAST_QUARANTINE has no effect where" in record.getMessage()
    assert "Set HOLDFAST_ON_BAD_SAMPLE=skip or replace" in record.getMessage()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"stall_timeout": "x"}, "stall_timeout='x' is of the wrong type; it takes"),
        ({"on_bad_sample": "sikp"}, "on_bad_sample='sikp' is not one of the words"),
        ({"quarantine": "bad.jsonl"}, "has no meaning with on_bad_sample"),
        ({"max_restart": 3}, "no option 'max_restart'; did you mean 'max_restarts'"),
        ({"batch_size": 3}, "no option 'batch_size'; it takes max_restarts, stall_timeout, "),
        ({"on_bad_sample": "skip", "quarantine": "/no/such/folder/x"}, "there is no folder"),
    ],
)
def test_install_says_what_is_wrong_and_installs_nothing(given: Any, words: str) -> None:
    torchs = STOCK.__iter__
    with pytest.raises((TypeError, ValueError)) as caught:
        holdfast.install(**given)
    assert words in str(caught.value)
    assert STOCK.__iter__ is torchs


def test_a_logbook_that_cannot_be_made_ends_a_run_only_if_it_is_the_loaders_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "book"
    with holdfast.install(logbook=folder):
        for _ in range(2):
            assert len(list(STOCK(Numbers(2)))) == 2
    assert len(caplog.records) == 1
    assert "cannot be made" in caplog.text
    with pytest.raises(OSError, match="cannot be made"):
        list(holdfast.DataLoader(Numbers(2), logbook=folder))


def test_a_logbook_says_what_options_held(tmp_path: Path) -> None:
    with holdfast.install(logbook=tmp_path, stall_timeout=9):
        list(STOCK(Numbers(2), batch_size=2))
    (run,) = holdfast_logbook(tmp_path)
    assert run["options"]["stall_timeout"] == 9
    assert run["options"]["batch_size"] == 2
    assert run["options"]["dataset"] == "Numbers"


def holdfast_logbook(folder: Path) -> list[dict[str, Any]]:

    return logged_run.read(folder).runs
