"""Worker processes as a kind of worker."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import torch

from holdfast.code_origin import users_level
from holdfast.engine.driver import DriverOptions
from holdfast.engine.events import Limits
from holdfast.processes.process_driver import ProcessDriver
from holdfast.processes.spawn import Payload, spawn_payload
from holdfast.worker.interface import Blueprint
from holdfast.worker.pickling import explain_pickle_error

LIMITS = Limits()


class ProcessMethod:
    """Implements `WorkerMethod`."""

    def __init__(self, blueprint: Blueprint, context: Any) -> None:
        """`context` is the loader's ``multiprocessing_context``. Under spawn and forkserver the
        blueprint is pickled here."""
        context = torch.multiprocessing if context is None else context
        self.name: str = context.get_start_method()
        self.limits = LIMITS
        self.room: int | None = None
        self._blueprint = blueprint
        self._payload = None if self.name == "fork" else _payload(blueprint, self.name)

    def driver(self, options: DriverOptions) -> ProcessDriver:
        return ProcessDriver(self._blueprint, self._payload, self.name, self.limits, options)

    def called(self, worker: int) -> str:
        return f"worker process {worker}"


def _payload(blueprint: Blueprint, method: str) -> Payload:
    try:
        return spawn_payload(blueprint, method)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        warnings.warn(
            "Got pickle error when attempting to start a worker Process. "
            f"The start method {method!r} requires that the dataset, collate_fn and "
            "worker_init_fn can be pickled.",
            stacklevel=users_level(),
        )
        explain_pickle_error(error, blueprint)
        raise
