"""A real Ray cluster of several nodes on this machine, for all tests of this folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from tests.support.processes import eventually

LIMIT = 120  # seconds for a test; then its process ends, and the cluster with it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/ray/" in str(item.path):
            item.add_marker(pytest.mark.ray)
            # Not by a signal: Ray waits in native code, where none is seen.
            item.add_marker(pytest.mark.timeout(LIMIT, method="thread"))


STORE = 120 << 20  # bytes of an object store
# A node that is gone is noticed within four seconds; Ray's own values are for real networks.
QUICKLY = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 8,
}


class Nodes:
    """The cluster: a head without processors, to which the trainer belongs, and one node with
    two."""

    def __init__(self) -> None:
        import ray
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "object_store_memory": STORE, "_system_config": QUICKLY}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            self.cluster.add_node(num_cpus=2, object_store_memory=STORE)
            ray.init(address=self.cluster.address, log_to_driver=False)
        except BaseException:
            self.cluster.shutdown()
            raise

    @property
    def head(self) -> Any:
        return self.cluster.head_node

    def add(self, **options: Any) -> Any:
        """Another node, which actors can be placed on."""
        from ray._private.state import available_resources_per_node

        node = self.cluster.add_node(object_store_memory=STORE, **options)
        _await(lambda: node.node_id in available_resources_per_node())
        return node

    def remove(self, node: Any) -> None:
        """Kill it, without a word to the head."""
        self.cluster.remove_node(node, allow_graceful=False)

    def await_gone(self, node: Any) -> None:
        """Until the head knows that the node is gone: else it would place actors there."""
        import ray

        _await(lambda: node.node_id not in [n["NodeID"] for n in ray.nodes() if n["Alive"]])

    def shutdown(self) -> None:
        import ray

        ray.shutdown()
        self.cluster.shutdown()


def _await(condition: Callable[[], bool]) -> None:
    assert eventually(condition, 30), "the head has not noticed"


@pytest.fixture(scope="session", autouse=True)
def folder() -> Iterator[str]:
    """Where clusters put their logs and sockets, also those of programs that a test starts."""
    made = tempfile.mkdtemp(prefix="hf-ray-", dir="/tmp")  # short, because of the sockets
    os.environ["RAY_TMPDIR"] = made
    os.environ["RAY_AUTH_MODE"] = "disabled"  # no token in the home folder
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="session")
def cluster(folder: str) -> Iterator[Nodes]:
    made = Nodes()
    try:
        yield made
    finally:
        made.shutdown()


class Spots:
    """Nodes for two actors each, which take turns. `options` place actors there."""

    options: ClassVar = {"num_cpus": 0, "resources": {"spot": 1}}

    def __init__(self, cluster: Nodes) -> None:
        self._cluster = cluster
        self._node: Any = None
        self._removed: list[Any] = []

    def add(self, **options: Any) -> None:
        self._node = self._cluster.add(num_cpus=0, resources={"spot": 2}, **options)

    def remove(self) -> None:
        """As when a machine is preempted."""
        node, self._node = self._node, None
        self._removed.append(node)
        self._cluster.remove(node)

    def close(self) -> None:
        if self._node is not None:
            self.remove()
        for node in self._removed:
            self._cluster.await_gone(node)


@pytest.fixture
def spots(cluster: Nodes) -> Iterator[Spots]:
    made = Spots(cluster)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(autouse=True)
def no_process_left_behind() -> None:
    """In place of the check for processes: those of a cluster come and go by themselves.
    `test_a_closed_loader_leaves_no_actor` looks for ours."""
