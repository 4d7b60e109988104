"""What trainers in these tests load, and how they compare it."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.utils.data
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import holdfast
from tests.support import slate
from tests.support.fingerprint import fingerprint

Stock = torch.utils.data.DataLoader
slate.make_it_the_default(Stock, holdfast.DataLoader)
SECONDS = 30.0  # after which a wait has failed


class Pair(NamedTuple):
    image: torch.Tensor
    label: torch.Tensor


class Custom:
    """Has a method for it, and says which thread has called it, on which device."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value
        self.by = ""

    def pin_memory(self) -> Custom:
        self.value = self.value.pin_memory()
        self.by = f"device {torch.accelerator.current_device_index()}"
        return self


class Images(torch.utils.data.Dataset[torch.Tensor]):
    """Large enough for blocks of the arena, and random as augmentation is."""

    def __init__(self, size: int = 24, nbytes: int = 1 << 16) -> None:
        self.size, self.nbytes = size, nbytes

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        image = torch.full((self.nbytes,), index, dtype=torch.uint8)
        image[:8] = torch.randint(256, (8,), dtype=torch.uint8)
        return image


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    def __init__(self, size: int = 24) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, self.size, step):
            yield torch.full((1 << 15,), number, dtype=torch.uint8) + torch.randint(2, (1,))


def of_all_kinds(samples: list[torch.Tensor]) -> dict[str, Any]:
    """A collate function whose batches hold everything that torch can pin, and some that it cannot."""
    whole = torch.stack(samples)
    return {
        "tensor": whole,
        "list": [whole[:1].clone(), whole[:, :4].clone()],
        "pair": Pair(whole[:, 1].clone(), whole[:, 2].clone()),
        "tuple": (whole[:, 3].clone(), "words", 7),
        "words": "words",
        "array": whole.numpy().copy(),
        "packed": pack_sequence([whole[0].float(), whole[0, :3].float()]),
        "custom": Custom(whole + 1),
        "ordered": collections.OrderedDict(one=whole[:1].clone()),
        "empty": torch.empty(0),
    }


def places(value: Any) -> Any:
    """Where it is pinned, in the form of the value."""
    if isinstance(value, torch.Tensor):
        return value.is_pinned()
    if isinstance(value, PackedSequence):
        return [value.data.is_pinned(), value.batch_sizes.is_pinned()]
    if isinstance(value, Custom):
        return value.value.is_pinned(), value.by
    if isinstance(value, dict):
        return {key: places(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [places(item) for item in value]
    return type(value).__name__


def stream_of(
    loader: Any, meanwhile: Callable[[int, Any], None] = lambda number, iterator: None
) -> str:
    """A hash of all batches, and of where they are pinned. `meanwhile` is called after each."""
    digest = hashlib.sha256()
    iterator = iter(loader)
    for number, batch in enumerate(iterator):
        digest.update(repr((fingerprint(batch), places(batch))).encode())
        meanwhile(number, iterator)
    return digest.hexdigest()


def kill(iterator: Any, worker: int) -> None:
    pid = iterator._workers[worker].pid
    with contextlib.suppress(ProcessLookupError):  # it has died, or had nothing left to do
        if pid is not None:
            os.kill(pid, signal.SIGKILL)


def pinning_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "holdfast-pin"]


def eventually(condition: Callable[[], Any]) -> bool:
    deadline = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True
