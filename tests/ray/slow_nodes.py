"""Nodes of an autoscaler that take long to come: other raylets on this machine. Ray's monitor imports this."""

from __future__ import annotations

import time
from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider

__all__ = ["SlowNodes"]


class SlowNodes(FakeMultiNodeProvider):  # type: ignore[misc]
    """Its configuration says how many `seconds` a node takes."""

    def create_node_with_resources_and_labels(self, *order: Any) -> None:
        time.sleep(self.provider_config["seconds"])
        super().create_node_with_resources_and_labels(*order)
