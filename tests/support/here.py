"""A worker that runs in the test's own process: all its parts are real, but no orders arrive."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from holdfast import kernel
from holdfast.autopsy.blackbox import BlackBoxes, Recorder
from holdfast.limits.worker_limit import Allowance
from holdfast.processes.channel import Channel, pair
from holdfast.processes.protocol import Setup
from holdfast.processes.worker_main import _WorkerProcess
from holdfast.samples.policy import Policy
from holdfast.transport.arena import Arena
from holdfast.transport.mapping import create
from holdfast.worker.housekeeping import Housekeeper
from holdfast.worker.items import Worker
from holdfast.worker.sample_seeding import NO_SEEDS
from tests.support.resources import blueprint_of

__all__ = ["worker_here"]


@contextlib.contextmanager
def worker_here(dataset: Any, policy: Policy | None = None) -> Iterator[Worker]:
    """The first worker of a seat, before it has begun."""
    setup = Setup(
        worker=0,
        generation=0,
        seeds=NO_SEEDS,
        answered=0,
        epochs_done=0,
        batches_done=0,
        exhausted=False,
        random_state=None,
        epoch_state=None,
        held=(),
        allowance=Allowance(None),
    )
    blueprint = dataclasses.replace(blueprint_of(dataset), policy=policy)
    ours, theirs = pair()
    boxes = BlackBoxes(1)
    dump, file = kernel.memory_file("holdfast-dump"), create("holdfast-here", 1 << 20)
    keeper = Housekeeper(setup.allowance)
    recorder = Recorder(boxes.fd, 1, 0, dump)
    try:
        yield _WorkerProcess(
            setup, blueprint, Channel(theirs), recorder, Arena(file), None, keeper
        ).worker
    finally:
        keeper.close()
        boxes.close()
        for end in (ours, theirs):
            end.close()
        for fd in (dump, file):
            os.close(fd)
