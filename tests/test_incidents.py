"""What a loader keeps of what went wrong."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import pytest

import holdfast
from holdfast.autopsy.incident import Incident
from holdfast.engine.deaths import remedies
from holdfast.runtime import Runtime
from tests.support.processes import eventually

pytestmark = pytest.mark.timeout(60, method="thread")


def incident(worker: int, action: str = "replaced") -> Incident:
    return Incident("killed", worker, 1, "SIGKILL", -9, None, None, None, "idle", "", action, 0.0)


class Watched(deque[Incident]):
    """Another iterator's thread tells of an incident between two steps of a thread that reads this."""

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if self.other is not None and found is self.old:
            self.other.start()
            self.other.join(0.2)
        return found

    old: Incident | None = None
    other: threading.Thread | None = None


def test_an_incident_is_amended_in_its_place_while_another_thread_adds_one_to_a_full_list() -> None:
    kept = Watched((incident(number) for number in range(5)), maxlen=5)
    runtime = Runtime()
    runtime.incidents = kept
    kept.old, new = kept[2], incident(2, "amended")
    late = incident(9)
    kept.other = threading.Thread(target=runtime.note, args=(None, late))
    runtime.amend(None, kept.old, new, "")
    kept.other.join()
    assert [(one.worker_id, one.action) for one in list(kept)] == [
        (1, "replaced"),
        (2, "amended"),
        (3, "replaced"),
        (4, "replaced"),
        (9, "replaced"),
    ]


def test_a_worker_that_the_program_ends_is_said_to_be_and_no_other_sender_is_looked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with holdfast.DataLoader(range(40), num_workers=2) as loader:
        iterator = iter(loader)
        seen = next(iterator).tolist()
        assert iterator._workers[1].pid is not None
        iterator._workers[1].terminate()
        assert eventually(lambda: len(loader.incidents) == 1)
        seen += [int(batch) for batch in iterator]
        (told,) = loader.incidents
    assert seen == list(range(40))
    assert (told.cause, told.confidence) == ("ended-on-request", "high")
    assert "was ended because the program itself asked for it (SIGKILL)" in str(told)
    said = told.report() + caplog.text
    assert "terminate() or kill()" in said
    assert not any(word in said for word in ("journalctl", "auditctl", "sacct", "outside"))


@pytest.mark.parametrize("recovery", ["auto", "state", "replay"])
def test_nobody_is_told_to_set_what_is_set(recovery: Any) -> None:
    commands = [one.command for one in remedies(recovery)]
    assert any("detshuffle" in one for one in commands)
    assert any('iterable_recovery="state"' in one for one in commands) is (recovery != "state")
