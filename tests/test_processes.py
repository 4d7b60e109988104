"""The instruments that look at processes."""

from __future__ import annotations

import os

from tests.support.processes import children


def test_a_process_that_has_just_gone_has_no_children() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert children(pid) == set()
