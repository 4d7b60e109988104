"""Real runs in a real control group with a limit.

Under it stock torch loses its run, for four different reasons; holdfast finishes, with the stream
that stock torch has where there is no limit. The trainer is never the victim. The limit is what a
run needs at rest, measured, and half of what stock torch piles up: see `runs`.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.shortage.datasets import KINDS, MIB, WORKERS, Large
from tests.shortage.runs import limit_for, rest, run
from tests.shortage.trainer import stream
from tests.support.groups import memory_group

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(200),
    pytest.mark.usefixtures("memory_groups"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind == "Leaking" else pytest.mark.slow) for kind in KINDS],
)
def test_a_run_that_would_not_fit_goes_through_with_the_same_stream(kind: str) -> None:
    limit = limit_for(kind)
    with memory_group(limit) as group:
        done = run(["-m", "tests.shortage.trainer", "holdfast", kind], group)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["hash"] == stream("torch", kind)[0]
    assert done.left == []
    check_what_helped(kind, told["stats"], done.kills, room=limit - rest(kind))


def check_what_helped(kind: str, stats: dict[str, Any], kills: int, room: int) -> None:
    """Each kind has its own cure. Half of what piles up does not fit, so it was given back."""
    if kind == "Leaking" or kind == "CopyOnWrite":
        assert stats["recycled"] >= WORKERS
        assert kills == 0
    elif kind == "Cyclic":  # collected in time, by workers that live on
        assert (stats["recycled"], stats["restarts"], kills) == (0, 0, 0)
    else:
        assert kind == "Large", f"what helps {kind}?"
        batch = Large.batch * Large.weighs * MIB
        assert kills == 0
        assert batch < stats["largest_batch_bytes"] <= stats["most_in_flight_bytes"] <= room


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_stock_torch_does_not_survive_there(kind: str) -> None:
    """Or the test above would prove nothing."""
    with memory_group(limit_for(kind)) as group:
        done = run(["-m", "tests.shortage.trainer", "torch", kind], group)
    assert done.returncode != 0, done.stdout
    assert done.kills > 0, done.stderr
