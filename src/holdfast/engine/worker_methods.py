"""Which kind of worker a loader gets, and how batches are pinned: the only place where `engine`
imports a driver.

Everything is imported with this module, and not when it is first used: a process that has no
descriptor left, or has given up its rights, cannot import anything later.
"""

from __future__ import annotations

import sys
from typing import Any, Literal

from holdfast.engine.driver import WorkerMethod
from holdfast.engine.pinning import CopyToPinned, Pinner
from holdfast.options import Settings
from holdfast.threads.thread_method import ThreadMethod
from holdfast.worker.interface import Blueprint

if sys.platform == "linux":  # elsewhere these cannot be imported, and `iteration` asks for neither
    from holdfast.processes import pinning_in_place
    from holdfast.processes.process_method import ProcessMethod


def worker_method(options: Settings, blueprint: Blueprint, context: Any) -> WorkerMethod:
    """The workers of a loader with these options and ``multiprocessing_context``. Runs code of the
    user: under spawn, and for Ray, the dataset is pickled here."""
    if options.worker_method == "ray":
        from holdfast.ray.ray_method import RayMethod  # Ray need not be installed

        return RayMethod(blueprint, options.ray_options)
    if options.worker_method == "thread":
        return ThreadMethod(blueprint)
    return ProcessMethod(blueprint, context)


def new_pinner(
    device: str | None, index: int, in_place: int | Literal["auto"] | None, whose: str
) -> Pinner:
    """What pins batches for this device. `in_place`: the option ``pin_in_place``; `whose` stands
    before what is logged."""
    if in_place is None:
        return CopyToPinned(device, index)
    return pinning_in_place.pinner(device, index, in_place, whose)
