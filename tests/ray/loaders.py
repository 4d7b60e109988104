"""The same batches from stock torch's process workers and from actors of a Ray cluster."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.data

import holdfast
from tests.ray.datasets import digest

__all__ = ["on_ray", "stock"]


def stock(dataset: Any, epochs: int = 1, num_workers: int = 2, **options: Any) -> Any:
    """What stock torch gives: the digest of an epoch, or a list of them."""
    torch.manual_seed(7)
    loader = torch.utils.data.DataLoader(dataset, num_workers=num_workers, **options)
    found = [digest(loader) for _ in range(epochs)]
    return found[0] if epochs == 1 else found


def on_ray(dataset: Any, num_workers: int = 2, **options: Any) -> Any:
    torch.manual_seed(7)
    return holdfast.DataLoader(dataset, num_workers=num_workers, worker_method="ray", **options)
