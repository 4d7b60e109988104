"""Which kind of worker a loader gets, and how batches are pinned: the only place where `engine`
imports a driver."""

from __future__ import annotations

from typing import Any, Literal

from holdfast.engine.driver import WorkerMethod
from holdfast.engine.pinning import Pinner
from holdfast.processes import pinning_in_place
from holdfast.processes.method import ProcessMethod
from holdfast.worker.interface import Blueprint

__all__ = ["new_pinner", "worker_method"]


def worker_method(blueprint: Blueprint, context: Any) -> WorkerMethod:
    """The workers of a loader with this ``multiprocessing_context``. Runs code of the user: under
    spawn the dataset is pickled here."""
    return ProcessMethod(blueprint, context)


def new_pinner(
    device: str | None, index: int, in_place: int | Literal["auto"] | None, whose: str
) -> Pinner:
    """What pins batches for this device. `in_place`: the option ``pin_in_place``; `whose` stands
    before what is logged."""
    return pinning_in_place.pinner(device, index, in_place, whose)
