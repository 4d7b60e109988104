"""The loaders under test, and what every test module needs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.utils.data

Loader = Callable[..., Any]
STOCK = torch.utils.data.DataLoader


def holdfast_loader() -> Loader:
    """Imported only when asked for, so that a broken holdfast fails tests one by one and stock's
    still run."""
    from holdfast import DataLoader

    return DataLoader


def loader_named(which: str) -> Loader:
    return STOCK if which == "stock" else holdfast_loader()


THOROUGH = os.environ.get("HOLDFAST_THOROUGH") == "1"
