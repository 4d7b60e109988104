"""States of torchdata's StatefulDataLoader, which holdfast goes on from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from holdfast import DataLoader, StateError
from tests.resume.plans import Counting, Remembers, Resumable, StatefulIterator
from tests.support.datasets import Numbers, Revealing, Stream

torchdata = pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = pytest.mark.frameworks

LOADERS: dict[str, Callable[..., Any]] = {
    "in order": lambda kind, **more: kind(Revealing(40), batch_size=3, **more),
    "shuffled": lambda kind, **more: kind(Revealing(40), batch_size=3, shuffle=True, **more),
    "by a generator": lambda kind, **more: kind(
        Revealing(40), 3, True, generator=torch.Generator().manual_seed(3), **more
    ),
    "single": lambda kind, **more: kind(Numbers(40), batch_size=None, shuffle=True, **more),
    "a sampler with a state": lambda kind, **more: kind(
        Revealing(40), batch_size=3, sampler=Remembers(40), **more
    ),
    "a dataset with a state": lambda kind, **more: kind(Resumable(40), batch_size=3, **more),
    "an iterator with a state": lambda kind, **more: kind(
        StatefulIterator(40), batch_size=3, **more
    ),
    "a map-style dataset with a state": lambda kind, **more: kind(
        Counting(40), batch_size=3, **more
    ),
    "a stream": lambda kind, **more: kind(Stream(40, "sharded"), batch_size=3, **more),
}


def indices(loader: Any) -> list[Any]:
    """And what a dataset that counts its samples has counted."""
    return [
        [one[key].tolist() for key in ("index", "loaded") if key in one]
        if isinstance(one, dict)
        else int(one)
        for one in loader
    ]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", LOADERS)
def test_what_is_left_is_what_torchdata_itself_would_give(name: str, workers: int) -> None:
    make = LOADERS[name]
    loader = make(torchdata.StatefulDataLoader, num_workers=workers)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state = loader.state_dict()
    rest = indices(iterator)
    ours = make(DataLoader, num_workers=workers, snapshot_every_n_steps=1)
    ours.load_state_dict(state)
    assert indices(ours) == rest
    assert len(indices(ours)) >= len(rest)


def test_what_it_does_not_hold_is_an_error() -> None:
    make = LOADERS["in order"]
    loader = make(torchdata.StatefulDataLoader, num_workers=2)
    next(iter(loader))
    with pytest.raises(StateError, match="num_workers=2, and this loader has num_workers=0"):
        make(DataLoader).load_state_dict(loader.state_dict())
