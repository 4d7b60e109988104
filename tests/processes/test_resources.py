"""What a process forked from the trainer lets go of."""

from __future__ import annotations

import os

import pytest

from holdfast.processes.auxiliary import AuxiliaryProcesses
from holdfast.processes.nursery_reports import Forked
from tests.processes.test_auxiliary import REHEARSAL, HangingStream
from tests.support import resources
from tests.support.processes import alive

pytestmark = pytest.mark.timeout(90)


def test_a_forked_child_lets_go_of_the_channels_of_processes_beside_without_ending_them() -> None:
    with resources.opened(HangingStream()) as opened:
        beside = AuxiliaryProcesses(opened, resources.WORKERS, None)
        assert beside.begin(resources.setup_of(opened, **REHEARSAL))
        forked = resources.wait_for_report(opened, Forked)
        (channel,) = opened.auxiliary.values()
        child = os.fork()
        if child == 0:
            opened.disown()
            os._exit(0 if channel.fileno() == -1 else 1)
        assert os.waitpid(child, 0)[1] == 0
        beside.hear(forked.worker)
        assert channel.open
        assert alive(forked.pid)
        beside.stop()
