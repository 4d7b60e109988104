"""Bad samples are reported by file name: a user looks for a file, not for an index."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset, Subset

from holdfast import DataLoader, PoisonSample

pytestmark = pytest.mark.timeout(60, method="thread")


class Files(Dataset[int]):
    """Eight files; the sixth is bad."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 8

    def sample_name(self, index: int) -> str:
        return f"train/{index:04}.jpg"

    def __getitem__(self, index: int) -> int:
        if index == 5 and self.how == "raises":
            raise ValueError("broken")
        if index == 5:
            os.abort()
        return index


def test_an_error_names_the_sample_as_the_dataset_does() -> None:
    with pytest.raises(ValueError, match="broken") as caught:
        list(DataLoader(Subset(Files("raises"), [7, 5]), batch_size=2, num_workers=1))
    error: Any = caught.value
    assert "raised by sample 1 (train/0005.jpg; position 1 of 2 in batch 0, worker 0)" in str(error)
    assert error.holdfast_sample.name == "train/0005.jpg"


def test_a_death_names_the_sample_as_the_dataset_does() -> None:
    loader = DataLoader(Files("aborts"), num_workers=1)
    with pytest.raises(PoisonSample, match=r"sample 5 \(train/0005\.jpg; position 0 of batch 5\)"):
        list(loader)
    assert {one.sample_name for one in loader.incidents} == {"train/0005.jpg"}
    assert "while loading sample 5 (train/0005.jpg; position 0 of batch 5)" in str(
        loader.incidents[0]
    )


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.filterwarnings("ignore::holdfast.BadSampleWarning")
def test_the_logbook_lists_bad_samples(tmp_path: Path, num_workers: int) -> None:
    loader = DataLoader(
        Files("raises"), num_workers=num_workers, on_bad_sample="skip", logbook=tmp_path / "book"
    )
    assert [batch.item() for batch in loader] == [0, 1, 2, 3, 4, 6, 7]
    (written,) = (tmp_path / "book").rglob("bad_samples*.jsonl")
    (record,) = [json.loads(line) for line in written.read_text().splitlines()]
    assert (record["index"], record["name"], record["error"]) == (5, "train/0005.jpg", "ValueError")
