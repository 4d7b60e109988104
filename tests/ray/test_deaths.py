"""What Ray says of a death, and what is made of it: without a cluster."""

from __future__ import annotations

import pytest

ray = pytest.importorskip("ray")

from holdfast.autopsy.catalogue import CATALOGUE  # noqa: E402
from holdfast.autopsy.evidence import Evidence  # noqa: E402
from holdfast.autopsy.verdict import judge  # noqa: E402
from holdfast.ray.cluster import describe_death  # noqa: E402
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
