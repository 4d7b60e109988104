"""What a logbook is told of a run's progress."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import DataLoader
from holdfast.autopsy.blackbox import Recorder
from holdfast.autopsy.logbook import read


class Named:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def sample_name(self, index: int) -> str:
        return f"train/{index}.png"

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise ValueError("no image")
        time.sleep(0.01 if index == 3 else 0.0)
        return torch.full((100,), index)


def test_the_last_records_of_all_pools_add_up_to_the_run(tmp_path: Path) -> None:
    loader = DataLoader(
        Named(32), batch_size=4, num_workers=2, logbook=tmp_path, on_bad_sample="skip", name="a"
    )
    with pytest.warns(UserWarning, match="bad sample"):
        assert [len(list(loader)) for _ in range(2)] == [8, 8]
    last = [one for one in read(tmp_path).progress if one["ended"]]
    stats = loader.stats()
    assert len({one["series"] for one in last}) == len(last) == 2
    assert sum(one["batches"] for one in last) == stats["batches"] == 16
    assert sum(one["samples"] for one in last) == 2 * 31
    assert sum(one["bytes"] for one in last) == stats["bytes"]
    assert sum(one["wait_seconds"] for one in last) == pytest.approx(stats["wait_seconds"])
    for one in last:
        assert one["seconds"]["fetch"] > 0.009
        assert sum(one["times"].values()) == sum(one["sizes"].values()) <= 31
        assert one["loader"] == "a"
        assert not one["approximate"]
        # Which one is the slowest depends on what else the machine does.
        assert one["slowest"] == sorted(one["slowest"], reverse=True)
        assert {name for _, _, name in one["slowest"]} == {
            f"train/{key}.png" for _, key, _ in one["slowest"]
        }
    assert [one["loader"] for one in read(tmp_path).loaders] == ["a"]
    assert read(tmp_path).loaders[0]["options"]["on_bad_sample"] == "skip"


def test_without_a_logbook_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(Named(4), batch_size=2, num_workers=1)
    iterator: Any = iter(loader)
    assert iterator._pool.progress is None
    assert Recorder.watch is None
    assert len(list(iterator)) == 2
