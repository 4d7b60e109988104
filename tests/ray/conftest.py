"""A real Ray cluster of several nodes on this machine, for all tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/ray/" in str(item.path):
            item.add_marker(pytest.mark.ray)


STORE = 120 << 20  # bytes of an object store


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A head without processors, to which the trainer belongs, and one node with two."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ["RAY_DEDUP_LOGS"] = "0"
    made = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": STORE}
    )
    made.add_node(num_cpus=2, object_store_memory=STORE)
    ray.init(address=made.address, log_to_driver=False)
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.fixture(autouse=True)
def nobody_left_behind() -> None:
    """In place of the check for processes: those of a cluster come and go by themselves.
    `test_a_closed_loader_leaves_no_actor` looks for ours."""
