"""The language of HOLDFAST_FAULTS."""

from __future__ import annotations

import pytest

from holdfast.worker.faults import VARIABLE, Fault, Faults, parse


def test_a_fault_says_where_what_and_when() -> None:
    assert parse("before-send:SIGKILL@worker=0,task=3; after-ready:exit=4@generation=any") == [
        Fault("before-send", "SIGKILL", worker=0, task=3, generation=0),
        Fault("after-ready", "exit=4", generation=None),
    ]


@pytest.mark.parametrize("text", ["", " ; ", "before-send:SIGKILL@worker=7"])
def test_nothing_for_a_worker_is_no_fault(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, text)
    assert Faults.asked_for(worker=0, generation=0) is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nowhere:SIGKILL", "no point 'nowhere'"),
        ("before-send:SIGNOPE", "no action 'SIGNOPE'"),
        ("before-send:SIGKILL@colour=red", "no condition colour"),
    ],
)
def test_a_mistake_is_quoted(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse(text)


def test_a_fault_strikes_only_whom_it_is_meant_for() -> None:
    fault = Fault("before-send", "raise", worker=1, task=3)
    Faults([fault], worker=0, generation=0).strike("before-send", 3)
    Faults([fault], worker=1, generation=1).strike("before-send", 3)
    faults = Faults([fault], worker=1, generation=0)
    faults.strike("after-send", 3)
    faults.strike("before-send", 2)
    with pytest.raises(RuntimeError, match="on demand"):
        faults.strike("before-send", 3)
