"""contract.md section 10: where stock torch is wrong or a matter of luck, and what a user wants
instead.

What belongs to exceptions is in test_7_errors.py, what belongs to ends in test_7_ends.py, and the
whole table of deaths in tests/faults; here is one test for each remaining line of the section.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import faulty
from tests.support.datasets import Calls, Numbers, Revealing
from tests.support.errors import outcomes
from tests.support.fingerprint import fingerprint
from tests.support.loaders import STOCK, Loader
from tests.support.processes import alive, eventually, kill
from tests.support.scripts import run_script

pytestmark = pytest.mark.timeout(60)


def segfault() -> None:
    ctypes.string_at(0)


DEATHS = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": segfault,
    "exit 0": lambda: os._exit(0),
    "exit 3": lambda: os._exit(3),
}


class DiesOnce(Revealing):
    """At sample 5 the first worker that gets there dies."""

    def __init__(self, size: int, how: str, grave: Path) -> None:
        super().__init__(size)
        self.how = how
        self.grave = grave

    def __getitem__(self, index: Any) -> Any:
        if index == 5 and not self.grave.exists():
            self.grave.touch()
            DEATHS[self.how]()
        return super().__getitem__(index)


@pytest.mark.parametrize("how", sorted(DEATHS))
def test_the_death_of_a_worker_is_not_seen_in_the_stream(
    holdfast_class: Loader, how: str, tmp_path: Path
) -> None:
    """torch: ConnectionResetError, FileNotFoundError, EOFError or one of three RuntimeErrors, as
    luck will have it."""

    def stream(loader_class: Loader, dataset: Any) -> list[Any]:
        torch.manual_seed(1)
        loader = loader_class(dataset, batch_size=2, num_workers=2, shuffle=True)
        return [fingerprint(batch) for batch in loader]

    grave = tmp_path / "grave"
    disturbed = stream(holdfast_class, DiesOnce(12, how, grave))
    assert grave.exists(), "no worker died"
    assert disturbed == stream(STOCK, Revealing(12))


def test_a_death_raises_nothing_in_the_users_own_code(holdfast_class: Loader) -> None:
    """torch's SIGCHLD handler raises wherever the main thread happens to be."""
    before = signal.getsignal(signal.SIGCHLD)
    loader = holdfast_class(Numbers(40), batch_size=2, num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    got = [next(iterator).tolist()]
    for worker in iterator._workers:
        kill(worker.pid)
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        sum(range(1000))
    got += [batch.tolist() for batch in iterator]
    assert got == [[n, n + 1] for n in range(0, 40, 2)]
    assert signal.getsignal(signal.SIGCHLD) is before


def test_signal_handlers_of_the_trainer_stay_as_they_were(holdfast_class: Loader) -> None:
    numbers = (
        signal.SIGCHLD,
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGPIPE,
        signal.SIGUSR1,
        signal.SIGHUP,
    )
    before = [signal.getsignal(number) for number in numbers]
    for _ in holdfast_class(Numbers(6), num_workers=2, persistent_workers=True):
        assert [signal.getsignal(number) for number in numbers] == before
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_of_a_killed_trainer_do_not_live_on(context: str) -> None:
    """torch leaves orphans when the feed is blocked; here every worker of a SIGKILLed process
    goes."""
    ended = run_script(
        "holdfast",
        f"""
        import os, signal
        from tests.support.datasets import LargeImages
        if __name__ == "__main__":
            loader = DataLoader(LargeImages(4000), batch_size=8, num_workers=2, prefetch_factor=8,
                                multiprocessing_context={context!r})
            iterator = iter(loader)
            next(iterator)
            print(*(worker.pid for worker in iterator._workers), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    assert ended.code == -signal.SIGKILL
    pids = [int(pid) for pid in ended.out.split()]
    assert len(pids) == 2
    assert not ended.left, "alive after 3 s"
    assert eventually(lambda: not any(map(alive, pids)))


def test_the_place_of_an_error_can_be_read_by_a_program(holdfast_class: Loader) -> None:
    """Which sample it was stands in the text in a form that can be searched for."""
    loader = holdfast_class(Calls(44, faulty.failing(faulty.value)), batch_size=4, num_workers=2)
    (error,) = (each for each in outcomes(iter(loader)) if isinstance(each, Exception))
    found = re.search(r"sample (\d+) .*batch (\d+), worker (\d+)", str(error))
    assert found is not None
    assert [int(number) for number in found.groups()] == [
        faulty.BAD,
        faulty.BAD_BATCH,
        faulty.BAD_WORKER,
    ]
