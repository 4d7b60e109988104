"""What a logbook is told of a run's progress."""

from __future__ import annotations

import gc
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import DataLoader
from holdfast.autopsy.blackbox import Recorder
from holdfast.engine import progress_log
from holdfast.run_report.logged_run import read


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
        times = [seconds for seconds, _, _ in one["slowest"]]
        assert times == sorted(times, reverse=True)
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


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_without_workers_it_tells_how_long_loading_took(tmp_path: Path, policy: str) -> None:
    data = Named(4 if policy == "raise" else 8)
    loader = DataLoader(data, batch_size=2, logbook=tmp_path, on_bad_sample=policy, name="a")
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the bad sample
        batches = list(loader)
        for _ in loader:
            break  # an epoch that is left early is told too
        gc.collect()
    whole = time.monotonic() - began
    all_of_it, left = [one for one in read(tmp_path).progress if one["ended"]]
    assert all_of_it["batches"] == len(batches) == len(data) / 2
    assert all_of_it["samples"] == len(data) - (policy == "skip")
    assert (left["batches"], left["samples"]) == (1, 2)
    assert 0.01 <= all_of_it["wait_seconds"] <= all_of_it["elapsed"] <= whole
    assert all_of_it["seats"] == 0


class Slow(Named):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.4)
        return index


def test_a_wait_that_goes_on_is_told_while_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a worker hangs, the page must not say that the trainer did not wait."""
    monkeypatch.setattr(progress_log, "AT_FIRST", 0.05)
    with DataLoader(Slow(1), num_workers=1, logbook=tmp_path) as loader:
        list(loader)
    early = [one for one in read(tmp_path).progress if not one["batches"]]
    assert early[-1]["wait_seconds"] > 0
