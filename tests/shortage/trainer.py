"""A trainer under a limit: says what it got, as a hash, and how it went."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.utils.data

import holdfast
from tests.shortage.datasets import KINDS, WORKERS
from tests.support.groups import MemoryGroup

LOADERS: dict[str, Any] = {
    "torch": torch.utils.data.DataLoader,
    "holdfast": holdfast.DataLoader,
}


def stream(
    which: str,
    kind: str,
    *,
    harmless: bool = False,
    each: Callable[[int], None] = lambda number: None,
) -> tuple[str, Any]:
    """The hash of all batches, and the loader; `each` is called after every batch."""
    torch.manual_seed(1)
    dataset = KINDS[kind](harmless=harmless)
    loader = LOADERS[which](dataset, num_workers=WORKERS, **dataset.options)
    seen = hashlib.sha256()
    for number, batch in enumerate(loader):
        seen.update(batch.numpy().tobytes())
        time.sleep(0.005)  # a step
        each(number)
    return seen.hexdigest(), loader


def rest(kind: str, group: MemoryGroup) -> int:
    """The most that a run with the harmless form has in use: trainer, nursery and workers."""
    used: list[int] = []
    stream("holdfast", kind, harmless=True, each=lambda number: used.append(group.used()))
    return max(used)


def main() -> None:
    which, kind, *group = sys.argv[1:]
    told: dict[str, Any]
    if which == "rest":
        told = {"used": rest(kind, MemoryGroup(Path(group[0]), int(group[1])))}
    else:
        found, loader = stream(which, kind)
        told = {"hash": found}
        if which == "holdfast":
            told["stats"] = loader.stats()
            told["incidents"] = [str(one) for one in loader.incidents]
    print(json.dumps(told))


if __name__ == "__main__":
    main()
