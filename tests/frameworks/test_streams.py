"""Streams of Hugging Face datasets and of WebDataset, with workers that are killed or replaced."""

from __future__ import annotations

import json
import logging
import re
import tarfile
import warnings
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

from holdfast import DataLoader
from holdfast.engine.memory_control import _Warned
from tests.support.processes import eventually, kill

pytestmark = [pytest.mark.frameworks, pytest.mark.faults]

datasets = pytest.importorskip("datasets")
split_dataset_by_node = pytest.importorskip("datasets.distributed").split_dataset_by_node
wds = pytest.importorskip("webdataset")

SIZE = 192
KILL_AT = 5  # the number of the batch after which a worker is killed


def table() -> Any:
    return datasets.Dataset.from_dict(
        {"number": list(range(SIZE)), "text": [f"row {number}" for number in range(SIZE)]}
    )


def stream(shards: int = 4) -> Any:
    return table().to_iterable_dataset(num_shards=shards)


def shuffled() -> Any:
    return stream().shuffle(seed=5, buffer_size=40)


def more(row: Any) -> Any:
    return {**row, "half": row["number"] / 2}


def more_of_each(rows: Any) -> Any:
    return {**rows, "half": [number / 2 for number in rows["number"]]}


def even(row: Any) -> bool:
    return bool(row["number"] % 2 == 0)


def interleaved() -> Any:
    parts = [stream(2).map(more), stream(2).map(more)]
    return datasets.interleave_datasets(parts, seed=3, probabilities=[0.6, 0.4])


HUGGING_FACE: dict[str, Callable[[], Any]] = {
    "plain": stream,
    "shuffle": shuffled,
    "map and filter": lambda: stream().map(more).filter(even),
    "batched map": lambda: stream().map(lambda rows: rows, batched=True, batch_size=5),
    "batch": lambda: stream().batch(2).map(more_of_each),
    "interleave": interleaved,
    "shuffle after map": lambda: stream().map(more).shuffle(seed=2, buffer_size=16),
    "split by node": lambda: split_dataset_by_node(shuffled(), rank=0, world_size=2),
    "map-style": table,
}


