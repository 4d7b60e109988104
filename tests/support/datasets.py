"""Datasets whose samples tell where and with which random state they were made.

`DATASETS` names every dataset the differential tests may draw; each entry makes a fresh one of a
given size.
"""

from __future__ import annotations

import os
import random
import time
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, MapDataPipe, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Record:
    """A user class that only pickle knows how to carry."""

    index: int
    name: str
    values: torch.Tensor


def reveal(index: Any) -> dict[str, Any]:
    """One sample that shows its key, its worker and one draw of each random generator."""
    info = get_worker_info()
    return {
        "index": int(index),
        "key type": type(index).__name__,
        "worker": -1 if info is None else info.id,
        "workers": 0 if info is None else info.num_workers,
        "seed": 0 if info is None else info.seed,
        "torch seed": torch.initial_seed() % 2**63 if info is not None else 0,
        "torch": torch.rand(2),
        "random": random.random(),
        "numpy": np.random.rand(),
    }


class Numbers(Dataset[int]):
    """0, 1, 2, …; the plainest dataset there is."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Revealing(Numbers):
    """Samples that reveal worker and random state; `mark` may be set by a worker_init_fn."""

    mark = 0

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, (list, tuple)):
            return [self[i] for i in index]
        info = get_worker_info()
        is_the_workers_own = True if info is None else info.dataset is self
        return {**reveal(index), "mark": self.mark, "own": is_the_workers_own}


class RevealingInBulk(Revealing):
    """Asked through `__getitems__`; says how many it was asked for at once."""

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        return [{**self[index], "asked for": len(indices)} for index in indices]


class Images(Numbers):
    def __getitem__(self, index: int) -> Any:
        pixels = torch.arange(48, dtype=torch.float32).reshape(3, 4, 4) + index
        return pixels, index % 3


class ChannelsLast(Numbers):
    def __getitem__(self, index: int) -> Any:
        pixels = torch.arange(48, dtype=torch.float32).reshape(1, 3, 4, 4) + index
        return pixels.to(memory_format=torch.channels_last)


class LargeImages(Numbers):
    """600 kB a sample: a loader that treats large samples in another way must not show it."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((3, 224, 224), float(index)), f"image {index}"


class Arrays(Numbers):
    def __getitem__(self, index: int) -> Any:
        return {
            "float": np.full((2, 3), index, dtype=np.float32),
            "int": np.arange(4, dtype=np.int16) + index,
            "bool": np.array([index % 2 == 0]),
            "scalar": np.float64(index),
            "unsigned": np.uint8(index),
        }


class Words(Numbers):
    def __getitem__(self, index: int) -> Any:
        return {
            "text": f"sample {index} ✓",
            "bytes": bytes([index]),
            "float": index / 2,
            "bool": index % 2 == 0,
        }


class Nested(Numbers):
    def __getitem__(self, index: int) -> Any:
        return {
            "pair": Pair(torch.tensor([index]), {"deep": [index, (index, str(index))]}),
            "list": [torch.zeros(0), torch.tensor(index)],
            "ordered": OrderedDict(b=index, a=torch.ones(2, 2)),
        }


class Ragged(Numbers):
    """One to three values a sample: default collation must refuse it."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((index % 3 + 1,), index)


class Objects(Numbers):
    """Things that only a collate_fn of one's own can take."""

    def __getitem__(self, index: int) -> Any:
        counted: defaultdict[str, list[int]] = defaultdict(list)
        counted["seen"].append(index)
        return {
            "record": Record(index, f"r{index}", torch.arange(index)),
            "nothing": None,
            "set": {index, index + 1},
            "counted": counted,
            "complex": complex(index, -index),
            "structured": np.array([(index, 0.5)], dtype=[("a", "i4"), ("b", "f8")]),
            "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
            "when": np.datetime64("2026-01-01") + index,
            "path": Path("data") / str(index),
            "range": range(index),
            "slice": slice(index),
        }


