"""What is loaded: eight workloads, each of which leans on another part of a loader.

The data is made once and indexed afterwards, so that no measurement is about random numbers. Every
dataset is endless for all practical purposes (it wraps around its pool); a measurement stops when
it has seen enough. Batches come in the order of their number, `0, 1, 2, …`, from every loader:
that makes them comparable with `Workload.batch(number)`, which makes the same batch without one.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

Batch = Any
ENDLESS = 10_000_000  # batches


class Samples(Dataset[Any]):
    """Map-style and endless: sample `i` is made from item `i` of the pool, round and round."""

    def __init__(
        self, pool: Sequence[Any] | Tensor, batch_size: int, make: Callable[[Any], Any]
    ) -> None:
        self.pool = pool
        self.size = len(pool)
        self.length = batch_size * ENDLESS
        self.make = make

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.make(self.pool[index % self.size])


class Stream(IterableDataset[Any]):
    """Records in blocks of one batch; with n workers, each reads every n-th block, as it would
    read every n-th file. So batches come in the same order whatever the number of workers."""

    def __init__(
        self, pool: Sequence[Any] | Tensor, batch_size: int, make: Callable[[Any], Any]
    ) -> None:
        self.pool = pool
        self.batch_size = batch_size
        self.make = make

    def block(self, number: int) -> Iterator[Any]:
        start = number * self.batch_size
        for index in range(start, start + self.batch_size):
            yield self.make(self.pool[index % len(self.pool)])

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for number in range(first, ENDLESS, step):
            yield from self.block(number)


@dataclass(frozen=True)
class Workload:
    name: str
    about: str
    batch_size: int
    build: Callable[[int], Dataset[Any]]
    """From the batch size; called in the process that is measured, before the clock starts."""
    collate_fn: Callable[[list[Any]], Batch] | None = None
    first: Callable[[Batch], Tensor] = field(default=lambda batch: batch)
    """The tensor of which the consumer touches one element."""

    @cached_property
    def dataset(self) -> Dataset[Any]:
        return self.build(self.batch_size)

    @cached_property
    def batch_bytes(self) -> int:
        """The bytes of tensors in a batch, on average."""
        return sum(tensor_bytes(self.batch(number)) for number in range(4)) // 4

    def batch(self, number: int) -> Batch:
        """Batch `number`, fetched and collated in this process."""
        dataset = self.dataset
        if isinstance(dataset, Stream):
            samples = list(dataset.block(number))
        else:
            start = number * self.batch_size
            samples = [dataset[index] for index in range(start, start + self.batch_size)]
        return (self.collate_fn or default_collate)(samples)


def tensor_bytes(batch: Batch) -> int:
    if isinstance(batch, Tensor):
        return batch.nbytes
    if isinstance(batch, dict):
        return sum(tensor_bytes(value) for value in batch.values())
    return 0


def same(item: Any) -> Any:
    return item


def fresh(item: Tensor) -> Tensor:
    """In memory of its own, as a decoder would leave it."""
    return item.clone()


def big(batch_size: int) -> Samples:
    return Samples(_floats(16, 1_310_720), batch_size, fresh)  # 5 MiB each


def image(batch_size: int) -> Samples:
    return Samples(_floats(128, 3, 224, 224), batch_size, fresh)


def tiny(batch_size: int) -> Samples:
    return Samples(_floats(4096, 4), batch_size, same)


def tokens(batch_size: int) -> Samples:
    return Samples(_integers(1024, 512), batch_size, same)


def nested(batch_size: int) -> Samples:
    columns = {f"feature_{n:02}": _floats(512, 32, seed=n) for n in range(20)}
    rows = [{name: column[row] for name, column in columns.items()} for row in range(512)]
    return Samples(rows, batch_size, dict)


def ragged(batch_size: int) -> Samples:
    lengths = random.Random(0)
    ids = _integers(1024, 256)
    texts = [ids[row, : lengths.randint(16, 256)] for row in range(len(ids))]
    rows = [{"ids": text, "text": f"sentence {n}"} for n, text in enumerate(texts)]
    return Samples(rows, batch_size, dict)


def pad(samples: list[dict[str, Any]]) -> dict[str, Any]:
    texts = [sample["ids"] for sample in samples]
    return {
        "ids": pad_sequence(texts, batch_first=True),
        "lengths": torch.tensor([len(text) for text in texts]),
        "text": [sample["text"] for sample in samples],
    }


def jpeg(batch_size: int) -> Samples:
    from PIL import Image

    noise = np.random.default_rng(0)
    files = []
    for _ in range(64):
        # Coarse noise, enlarged: compresses like a photograph, not like snow.
        coarse = noise.integers(0, 256, (30, 40, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(coarse).resize((400, 300), Image.Resampling.BICUBIC).save(file, "JPEG")
        files.append(file.getvalue())
    return Samples(files, batch_size, decode)


def decode(file: bytes) -> Tensor:
    """Decode, resize the shorter side to 256, crop the middle 224 × 224, scale to [0, 1]."""
    from PIL import Image

    with Image.open(io.BytesIO(file)) as opened:
        picture = opened.convert("RGB")
    scale = 256 / min(picture.size)
    picture = picture.resize((round(picture.width * scale), round(picture.height * scale)))
    left, top = (picture.width - 224) // 2, (picture.height - 224) // 2
    pixels = np.asarray(picture.crop((left, top, left + 224, top + 224)))
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy()).float().div_(255)


def iterable(batch_size: int) -> Stream:
    pool = _integers(512, 3, 64, 64).remainder_(256).to(torch.uint8)
    return Stream(pool, batch_size, scaled)


def scaled(record: Tensor) -> Tensor:
    return record.float().div_(255)


def _floats(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def _integers(*shape: int) -> Tensor:
    return torch.randint(0, 50_000, shape, generator=torch.Generator().manual_seed(0))


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("big", "8 samples of 5 MB", 8, big),
        Workload("image", "64 images, 3×224×224 float32", 64, image),
        Workload("tiny", "32 samples of 4 floats", 32, tiny),
        Workload("tokens", "32 samples of 512 int64", 32, tokens),
        Workload("ragged", "32 texts, padded, with strings", 32, ragged, pad, lambda b: b["ids"]),
        Workload("nested", "32 dicts of 20 tensors", 32, nested, first=lambda b: b["feature_00"]),
        Workload("jpeg", "32 JPEGs: decode, resize, crop", 32, jpeg),
        Workload("iterable", "32 records of a stream, 3×64×64", 32, iterable),
    )
}
