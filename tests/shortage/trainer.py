"""A trainer under a limit: says what it got, as a hash, and how it went."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from typing import Any

import torch
import torch.utils.data

import holdfast
from tests.shortage.datasets import KINDS, OPTIONS


def stream(loader_class: Any, kind: str, **more: Any) -> tuple[str, Any]:
    """The hash of all batches, and the loader."""
    torch.manual_seed(1)
    loader = loader_class(KINDS[kind](), num_workers=2, **OPTIONS[kind], **more)
    seen = hashlib.sha256()
    for batch in loader:
        seen.update(batch.numpy().tobytes())
        time.sleep(0.005)  # a step
    return seen.hexdigest(), loader


def main() -> None:
    which, kind, *method = sys.argv[1:]
    more = {"multiprocessing_context": method[0]} if method else {}
    told: dict[str, Any]
    if which == "torch":
        told = {"hash": stream(torch.utils.data.DataLoader, kind, **more)[0]}
    else:
        found, loader = stream(holdfast.DataLoader, kind, **more)
        told = {
            "hash": found,
            "stats": loader.stats(),
            "incidents": [str(one) for one in loader.incidents],
        }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
