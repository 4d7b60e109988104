"""How workers are scheduled."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils.data import Dataset

from holdfast import DataLoader


class Policies(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([os.sched_getscheduler(0), os.nice(0)])


def policies() -> set[tuple[int, int]]:
    batches = DataLoader(Policies(), batch_size=None, num_workers=2)
    return {(policy, nice) for policy, nice in (batch.tolist() for batch in batches)}


def test_workers_interrupt_nobody_and_the_trainer_is_left_as_it_is() -> None:
    before = os.sched_getscheduler(0), os.nice(0)
    assert policies() == {(os.SCHED_BATCH, before[1])}
    assert (os.sched_getscheduler(0), os.nice(0)) == before


def test_whoever_has_chosen_a_policy_keeps_it() -> None:
    pid = os.fork()
    if pid == 0:  # no process leaves SCHED_IDLE again without a privilege
        status = 1
        try:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            status = 0 if policies() == {(os.SCHED_IDLE, os.nice(0))} else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
