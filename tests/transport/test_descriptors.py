"""A batch that is kept costs memory and nothing else: no descriptor, no mapping, no name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, default_collate

from holdfast import DataLoader
from tests.lifecycle.trainer import Stage
from tests.support.processes import eventually, mappings, open_files
from tests.support.warm import mounting

pytestmark = pytest.mark.timeout(120, method="thread")


class Triples(Dataset[Any]):
    """Three tensors, large enough for the arena."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return {
            "a": torch.full((9000,), index),
            "b": torch.full((9000,), float(index)),
            "c": torch.tensor(index),
        }


def unchanged(samples: list[Any]) -> Any:
    return samples


def wrapping(samples: list[Any]) -> Any:
    return [default_collate(samples)]


COLLATE = {"default": None, "custom": unchanged, "custom that calls the default": wrapping}


def of(pid: int | None) -> tuple[int, int]:
    """Descriptors and mappings of a process."""
    return len(os.listdir(f"/proc/{pid}/fd")), len(
        Path(f"/proc/{pid}/maps").read_text().splitlines()
    )


@pytest.mark.slow
@pytest.mark.parametrize("collate", COLLATE)
def test_kept_batches_cost_no_descriptors_and_no_mappings(collate: str) -> None:
    with DataLoader(
        Triples(600), num_workers=2, batch_size=2, collate_fn=COLLATE[collate]
    ) as loader:
        iterator = iter(loader)
        kept = [next(iterator) for _ in range(20)]
        pids = [worker.pid for worker in iterator._workers]
        ours, theirs = (open_files(), mappings()), [of(pid) for pid in pids]
        kept += [next(iterator) for _ in range(260)]
        assert open_files() == ours[0]
        assert mappings() <= ours[1] + 10  # the allocator's; torch adds one per tensor, 1560 here
        for before, pid in zip(theirs, pids, strict=True):
            after = of(pid)
            assert after[0] == before[0]
            assert after[1] <= before[1] + 10
        assert [_first(batch) for batch in kept] == [2 * number for number in range(280)]


def _first(batch: Any) -> int:
    while isinstance(batch, list):
        batch = batch[0]
    return int(batch["a"].reshape(-1)[0])


@pytest.mark.slow
def test_one_batch_kept_of_each_epoch_costs_no_descriptors() -> None:
    """The memory file of a closed loader must not stay open for a batch that the user keeps."""

    def epoch() -> Any:
        return next(iter(DataLoader(Triples(4), num_workers=2)))

    list(DataLoader(Triples(4), num_workers=2))
    before = open_files()
    kept = [epoch() for _ in range(6)]
    assert eventually(lambda: open_files() <= before)
    assert [int(batch["a"][0, 0]) for batch in kept] == [0] * 6


NAMES = """
        import ctypes, struct

        libc = ctypes.CDLL(None, use_errno=True)
        watch = libc.inotify_init1(os.O_NONBLOCK)
        assert libc.inotify_add_watch(watch, b"/dev/shm", 0x100) >= 0  # IN_CREATE

        def names_ever_made():
            try:
                raw = os.read(watch, 65536)
            except BlockingIOError:
                return []
            found = []
            while raw:
                length = struct.unpack_from("iIII", raw)[3]
                found.append(raw[16:16 + length].rstrip(bytes(1)).decode())
                raw = raw[16 + length:]
            return found
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="a private /dev/shm takes root")
def test_nothing_is_ever_made_in_dev_shm(stage: Stage) -> None:
    """Not even for a moment: a watch on a private /dev/shm sees every name. Stock torch shows that it would."""
    ended = stage.run(
        f"""
        {NAMES}
        import torch.utils.data
        from tests.transport.test_descriptors import COLLATE, Triples

        for collate in COLLATE.values():
            for batch in DataLoader(Triples(20), num_workers=2, batch_size=2, collate_fn=collate):
                pass
            for persistent in (False, True):
                with DataLoader(Triples(20), num_workers=2, persistent_workers=persistent, collate_fn=collate) as loader:
                    iterator = iter(loader)
                    next(iterator)
                    kill(iterator._workers[0].pid)
                    list(iterator)
        say("ours", len(names_ever_made()))
        for batch in torch.utils.data.DataLoader(Triples(20), num_workers=2):
            pass
        say("torch", len(names_ever_made()))
        """,
        before=mounting({"/dev/shm": "size=64m"}),
    )
    assert ended.code == 0, ended.err
    assert ended.values("ours") == ["0"]
    assert int(ended.values("torch")[0]) > 0
