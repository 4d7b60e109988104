"""A stream that is continued from a state after a bad element: only if states are exact, and for one epoch only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from holdfast import DataLoader, ReplicaLost

pytestmark = pytest.mark.filterwarnings("ignore::holdfast.BadSampleWarning")

SIZE, BAD = 24, 7
LOADERS = pytest.mark.parametrize(
    "given", [{"num_workers": 0}, {"num_workers": 1, "persistent_workers": True}], ids=["0", "1"]
)


class Kept(IterableDataset[int]):
    """Every epoch begins from the state that was loaded last, as with Hugging Face's."""

    def __init__(self, bad: int = BAD) -> None:
        self.bad = bad
        self.start = self.at = 0

    def order(self) -> Iterator[int]:
        for number in range(self.start, SIZE):
            self.at = number
            yield number

    def __iter__(self) -> Iterator[int]:
        assert get_worker_info() is None or get_worker_info().num_workers == 1
        for number in self.order():
            if number == self.bad:
                raise ValueError(f"{number} is corrupt")
            yield number

    def state_dict(self) -> dict[str, int]:
        return {"start": self.at + 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["start"]


class Buffered(Kept):
    """What is in its buffer is not in its state."""

    def order(self) -> Iterator[int]:
        buffer: list[int] = []
        for number in super().order():
            buffer.append(number)
            if len(buffer) > 4:
                yield buffer.pop(2)
        yield from buffer


def epochs(dataset: Any, count: int, **given: Any) -> list[list[int]]:
    loader = DataLoader(dataset, batch_size=4, on_bad_sample="skip", **given)
    found = [[number for batch in loader for number in batch.tolist()] for _ in range(count)]
    loader.close()
    return found


@LOADERS
@pytest.mark.parametrize("bad", [0, 1, BAD, 20])
def test_later_epochs_begin_at_their_start(bad: int, given: dict[str, Any]) -> None:
    wanted = [number for number in range(SIZE) if number != bad]
    assert epochs(Kept(bad), 3, **given) == [wanted] * 3


@LOADERS
@pytest.mark.parametrize("bad", [0, 2, BAD, 12, SIZE - 3, SIZE - 1])
def test_a_state_that_leaves_something_out_is_an_error_and_no_other_stream(
    bad: int, given: dict[str, Any]
) -> None:
    with pytest.raises(ReplicaLost, match="leaves something out"):
        epochs(Buffered(bad), 1, **given)


def with_noise(number: int) -> float:
    return number + torch.rand(()).item()


class Noisy(Kept):
    """A generator behind an iterator that is none."""

    def __iter__(self) -> Any:
        return map(with_noise, super().__iter__())


def test_trying_it_draws_no_random_numbers() -> None:
    """Nor does what comes after the bad one differ."""

    def stream(bad: int) -> list[float]:
        torch.manual_seed(2)
        loader = DataLoader(Noisy(bad), batch_size=4, on_bad_sample="skip")
        return [number for batch in loader for number in batch.tolist()]

    assert [one % 1 for one in stream(BAD)] == [one % 1 for one in stream(SIZE)[:-1]]
