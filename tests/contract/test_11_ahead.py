"""How much is made ahead: as torch does, and more only where nothing shows it."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

import holdfast
from holdfast.engine import pool
from tests.support.processes import kill


class Counting(Dataset[Any]):
    """Says how many samples were begun in all.

    Each of two workers has a number of its own: a lock that both take would be held for ever by one that is killed
    while it holds it.
    """

    def __init__(self, length: int = 2000, size: int = 4) -> None:
        self.begun = multiprocessing.Array("i", 2, lock=False)
        self.length = length
        self.size = size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        info = get_worker_info()
        assert info is not None
        self.begun[info.id] = max(self.begun[info.id], index + 1)
        return torch.full((self.size,), index) + torch.rand(())


def most_ahead(monkeypatch: pytest.MonkeyPatch, size: int = 4, **options: Any) -> int:
    """Samples that were begun before the consumer had them, at the most."""
    monkeypatch.setattr(pool, "QUICK", 10.0)  # however slow this machine is
    dataset = Counting(size=size)
    loader = holdfast.DataLoader(dataset, num_workers=2, **options)
    most = 0
    for number, _ in enumerate(loader):
        most = max(most, *(begun - number - 1 for begun in dataset.begun))
        if number == 300:
            break
    loader.close()
    return most


def test_small_quick_batches_are_made_further_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 4 < most_ahead(monkeypatch) <= 32


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"prefetch_factor": 2},
        {"persistent_workers": True},
        {"sampler": list(range(2000))},
        {"on_bad_sample": "skip"},
        {"size": 1 << 20},
    ],
    ids=["chosen", "persistent", "own sampler", "policy", "large"],
)
def test_where_it_would_show_no_more_are_made_ahead_than_torch_does(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    assert most_ahead(monkeypatch, **options) <= 4


@pytest.mark.parametrize("generator", [None, torch.Generator()])
def test_the_state_of_a_generator_would_show_what_was_drawn(generator: Any) -> None:
    sampler = torch.utils.data.RandomSampler(range(20), generator=generator)
    loader = holdfast.DataLoader(list(range(20)), sampler=sampler, num_workers=1)
    assert iter(loader)._pool._may_hurry is (generator is None)
    loader.close()


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_stream_is_torchs_also_under_kills(
    monkeypatch: pytest.MonkeyPatch, shuffle: bool
) -> None:
    monkeypatch.setattr(pool, "QUICK", 10.0)

    def stream(loader_class: Any, kills: tuple[int, ...]) -> list[float]:
        torch.manual_seed(7)
        loader = loader_class(Counting(600), 2, shuffle=shuffle, num_workers=2)
        got, iterator = [], iter(loader)
        for number, batch in enumerate(iterator):
            got.append(batch.sum().item())
            if number in kills:
                kill(iterator._workers[number % 2].pid)
        return got

    expected = stream(torch.utils.data.DataLoader, ())
    assert stream(holdfast.DataLoader, (40, 111, 200)) == expected