def numbers(batch: Any) -> Any:
    """What tells one batch from another."""
    if isinstance(batch, dict):
        return [(name, numbers(value)) for name, value in batch.items()]
    if isinstance(batch, (list, tuple)):
        return [numbers(value) for value in batch]
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def streams(loader: Any, epochs: int, hurt: bool) -> list[Any]:
    torch.manual_seed(0)
    found: list[Any] = []
    for _ in range(epochs):
        found.append([])
        for number, batch in enumerate(iterator := iter(loader)):
            found[-1].append(numbers(batch))
            if hurt and number == KILL_AT:
                kill(iterator._workers[0].pid)  # now, and not in a moment
    if type(loader) is torch.utils.data.DataLoader and loader.persistent_workers:
        iterator._shutdown_workers()  # or they would live as long as the loader is held
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["plain", "shuffle", "interleave"])
def test_a_hugging_face_stream_is_resumed_as_it_was(
    name: str, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    """From its state, or, if that does not lead there (a shuffle buffer is not in it), drawn again."""

    def make(kind: Any = DataLoader) -> Any:
        return kind(HUGGING_FACE[name](), batch_size=4, num_workers=workers)

    (expected,) = streams(make(torch.utils.data.DataLoader), 1, hurt=False)
    loader = make()
    iterator = iter(loader)
    for _ in range(KILL_AT):
        next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    del iterator
    loader.close()
    resumed = make()
    resumed.load_state_dict(state)
    with caplog.at_level(logging.INFO, "holdfast"):
        assert streams(resumed, 1, hurt=False) == [expected[KILL_AT:]]
    assert "not as it was" not in caplog.text
    assert name == "shuffle" or "drawn again and dropped" not in caplog.text


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_a_kill_in_each_epoch_leaves_a_hugging_face_stream_as_it_was(
    name: str, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    make = HUGGING_FACE[name]
    options = {"batch_size": 4, "num_workers": workers}
    expected = streams(torch.utils.data.DataLoader(make(), **options), 2, hurt=False)
    loader = DataLoader(make(), **options)
    assert streams(loader, 2, hurt=True) == expected
    assert len(loader.incidents) == 2
    shown = None if name == "map-style" else True
    assert [one.exact for one in loader.incidents] == [shown, shown]
    assert (
        re.search(r"and (its fingerprint is|their fingerprints are) equal$", caplog.text, re.M)
        is not None
    ) is (shown is True)


@pytest.mark.parametrize("name", ["plain", "shuffle"])
def test_a_kill_leaves_later_epochs_of_persistent_workers_as_they_were(name: str) -> None:
    make = HUGGING_FACE[name]
    options = {"batch_size": 8, "num_workers": 2, "persistent_workers": True}
    expected = streams(torch.utils.data.DataLoader(make(), **options), 3, hurt=False)
    loader = DataLoader(make(), **options)
    assert streams(loader, 1, hurt=True) == expected[:1]
    assert streams(loader, 2, hurt=False) == expected[1:]
    loader.close()
    assert [one.exact for one in loader.incidents] == [True]


_leaked: list[Any] = []


class Leaks:
    """When it is sent, and not when its batch is merely made again."""

    def __reduce__(self) -> Any:
        _leaked.append(np.ones(8 << 20, np.uint8))
        return int, (0,)


def and_leak(rows: list[Any]) -> Any:
    return {"rows": torch.utils.data.default_collate(rows), "leak": Leaks()}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_shuffled_stream_is_the_same_in_workers_that_are_replaced_for_their_size(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.engine.memory_control._warned", _Warned(leak=True))
    options: dict[str, Any] = {"batch_size": 8, "num_workers": workers}
    expected = streams(torch.utils.data.DataLoader(shuffled(), **options), 1, hurt=False)
    loader = DataLoader(shuffled(), **options, collate_fn=and_leak, worker_memory_limit="40MiB")
    found = []
    torch.manual_seed(0)
    for number, batch in enumerate(loader):
        found.append(numbers(batch["rows"]))
        if number == 15:
            assert eventually(lambda: loader.stats()["recycled"] > 0)
    assert [found] == expected
    assert loader.incidents == []


# -- WebDataset ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("shards")
    paths = []
    for shard in range(4):
        paths.append(str(folder / f"{shard}.tar"))
        with tarfile.open(paths[-1], "w") as tar:
            for number in range(shard * 48, shard * 48 + 48):
                content = str(number).encode()
                entry = tarfile.TarInfo(f"{number:06d}.txt")
                entry.size = len(content)
                tar.addfile(entry, BytesIO(content))
    return paths


def number_of(sample: Any) -> int:
    return int(sample["txt"])


def web(shards: list[str], shuffle: Callable[[Any], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return shuffle(wds.WebDataset(shards, shardshuffle=4, seed=7)).map(number_of)


def test_a_kill_leaves_a_seeded_webdataset_as_it_was(shards: list[str]) -> None:
    def make() -> Any:
        return web(shards, lambda one: one.compose(wds.detshuffle(30, seed=42)))

    options = {"batch_size": 8, "num_workers": 2}
    expected = streams(torch.utils.data.DataLoader(make(), **options), 2, hurt=False)
    loader = DataLoader(make(), **options)
    assert streams(loader, 2, hurt=True) == expected
    assert [one.exact for one in loader.incidents] == [True, True]


def test_a_kill_in_a_webdataset_shuffled_by_the_time_is_told_with_what_to_do(
    shards: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "holdfast"):
        loader = DataLoader(web(shards, lambda one: one.shuffle(30)), batch_size=8, num_workers=2)
        (found,) = streams(loader, 1, hurt=True)
    assert len(found) == SIZE // 8
    (incident,) = loader.incidents
    assert incident.exact is False
    assert "this stream is not deterministic" in incident.action
    assert ".compose(wds.detshuffle(1000, seed=42))" in caplog.text
    assert "nothing lost" not in caplog.text
