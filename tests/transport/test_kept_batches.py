"""A batch that the user keeps stays valid for ever, and keeping it does not stop the loader."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from holdfast import DataLoader
from tests.support.processes import kill

pytestmark = pytest.mark.timeout(120, method="thread")


class Blocks(Dataset[Any]):
    """Each sample is filled with its own index."""

    def __init__(self, size: int, elements: int = 20_000) -> None:
        self.size = size
        self.elements = elements

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return torch.full((self.elements,), index)


def is_intact(batch: torch.Tensor, number: int) -> bool:
    return bool((batch == number).all())


def copied(samples: list[torch.Tensor]) -> torch.Tensor:
    """A custom collate: its tensor is copied into the arena when it is sent."""
    return torch.stack(samples)


@pytest.mark.faults
@pytest.mark.parametrize("collate", [None, copied])
def test_batches_stay_valid_after_their_worker_is_killed(collate: Any) -> None:
    with DataLoader(Blocks(200), num_workers=2, collate_fn=collate) as loader:
        iterator = iter(loader)
        kept = {}
        for number in range(200):
            batch = next(iterator)
            if number % 3 == 0:
                kept[number] = batch
            if number % 40 == 20:
                kill(iterator._workers[number % 2].pid)
        assert len(loader.incidents) == 5
        assert all(is_intact(batch, number) for number, batch in kept.items())


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_stay_valid_after_the_epoch_after_close_and_after_the_loader_is_gone(
    persistent: bool,
) -> None:
    loader = DataLoader(Blocks(30), num_workers=2, persistent_workers=persistent)
    epochs = [list(loader) for _ in range(3)]

    def intact() -> bool:
        return all(
            is_intact(batch, number) for epoch in epochs for number, batch in enumerate(epoch)
        )

    assert intact()
    loader.close()
    assert intact()
    del loader
    gc.collect()
    assert intact()
    # What others do with the memory that is free now must not show either.
    others = [list(DataLoader(Blocks(30), num_workers=2)) for _ in range(2)]
    for other in others:
        for batch in other:
            batch.fill_(-1)
    assert intact()


def test_one_kept_tensor_of_a_batch_keeps_it_and_the_others_may_go() -> None:
    with DataLoader(Pairs(100), num_workers=1, batch_size=4) as loader:
        labels = [batch["label"] for batch in loader]
    expected = [
        torch.full((4, 6000), 0) + torch.arange(4 * i, 4 * i + 4).unsqueeze(1) for i in range(25)
    ]
    assert all(torch.equal(one, other) for one, other in zip(labels, expected, strict=True))


class Pairs(Blocks):
    def __getitem__(self, index: int) -> Any:
        return {"image": torch.full((20_000,), index), "label": torch.full((6000,), index)}


def test_a_whole_data_set_fits_into_a_list() -> None:
    """200 MB in 800 batches with two workers, far beyond any number of slots or descriptors."""
    with DataLoader(Blocks(800, elements=32_000), num_workers=2) as loader:
        batches = list(loader)
    assert sum(batch.nbytes for batch in batches) > 200e6
    assert all(is_intact(batch, number) for number, batch in enumerate(batches))


@pytest.mark.parametrize("prefetch", [1, 4])
def test_holding_sixty_four_batches_at_a_time_works(prefetch: int) -> None:
    """As in gradient accumulation; a loader with fixed slots would wait for ever."""
    with DataLoader(Blocks(256), num_workers=2, prefetch_factor=prefetch) as loader:
        held: list[torch.Tensor] = []
        for number, batch in enumerate(loader):
            held.append(batch)
            if len(held) == 64:
                assert all(is_intact(one, number - 63 + i) for i, one in enumerate(held))
                held.clear()


class Cached(Dataset[Any]):
    """Gives the same tensor again and again, as a data set in memory does."""

    def __init__(self) -> None:
        self.data = [torch.full((20_000,), index) for index in range(4)]

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return self.data[index % 4]


@pytest.mark.parametrize(
    "options", [{}, {"batch_size": None}, {"collate_fn": lambda samples: samples[0]}]
)
def test_what_the_consumer_writes_into_a_batch_shows_in_no_later_one(
    options: dict[str, Any],
) -> None:
    with DataLoader(Cached(), num_workers=2, persistent_workers=True, **options) as loader:
        for _ in range(2):
            kept = []
            for number, batch in enumerate(loader):
                assert is_intact(batch, number % 4)
                batch.fill_(-1)
                kept.append(batch)
            assert all(is_intact(batch, -1) for batch in kept)


def test_a_view_a_numpy_array_and_a_storage_of_a_batch_keep_it() -> None:
    with DataLoader(Blocks(60), num_workers=1) as loader:
        kept: list[Any] = []
        for number, batch in enumerate(loader):
            kept.append(
                [batch[0, 5:9], batch.numpy(), batch.untyped_storage(), batch.t()][number % 4]
            )
        del batch
    for number, one in enumerate(kept):
        if isinstance(one, torch.UntypedStorage):
            one = torch.tensor([], dtype=torch.int64).set_(one)
        assert bool((torch.as_tensor(one) == number).all())
