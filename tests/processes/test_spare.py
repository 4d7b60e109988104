"""A worker that has to be replaced is replaced by a process that is already there."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from holdfast import DataLoader
from holdfast.processes import nursery_main
from tests.support.processes import eventually

pytestmark = [pytest.mark.faults]


class Tells(torch.utils.data.Dataset[Any]):
    """Samples that depend on every random generator of the worker, and on its id."""

    def __init__(self, ours: bool) -> None:
        self.ours = ours

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Any:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        name = multiprocessing.current_process().name
        drawn = torch.rand(()).item() + random.random() + np.random.random()
        if self.ours:
            assert name == f"Process-{info.id + 1}"
        return torch.tensor([index, drawn, info.id])


def idle(iterator: Any) -> list[psutil.Process]:
    """Children of the nursery that are no workers."""
    nursery = psutil.Process(iterator._pool.driver.resources.nursery.pid)
    workers = {worker.pid for worker in iterator._workers}
    return [child for child in nursery.children() if child.pid not in workers]


def stream(loader_class: Any, kills: bool) -> list[Any]:
    torch.manual_seed(3)
    loader = loader_class(Tells(kills), batch_size=2, num_workers=2)
    got: list[Any] = []
    iterator: Any = iter(loader)
    for number, batch in enumerate(iterator):
        got.append(batch.tolist())
        if kills and number == 20:
            os.kill(iterator._workers[0].pid, signal.SIGKILL)
            assert eventually(lambda: len(idle(iterator)) == 1)
        if kills and number in (60, 110):
            [spare] = idle(iterator)
            old = iterator._workers[1].pid
            os.kill(old, signal.SIGKILL)
            assert eventually(lambda old=old: iterator._workers[1].pid not in (None, old))
            assert iterator._workers[1].pid == spare.pid
            assert eventually(lambda: len(idle(iterator)) == 1)
    return got


def test_the_replacement_is_the_spare_and_the_stream_is_torchs() -> None:
    assert stream(DataLoader, kills=True) == stream(torch.utils.data.DataLoader, kills=False)


def test_a_pool_that_lives_for_a_while_has_a_spare_and_none_after_the_end() -> None:
    loader = DataLoader(range(64), num_workers=2, persistent_workers=True)
    iterator: Any = iter(loader)
    next(iterator)
    assert eventually(lambda: len(idle(iterator)) == 1)
    [spare] = idle(iterator)
    loader.close()
    assert eventually(lambda: not spare.is_running())


def test_the_first_worker_that_dies_is_replaced_by_the_spare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nursery_main, "FIRST_SPARE_DELAY", 0.0)
    loader = DataLoader(range(64), num_workers=2)
    iterator: Any = iter(loader)
    got = [next(iterator).item()]
    assert eventually(lambda: len(idle(iterator)) == 1)
    [spare] = idle(iterator)
    old = iterator._workers[0].pid
    os.kill(old, signal.SIGKILL)
    assert eventually(lambda: iterator._workers[0].pid not in (None, old))
    assert iterator._workers[0].pid == spare.pid
    got += [batch.item() for batch in iterator]
    assert got == list(range(64))


def test_a_pool_that_ends_soon_has_had_no_spare() -> None:
    loader = DataLoader(range(64), num_workers=2, persistent_workers=True)
    began = time.monotonic()
    iterator: Any = iter(loader)
    next(iterator)
    seen = idle(iterator)
    took = time.monotonic() - began
    loader.close()
    assert seen == [] or took > nursery_main.FIRST_SPARE_DELAY


def test_a_spare_that_was_killed_is_not_used() -> None:
    loader = DataLoader(range(200), num_workers=2)
    iterator: Any = iter(loader)
    got = [next(iterator).item()]
    for _ in range(2):
        old = iterator._workers[0].pid
        os.kill(old, signal.SIGKILL)
        assert eventually(lambda old=old: iterator._workers[0].pid not in (None, old))
        assert eventually(lambda: len(idle(iterator)) == 1)
        [spare] = idle(iterator)
        spare.kill()
        assert eventually(lambda spare=spare: not spare.is_running())
    got += [batch.item() for batch in iterator]
    assert got == list(range(200))
    assert loader.stats()["restarts"] == 2  # the end of a spare is no death of a worker


class Speaks(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> int:
        if index == 150:
            os.write(2, b"the last that it wrote\n")
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def test_what_a_worker_that_was_a_spare_writes_to_standard_error_is_kept(capfd: Any) -> None:
    loader = DataLoader(Speaks(), num_workers=1, on_bad_sample="skip")
    iterator: Any = iter(loader)
    next(iterator)
    for _ in range(2):
        old = iterator._workers[0].pid
        os.kill(old, signal.SIGKILL)
        assert eventually(lambda old=old: iterator._workers[0].pid not in (None, old))
        assert eventually(lambda: len(idle(iterator)) == 1)
    assert len(list(iterator)) == 198
    assert "the last that it wrote" in capfd.readouterr().err
    assert any("the last that it wrote" in str(one.to_json()) for one in loader.incidents)
