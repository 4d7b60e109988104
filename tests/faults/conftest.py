"""No process is left behind here either, but judged by the checker (I5), which knows whose is whose."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.support.processes import descendants, eventually, kill


@pytest.fixture(autouse=True)
def no_process_left_behind() -> Iterator[None]:
    """Replaces the fixture of the same name above.

    That one takes every new name in /dev/shm for ours and removes it. These tests run for minutes
    beside other people's, whose semaphores come and go meanwhile; the checker counts ours only.
    """
    before = descendants()
    yield
    if not eventually(lambda: descendants() <= before, 3.0):
        left = descendants() - before
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                kill(pid)
        pytest.fail(f"processes left behind: {sorted(left)}", pytrace=False)
