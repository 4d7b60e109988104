"""What fetchers of all four kinds have in common: large samples are not looked for in vain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils import collate as torch_collate

from holdfast.autopsy.blackbox import BlackBoxes, CountingRecorder, Recorder
from holdfast.samples.policy import Policy
from holdfast.transport import collate
from holdfast.worker import fetch
from holdfast.worker.fetch import SELDOM, IterableFetcher, MapFetcher
from holdfast.worker.tolerant_iterable import TolerantIterableFetcher
from holdfast.worker.tolerant_map import TolerantMapFetcher
from tests.transport.support import new_slot

SIZE = 4


class Samples:
    """Small ones, and large ones from a certain batch on."""

    def __init__(self, large_from: int) -> None:
        self.large_from = large_from

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(50_000 if index // SIZE >= self.large_from else 4)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(self.__getitem__, range(10**6))


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    monkeypatch.setattr(
        torch_collate, "default_collate_fn_map", dict(torch_collate.default_collate_fn_map)
    )
    boxes = BlackBoxes(1)
    with new_slot() as slot:
        collate.install(slot.arena)
        yield {
            "auto_collation": True,
            "collate_fn": default_collate,
            "drop_last": False,
            "recorder": Recorder(boxes.fd, 1, 0),
            "memory": slot.arena,
            "faults": None,
        }
    boxes.close()


@pytest.mark.parametrize(
    "kind", [MapFetcher, IterableFetcher, TolerantMapFetcher, TolerantIterableFetcher]
)
def test_after_small_samples_large_ones_are_looked_for_seldom_and_found(
    kind: Any, parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []

    class Placement(fetch.Placement):
        def __init__(self, *args: Any) -> None:
            looked.append(number)
            super().__init__(*args)

    monkeypatch.setattr(fetch, "Placement", Placement)
    if "Tolerant" in kind.__name__:
        parts |= {"policy": Policy("skip"), "worker_id": 0}
    fetcher = kind(Samples(large_from=SELDOM + 2), **parts)
    for number in range(2 * SELDOM + 6):
        batch = fetcher.fetch(number, list(range(number * SIZE, (number + 1) * SIZE)))
        assert len(batch) == SIZE
    every = range(2 * (SELDOM + 1), 2 * SELDOM + 6)  # once large ones are found, each time
    assert looked == [0, SELDOM + 1, *every]


@pytest.mark.parametrize(
    "kind", [MapFetcher, IterableFetcher, TolerantMapFetcher, TolerantIterableFetcher]
)
def test_measured_batches_are_the_same(kind: Any, parts: dict[str, Any]) -> None:
    boxes = BlackBoxes(1)
    if "Tolerant" in kind.__name__:
        parts |= {"policy": Policy("skip"), "worker_id": 0}
    recorder = CountingRecorder(boxes.fd, 1, 0)
    plain = kind(Samples(2), **parts)
    measured = kind(Samples(2), **parts | {"recorder": recorder})
    for number in range(4):
        assert recorder.watch is not None
        recorder.watch._next = 0.0
        index = list(range(SIZE * number, SIZE * (number + 1)))
        assert torch.equal(plain.fetch(number, index), measured.fetch(number, index))
    found = boxes.tally([0], [], 0.0)
    assert (found.times.sum(), found.sizes.sum()) == (4 * SIZE, 4 * SIZE)
    boxes.close()
