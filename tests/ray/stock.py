"""What stock torch's process workers give, as a command: ``python -m tests.ray.stock QUESTION`` prints digests.

A process of its own, because torch forks its workers: in a process with Ray, whose threads may hold any lock just then,
such a worker may hang or crash.
"""

from __future__ import annotations

import base64
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
import torch.utils.data

from tests.ray.datasets import digest
from tests.support import warm
from tests.support.golden import asked_once

__all__ = ["stock"]

ROOT = Path(__file__).parents[2]
SECONDS = 60


def stock(dataset: Any, epochs: int = 1, num_workers: int = 2, **options: Any) -> Any:
    """The digest of an epoch, or a list of them."""
    question = dataset, epochs, {"num_workers": num_workers, **options}
    found = asked_once("ray", question, lambda: _asked(question))
    return found[0] if epochs == 1 else found


def _asked(question: Any) -> list[str]:
    command = ["-m", __name__, base64.b85encode(pickle.dumps(question)).decode()]
    ended = warm.run(command, timeout=SECONDS, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)  # type: ignore[no-any-return]


def _answer(dataset: Any, epochs: int, options: dict[str, Any]) -> list[str]:
    torch.manual_seed(7)
    loader = torch.utils.data.DataLoader(dataset, **options)
    return [digest(loader) for _ in range(epochs)]


if __name__ == "__main__":
    assert "ray" not in sys.modules
    print(json.dumps(_answer(*pickle.loads(base64.b85decode(sys.argv[1])))))
