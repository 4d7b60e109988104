"""What a worker has to say to the user is said once for a loader."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.utils.data

import holdfast

pytestmark = pytest.mark.timeout(60)


class Refilling(torch.utils.data.Dataset[Any]):
    """Returns one buffer for every sample."""

    def __init__(self, size: int) -> None:
        self.buffer = torch.zeros(size)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.buffer.fill_(index)


def first(loader_class: Any, dataset: Any, epochs: int = 1, **given: Any) -> list[float]:
    loader = loader_class(dataset, batch_size=4, **given)
    batches = [batch for _ in range(epochs) for batch in loader]
    return [float(row[0]) for row in batches[0]]


@pytest.mark.parametrize("policy", [{}, {"on_bad_sample": "skip"}])
def test_a_dataset_that_refills_one_buffer_is_told_of_once(
    policy: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    large, small = Refilling(1 << 14), Refilling(9)
    assert first(torch.utils.data.DataLoader, large, num_workers=2) == [3, 3, 3, 3]
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert first(holdfast.DataLoader, small, num_workers=2, **policy) == [3, 3, 3, 3]
        assert not caplog.records
        got = first(holdfast.DataLoader, large, epochs=2, num_workers=2, **policy)
    assert got == [0, 1, 2, 3]
    (said,) = caplog.messages
    assert "the same memory for several samples" in said
    assert first(holdfast.DataLoader, large, num_workers=0, **policy) == [3, 3, 3, 3]
