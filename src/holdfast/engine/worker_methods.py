"""Which kind of worker a loader gets, and how batches are pinned: the only place where `engine`
imports a driver."""

from __future__ import annotations

from typing import Any, Literal

from holdfast.engine.driver import WorkerMethod
from holdfast.engine.pinning import CopyToPinned, Pinner
from holdfast.options import WorkerMethodName
from holdfast.worker.interface import Blueprint

__all__ = ["new_pinner", "worker_method"]


def worker_method(name: WorkerMethodName, blueprint: Blueprint, context: Any) -> WorkerMethod:
    """The workers of a loader with this ``worker_method`` and ``multiprocessing_context``. Runs
    code of the user: under spawn the dataset is pickled here."""
    # Imported here: a platform that lacks what one kind of worker needs can have another.
    if name == "thread":
        from holdfast.threads.method import ThreadMethod

        return ThreadMethod(blueprint)
    from holdfast.processes.method import ProcessMethod

    return ProcessMethod(blueprint, context)


def new_pinner(
    device: str | None, index: int, in_place: int | Literal["auto"] | None, whose: str
) -> Pinner:
    """What pins batches for this device. `in_place`: the option ``pin_in_place``; `whose` stands
    before what is logged."""
    if in_place is None:
        return CopyToPinned(device, index)
    from holdfast.processes.pinning_in_place import pinner

    return pinner(device, index, in_place, whose)
