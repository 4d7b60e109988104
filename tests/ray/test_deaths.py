"""What Ray says of a death, and what is made of it: without a cluster."""

from __future__ import annotations

from typing import Any

import pytest

ray = pytest.importorskip("ray")

from holdfast.autopsy.catalogue import CATALOGUE  # noqa: E402
from holdfast.autopsy.evidence import Evidence  # noqa: E402
from holdfast.autopsy.verdict import judge  # noqa: E402
from holdfast.ray.cluster import describe_death  # noqa: E402
from holdfast.ray.ray_driver import _Seat, check_options  # noqa: E402
from ray import exceptions  # noqa: E402


@pytest.mark.parametrize(
    ("error", "cause", "memory"),
    [
        (
            exceptions.OutOfMemoryError("worker killed by the memory monitor"),
            "ray-out-of-memory",
            True,
        ),
        (exceptions.NodeDiedError("gone"), "ray-node-lost", False),
        (exceptions.ActorUnavailableError("no answer", b"0" * 16), "ray-node-lost", False),
        (exceptions.ActorDiedError(), "ray-actor-died", False),
    ],
)
def test_each_error_of_ray_is_a_cause(error: Exception, cause: str, memory: bool) -> None:
    death = describe_death(error)
    assert (death.cause, death.facts.get("memory", False)) == (cause, memory)
    assert cause in CATALOGUE
    verdict = judge(
        Evidence(ray_cause=cause, said_by_ray=death.reason, actor="a1", node="n1 on host")
    )
    assert verdict.cause == cause
    assert "it was actor a1 on node n1 on host" in verdict.because


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ({}, "actor a1, which has ended"),
        ({"worker": object()}, "actor a1, which waits for its start"),
        (
            {"worker": object(), "born": True},
            "actor a1, whose process has started and is not ready yet",
        ),
        (
            {"worker": object(), "node": "n1 on host", "pid": 7},
            "actor a1 on node n1 on host, pid 7 there",
        ),
    ],
    ids=["ended", "ordered", "started", "ready"],
)
def test_of_where_an_actor_is_nothing_is_said_that_is_not_known(known: Any, words: str) -> None:
    assert _Seat(actor_id="a1", **known).place() == words


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"num_cpu": 1}, ValueError, "Invalid option keyword num_cpu"),
        ({"num_cpus": "2"}, TypeError, "num_cpus"),
        ({"scheduling_strategy": "SPRED"}, ValueError, "SPREAD"),
        ({"resources": {"CPU": 1}}, ValueError, "num_cpus"),
    ],
    ids=["name", "type", "word", "resource"],
)
def test_options_that_ray_does_not_know_are_an_error_that_names_the_argument(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as raised:
        check_options(options)
    assert str(raised.value).startswith(f"ray_options={options!r}: ")
