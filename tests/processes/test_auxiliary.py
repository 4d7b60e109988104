"""Processes beside the workers that take too long are ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import Dataset, IterableDataset

from holdfast.processes.auxiliary import LONGEST, AuxiliaryProcesses
from holdfast.processes.nursery_reports import Died, Forked
from holdfast.processes.protocol import Probe, order
from holdfast.worker import leak_probe
from tests.support import resources

pytestmark = pytest.mark.timeout(90)


class HangingStream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        signal.pause()
        return iter(())


class HangingSamples(Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        signal.pause()
        return index


REHEARSAL: dict[str, Any] = {"rehearsal": 1 << 30}
PROBE: dict[str, Any] = {"plan": None, "probe": Probe((order("task", 0, [0], []),), 1)}


@pytest.mark.parametrize("stall_timeout", [None, 10_000.0])
@pytest.mark.parametrize(
    ("dataset", "role", "longest"),
    [(HangingStream(), REHEARSAL, LONGEST), (HangingSamples(), PROBE, 2 * leak_probe.LONGEST)],
    ids=["rehearsal", "leak probe"],
)
def test_one_that_takes_too_long_is_ended_whatever_the_user_has_set(
    dataset: Any, role: dict[str, Any], longest: float, stall_timeout: float | None
) -> None:
    with resources.opened(dataset) as opened:
        beside = AuxiliaryProcesses(opened, resources.WORKERS, stall_timeout)
        began = time.monotonic()
        setup = resources.setup_of(opened, **role)
        assert beside.begin(setup)
        assert not beside.begin(setup), "one at a time"
        forked = resources.wait_for_report(opened, Forked)
        assert beside.owns(forked.worker)
        assert beside.report(forked) is None
        beside.end_stalled(began + longest)
        os.kill(forked.pid, 0)
        beside.end_stalled(time.monotonic() + longest)
        died = resources.wait_for_report(opened, Died)
        assert (died.pid, died.status) == (forked.pid, signal.SIGKILL)
        result = beside.report(died)
        assert result is not None
        assert (result.setup, result.finding) == (setup, None)
        assert beside.begin(setup), "another may try"
        beside.stop()
