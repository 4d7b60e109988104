"""What is counted of a stream with a policy for bad samples."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset, get_worker_info

from holdfast import BadSampleWarning, DataLoader


class Moving(IterableDataset[Any]):
    """Raises for some numbers and goes on."""

    def __init__(self, size: int, bad: set[int]) -> None:
        self.size = size
        self.bad = bad

    def __iter__(self) -> Iterator[Any]:
        return _Moving(self)


class _Moving:
    def __init__(self, stream: Moving) -> None:
        info = get_worker_info()
        self.stream = stream
        self.left = iter(range(stream.size) if info is None or info.id == 0 else ())

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        number = next(self.left)
        if number in self.stream.bad:
            raise ValueError(f"number {number}")
        return number


def summaries(loader: Any, epochs: list[int | None]) -> list[str]:
    """The last word of each epoch; one that is broken off after so many batches has none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", BadSampleWarning)
        for stop in epochs:
            for number, _ in enumerate(loader):
                if stop is not None and number + 1 == stop:
                    break
        loader.close()
    return [str(one.message) for one in caught if " in epoch " in str(one.message)]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("policy", ["skip", "replace"])
@pytest.mark.parametrize(
    ("size", "bad", "options"),
    [
        (10, {1}, {"batch_size": 4}),
        (10, {8, 9}, {"batch_size": 4}),
        (14, {4, 5, 6, 7}, {"batch_size": 4}),  # one is read ahead, in place of a whole batch
        (5, {1}, {"batch_size": None}),
    ],
)
def test_as_many_samples_are_seen_as_the_stream_had(
    size: int, bad: set[int], options: Any, policy: str, workers: int
) -> None:
    loader = DataLoader(Moving(size, bad), **options, num_workers=workers, on_bad_sample=policy)
    (told,) = summaries(loader, [None])
    assert f"{len(bad)} bad sample" in told
    assert f" among {size} in epoch 0" in told


def test_bad_samples_of_a_task_left_over_are_not_those_of_the_next_epoch() -> None:
    # Batch 0 and 1 are out when the epoch is broken off; batch 2, its end, has the bad ones.
    loader = DataLoader(
        Moving(9, {8}),
        batch_size=4,
        num_workers=1,
        on_bad_sample="skip",
        persistent_workers=True,
        prefetch_factor=3,
    )
    told = summaries(loader, [1, None])
    assert [one for one in told if "epoch 1" in one] == told
    assert len(told) == 1
    assert "1 bad sample among 9 in epoch 1" in told[0]
