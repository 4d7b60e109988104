"""Actors of a Ray cluster as a kind of worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.engine.driver import DriverOptions
from holdfast.engine.events import Limits
from holdfast.worker.interface import Blueprint
from holdfast.worker.pickling import explain_pickle_error

try:
    import ray
    from ray import cloudpickle
except ImportError as error:
    raise ImportError(
        'worker_method="ray" needs Ray, which is not installed here; install it with '
        "pip install 'holdfast[ray]'"
    ) from error

OLDEST = (2, 60)
if tuple(int(part) for part in ray.__version__.split(".")[:2]) < OLDEST:
    raise ImportError(
        f'worker_method="ray" needs Ray 2.60 or later, and {ray.__version__} is installed here; '
        "install a later one with pip install --upgrade 'holdfast[ray]'"
    )

from holdfast.ray.cluster import connect  # noqa: E402
from holdfast.ray.ray_driver import RayDriver, check_options  # noqa: E402

LIMITS = Limits(
    kill_after=3.0,
    abandon_after=5.0,
    check_interval=2.0,
    first_pause=0.5,
    longest_test_pause=60.0,  # Ray may take a second to say that an actor has died
    depth=256,  # a call takes milliseconds, and has to bring many small batches
    ahead_bytes=16 << 20,
)
SHARE_OF_STORE = 0.3  # of the smallest object store: beyond that Ray begins to spill to disk


class RayMethod:
    """Implements `WorkerMethod`."""

    name = "ray"

    def __init__(self, blueprint: Blueprint, options: Mapping[str, Any] | None) -> None:
        """Connects to Ray, on this machine if the user has not called ``ray.init()``. The blueprint
        is pickled and put into the object store here, once for all workers."""
        self.limits = LIMITS
        self._options = dict(options or {})
        check_options(self._options)
        if not ray.is_initialized():
            connect()
        self.room = _room()
        self._blueprint = ray.put(_pickled(blueprint))

    def driver(self, options: DriverOptions) -> RayDriver:
        return RayDriver(self._blueprint, self._options, self.limits, options)

    def called(self, worker: int) -> str:
        return f"worker actor {worker} (Ray)"


def _pickled(blueprint: Blueprint) -> NDArray[np.uint8]:
    """As bytes: arrays that Ray takes out of a pickle arrive read-only, and datasets change
    theirs."""
    try:
        return np.frombuffer(cloudpickle.dumps(blueprint), np.uint8)
    except Exception as error:
        explain_pickle_error(error, blueprint, cloudpickle.dumps)
        raise


def _room() -> int | None:
    """How many bytes of batches may be in flight without filling an object store."""
    stores = [
        int(node["Resources"]["object_store_memory"])
        for node in ray.nodes()
        if node["Alive"] and "object_store_memory" in node["Resources"]
    ]
    return int(SHARE_OF_STORE * min(stores)) if stores else None