class WithNone(Numbers):
    """Every third sample has no label: default collation must refuse it."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index), None if index % 3 == 2 else index


class Views(Numbers):
    """Tensors that are not simply contiguous."""

    def __getitem__(self, index: int) -> Any:
        base = torch.arange(24.0).reshape(4, 6) + index
        return {
            "transposed": base.t(),
            "sliced": base[1:3, ::2],
            "expanded": torch.tensor([float(index)]).expand(3, 2),
            "zero-size": torch.empty(0, 5),
            "zero-dim": torch.tensor(index),
        }


DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


class Dtypes(Numbers):
    def __getitem__(self, index: int) -> Any:
        return {str(dtype): torch.arange(3).add(index).to(dtype) for dtype in DTYPES}


class OneString(Exception):
    """A user's exception that torch can rebuild: it takes one string."""


ERRORS: tuple[Callable[[int], Exception], ...] = (
    lambda index: ValueError(f"value {index} is wrong"),
    lambda index: KeyError(f"key {index}"),
    lambda index: OneString(f"user error {index}"),
    lambda index: IndexError(f"index {index}"),
    lambda index: NotImplementedError(),
    lambda index: ZeroDivisionError("many\nlines\n"),
)


class Raising(Revealing):
    """Raises on every third sample, a different exception each time, after a random draw."""

    def __getitem__(self, index: Any) -> Any:
        sample = super().__getitem__(index)
        if not isinstance(index, (list, tuple)) and index % 3 == 1:
            raise ERRORS[index // 3 % len(ERRORS)](index)
        return sample


class RaisingWithCause(Numbers):
    def __getitem__(self, index: int) -> int:
        try:
            return [0, 1, 2][index]
        except IndexError as missing:
            if index % 2:
                raise LookupError(f"no sample {index}") from missing
            raise


class RaisingInBulk(Numbers):
    def __getitems__(self, indices: list[int]) -> list[int]:
        if 4 in indices:
            raise OneString(f"not these: {indices}")
        return indices


class Stream(IterableDataset[Any]):
    """Yields revealing samples.

    how: "whole" every worker yields all of it; "sharded" each its share; "uneven" worker k stops 2
    k samples early; "late" worker 0 yields nothing. claims: what len() says (None: no length).
    """

    def __init__(self, size: int, how: str = "whole", claims: int | None = None) -> None:
        self.size = size
        self.how = how
        self.claims = claims
        self.mark = 0

    def indices(self) -> range:
        info = get_worker_info()
        if info is None or self.how == "whole":
            return range(self.size)
        if self.how == "sharded":
            return range(info.id, self.size, info.num_workers)
        if self.how == "late":
            return range(self.size if info.id else 0)
        return range(max(0, self.size - 2 * info.id))

    def __iter__(self) -> Iterator[Any]:
        for index in self.indices():
            yield {**reveal(index), "mark": self.mark}


class SizedStream(Stream):
    def __len__(self) -> int:
        assert self.claims is not None
        return self.claims


class QuietStream(Stream):
    """A stream without random draws, for loaders whose order is a matter of luck."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for index in self.indices():
            yield torch.tensor([index, -1 if info is None else info.id])


class StreamOfItsOwn(IterableDataset[Any]):
    """The dataset is its own iterator, as people write it who do not know generators."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.position = 0

    def __iter__(self) -> StreamOfItsOwn:
        self.position = 0
        return self

    def __next__(self) -> Any:
        if self.position >= self.size:
            raise StopIteration
        self.position += 1
        return reveal(self.position)


class RaisingStream(IterableDataset[Any]):
    """Raises at its fourth sample, or already in `__iter__`."""

    def __init__(self, size: int, at_once: bool = False) -> None:
        self.size = size
        self.at_once = at_once

    def __iter__(self) -> Iterator[Any]:
        if self.at_once:
            raise OneString("no stream today")
        return self.samples()

    def samples(self) -> Iterator[Any]:
        for index in range(self.size):
            if index == 3:
                raise OneString("stream broke at 3")
            yield reveal(index)


def _doubled(sample: Any) -> Any:
    return sample, 2 * sample, torch.rand(1), random.random()


def shuffled_pipe(size: int) -> Any:
    return IterableWrapper(range(size)).shuffle().sharding_filter().map(_doubled)


def plain_pipe(size: int) -> Any:
    return IterableWrapper(range(size)).map(_doubled)


def sequence_pipe(size: int) -> MapDataPipe[Any]:
    return SequenceWrapper(range(size)).map(_doubled)


# Map-style datasets whose samples depend on the index only.
QUIET_MAP: dict[str, Callable[[int], Any]] = {
    "Numbers": Numbers,
    "Images": Images,
    "ChannelsLast": ChannelsLast,
    "LargeImages": LargeImages,
    "Arrays": Arrays,
    "Words": Words,
    "Nested": Nested,
    "Ragged": Ragged,
    "Objects": Objects,
    "WithNone": WithNone,
    "Views": Views,
    "Dtypes": Dtypes,
    "RaisingWithCause": RaisingWithCause,
    "RaisingInBulk": RaisingInBulk,
}
MAP: dict[str, Callable[[int], Any]] = {
    "Revealing": Revealing,
    "RevealingInBulk": RevealingInBulk,
    "Raising": Raising,
    "sequence_pipe": sequence_pipe,
    **QUIET_MAP,
}
QUIET_ITERABLE: dict[str, Callable[[int], Any]] = {
    f"quiet stream, {how}": (lambda size, how=how: QuietStream(size, how))
    for how in ("whole", "sharded", "uneven", "late")
}
ITERABLE: dict[str, Callable[[int], Any]] = {
    **{
        f"stream, {how}": (lambda size, how=how: Stream(size, how))
        for how in ("whole", "sharded", "uneven", "late")
    },
    "stream that claims its size": lambda size: SizedStream(size, "sharded", claims=size),
    "stream that claims too little": lambda size: SizedStream(size, "whole", claims=size // 2),
    "StreamOfItsOwn": StreamOfItsOwn,
    "RaisingStream": RaisingStream,
    "shuffled_pipe": shuffled_pipe,
    "plain_pipe": plain_pipe,
    **QUIET_ITERABLE,
}
DATASETS: dict[str, Callable[[int], Any]] = {
    **MAP,
    **ITERABLE,
    "raises in iter": lambda size: RaisingStream(size, at_once=True),
}


# --- datasets of single contract tests ------------------------------------------------------------


class Pids(Numbers):
    """(index, pid, worker id) of the process that made the sample."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return index, os.getpid(), -1 if info is None else info.id


class SlowInOneWorker(Pids):
    """Worker `slow` takes `delay` seconds for a sample."""

    def __init__(self, size: int, slow: int = 0, delay: float = 0.2) -> None:
        super().__init__(size)
        self.slow = slow
        self.delay = delay

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        if info is not None and info.id == self.slow:
            time.sleep(self.delay)
        return super().__getitem__(index)


class Meeting(Numbers):
    """Waits in every first sample until all workers have come to theirs."""

    def __init__(self, size: int, barrier: Any) -> None:
        super().__init__(size)
        self.barrier = barrier
        self.met = False

    def __getitem__(self, index: int) -> int:
        if not self.met:
            self.barrier.wait(timeout=30)
            self.met = True
        return index


class StreamMeeting(IterableDataset[int]):
    def __init__(self, size: int, barrier: Any) -> None:
        self.size = size
        self.barrier = barrier

    def __iter__(self) -> Iterator[int]:
        self.barrier.wait(timeout=30)
        yield from range(self.size)


class Counting(Numbers):
    """Counts the samples that were asked for, over all processes."""

    def __init__(self, size: int, counter: Any) -> None:
        super().__init__(size)
        self.counter = counter

    def __getitem__(self, index: int) -> int:
        with self.counter.get_lock():
            self.counter.value += 1
        return index


class Telling(Numbers):
    """Returns what the shared value says at the time of the sample."""

    def __init__(self, size: int, value: Any) -> None:
        super().__init__(size)
        self.value = value

    def __getitem__(self, index: int) -> int:
        return self.value.value


class Sleeper(Numbers):
    """Sleeps for an hour on one sample."""

    def __init__(self, size: int, at: int) -> None:
        super().__init__(size)
        self.at = at

    def __getitem__(self, index: int) -> int:
        if index == self.at:
            time.sleep(3600)
        return index


class Calls(Numbers):
    """Returns whatever a picklable function makes of the index."""

    def __init__(self, size: int, function: Callable[[Any], Any]) -> None:
        super().__init__(size)
        self.function = function

    def __getitem__(self, index: Any) -> Any:
        return self.function(index)


class Holder:
    """An attribute on the way to something that does not pickle."""

    def __init__(self, steps: list[Any]) -> None:
        self.steps = steps


class Unpicklable(Numbers):
    """`dataset.transform.steps[1]` is a local function."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.transform = Holder([len, lambda sample: sample])
