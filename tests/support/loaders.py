"""The loaders under test, and what every test module needs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch.utils.data

Loader = Callable[..., Any]
STOCK = torch.utils.data.DataLoader
T_co = TypeVar("T_co", covariant=True)


def holdfast_loader() -> Loader:
    """Imported only when asked for, so that a broken holdfast fails tests one by one and stock's
    still run."""
    from holdfast import DataLoader

    return DataLoader


class Installed(STOCK[T_co]):  # type: ignore[valid-type, misc]
    """Stock's, with our engine installed whenever it is asked for an iterator, and at no other time: others are
    compared with it."""

    def __iter__(self) -> Any:
        from holdfast import install

        with install():
            return super().__iter__()

    def _get_iterator(self) -> Any:
        from holdfast import install

        with install():
            return super()._get_iterator()


Installed.__name__ = STOCK.__name__  # as messages call it


def loader_named(which: str) -> Loader:
    return {"stock": lambda: STOCK, "holdfast": holdfast_loader, "installed": lambda: Installed}[
        which
    ]()


THOROUGH = os.environ.get("HOLDFAST_THOROUGH") == "1"
